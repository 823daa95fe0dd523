"""Makes a runnable program from the example in the docstring of a statement.

An example is one statement in which every operand has its type. This module adds the rest: eight ranks in a line
(`@mesh`, and `@other` in another order), inputs, buffers, a handle, and a loop. A statement of single ranks needs
matching statements on other ranks, so `ALONE` has a complete program for each of those.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import torch

from hostir.ir import parse
from hostir.ir.host_ops import For
from hostir.ir.op import Codec, Phase, Statement, codecs_of
from hostir.ir.program import Program
from hostir.ir.text import VERSION

HEAD = f"hostir {VERSION}\nmesh @mesh [didx] = 0 1 2 3 4 5 6 7\n"
OTHER = "mesh @other [didx] = 3 4 5 6 7 0 1 2\n"
IN_FLIGHT = ("%x: f32[8@didx, 32]", "%y: f32[8, 32] = allocate", "%h = allgather %x -> %y over didx")
OPERAND = re.compile(r"%(\w+): (handle|\w+\[[^\]]*\](?: partial\([^)]*\))?(?: on @\w+)?)")

# Statements of single ranks ---------------------------------------------------------------------------------------
KEPT = """program @kept(%a: bf16[4, 32]) -> (%y) {
  %x: bf16[4, 32] = allocate_symmetric
  %y: bf16[4, 32] = allocate
  copy %a -> %x
  copy %x -> %y
}"""
PLACES = """program @places(%x: f32[8@didx, 32], %b: f32[8, 32]) -> (%y) {
  %r = rank of %x over didx
  %b_r = chunk %b[%r of 8]
  %y: f32[8@didx, 32] = allocate
  add %x, %b_r -> %y
}"""
PULLED = """program @pulled(%a: f32[8@didx, 32]) -> (%y) {
  %x: f32[8@didx, 32] = allocate_symmetric
  %y: f32[1, 32] = allocate
  barrier of %x over didx
  copy %a -> %x
  barrier of %x over didx
  get %x from 3 over didx -> %y
}"""
PUSHED = """program @pushed(%x: f32[8@didx, 32]) -> (%z) {
  %y: f32[8@didx, 32] = allocate_symmetric
  %flags: flag[8] = allocate_symmetric
  %z: f32[8@didx, 32] = allocate
  %r = rank of %x over didx
  barrier of %x over didx
  put %x -> %y at (%r + 1) % 8 over didx by 16 sms
  signal %flags[0] = 1 at (%r + 1) % 8 over didx by 1 sms
  wait_signal %flags[0] >= 1
  copy %y -> %z
}"""
SENT = """program @sent(%x: f32[8@didx, 32]) -> (%y) {
  %r = rank of %x over didx
  %y: f32[8@didx, 32] = allocate
  copy %x -> %y
  if %r == 0 {
    %h = send %x to 1 over didx
    wait %h
  }
  if %r == 1 {
    %h = recv %y from 0 over didx
    wait %h
  }
}"""
PASSED_ON = """program @passed_on(%x: f32[8@didx, 32]) -> (%y) {
  %r = rank of %x over didx
  %y: f32[8@didx, 32] = allocate
  %h = exchange %x to (%r + 1) % 8, %y from (%r + 7) % 8 over didx
  wait %h
}"""


def _passed_on(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


def _sent(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:1], x[:1], x[2:]])


# By keyword: a program around the example, and its result for unsharded tensors.
ALONE: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "allocate_symmetric": (KEPT, lambda a: a),
    "rank": (PLACES, torch.add),
    "get": (PULLED, lambda a: a[3:4]),
    "put": (PUSHED, _passed_on),
    "signal": (PUSHED, _passed_on),
    "wait_signal": (PUSHED, _passed_on),
    "barrier": (PUSHED, _passed_on),
    "send": (SENT, _sent),
    "recv": (SENT, _sent),
    "exchange": (PASSED_ON, _passed_on),
}


def example_of(cls: type[Statement]) -> str:
    """Return the statement after `Example:` in the docstring; empty without an example."""
    return inspect.cleandoc(cls.__doc__ or "").partition("Example:")[2].strip()


def example_program(cls: type[Statement]) -> Program:
    """Return a program around the example of a statement class; its output is the result of the example."""
    if cls.keyword() in ALONE:
        return parse(f"{HEAD}{ALONE[cls.keyword()][0]}\n", f"the example of {cls.keyword()}")
    example = example_of(cls)
    types = {m[1]: m[2] for m in OPERAND.finditer(example)}
    bare = OPERAND.sub(r"%\1", example)
    codecs = set(codecs_of(cls).values())
    fusion = Phase.HOST not in cls.phases or (Codec.WRITE in codecs and "->" not in bare)
    defined = match[1] if (match := re.match(r"%(\w+) =", bare)) else ""
    written = match[1] if (match := re.search(r"-> %(\w+)", bare)) else ""

    inputs: list[str] = []
    lines: list[str] = []
    for name, type in types.items():
        if type == "handle":
            inputs.append(IN_FLIGHT[0])
            lines += IN_FLIGHT[1:]
        elif name == written or Codec.FREE in codecs:
            lines.append(f"%{name}: {type} = allocate")
        elif name != defined:
            inputs.append(f"%{name}: {type}")
    output = written or (defined if defined in types else "")
    if Codec.DEFINE in codecs and (not codecs & {Codec.READ, Codec.ALIAS} or "partial" in types.get(output, "")):
        output = ""  # the result is undefined
    statement = bare.replace(f"%{defined} =", f"%{defined}: {types[defined]} =", 1) if defined in types else bare
    if defined and written:
        statement += f"\nwait %{defined}"
    if re.search(r"%i\b", bare) and cls is not For:
        if output:
            lines.append(f"%last: {types[output]} = allocate")
            statement += f"\ncopy %{output} -> %last"
            output = "last"
        statement = f"for %i in 0..4 {{ {statement} }}"
    head = f"{'fusion' if fusion else 'program'} @example({', '.join(inputs)}) -> ({f'%{output}' if output else ''})"
    mesh, streams = OTHER if "@other" in example else "", "" if fusion else " streams 4"
    text = "\n".join([f"{HEAD}{mesh}{head}{streams} {{", *lines, statement, "}"])
    return parse(text, f"the example of {cls.keyword()}")
