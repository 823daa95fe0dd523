"""Small programs for the tests of executors, and a helper that returns an error message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError

FORK = "%user = current_stream\n  for %s in 0..2 { set_stream %s   synchronize %user }"
JOIN = "set_stream %user\n  for %s in 0..2 { synchronize %s }"
# A body for `alone`: a matmul and a relu on a worker stream.
BESIDE = """%user = current_stream
  %t: f32[4, 5] = allocate
  %c: f32[4, 5] = allocate
  set_stream 0
  synchronize %user
  matmul %a, %b -> %t
  relu %t -> %c
  set_stream %user
  synchronize 0
  free %t"""


def program(body: str, inputs: str, outputs: str = "%c", mesh: str = "0 1", streams: int = 2) -> Program:
    """Return the host program @p with this body."""
    head = f"hostir 1\nmesh @mesh [didx] = {mesh}\n"
    return parse(f"{head}program @p({inputs}) -> ({outputs}) streams {streams} {{\n  {body}\n}}\n", "p.hir")


def pipeline(ranks: int = 2, streams: int = 2) -> Program:
    """Return an all-gather + matmul in four slices on two streams."""
    mesh = " ".join(map(str, range(ranks)))
    body = f"""%a_full: f32[4, {ranks}, 3, 8] = allocate
  %c: f32[4, {ranks}, 3, 5] = allocate
  {FORK}
  for %i in 0..4 {{
    set_stream %i % 2
    %a_i = select %a[%i]
    %again = select %a[%i]
    %g_i = select %a_full[%i]
    %h = allgather %again -> %g_i over didx
    wait %h
    %c_i = select %c[%i]
    matmul %g_i, %b -> %c_i
  }}
  {JOIN}
  free %a_full"""
    return program(body, f"%a: f32[4, {ranks}@didx, 3, 8], %b: f32[8, 5]", mesh=mesh, streams=streams)


def alone(body: str, inputs: str = "%a: f32[4, 8], %b: f32[8, 5]", outputs: str = "%c", streams: int = 2) -> Program:
    """Return a program of one rank."""
    return program(body, inputs, outputs, mesh="0", streams=streams)


def said(function: Callable[[], object]) -> str:
    """Return the message of the HostIRError that a function must raise."""
    with pytest.raises(HostIRError) as caught:
        function()
    return str(caught.value)
