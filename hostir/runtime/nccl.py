"""Collectives and messages by NCCL, through torch's process groups."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from hostir.runtime.plan import CALLER, Allocate, Collective, Messages, Recording, Step, Symmetric, View, Wait


def inlined(recording: Recording) -> frozenset[int]:
    """The handles of collectives that run on the caller's stream itself: it waits for them at once, and is alone.

    That saves the host two events, and the device the way from stream to stream and back.
    """
    ops = [op for op in recording.ops if not isinstance(op, Allocate | Symmetric | View)]
    if any(op.stream != CALLER for op in ops):
        return frozenset()
    waits = [op.handle for op in ops if isinstance(op, Wait)]
    pairs = pairwise(ops)
    at_once = (a.handle for a, b in pairs if isinstance(a, Collective) and isinstance(b, Wait) and a.handle == b.handle)
    return frozenset(handle for handle in at_once if waits.count(handle) == 1)


def collective(
    op: Collective, registers: list[Any], group: Any, members: tuple[int, ...], inline: bool = False
) -> Step:
    """The closure that starts a collective; its Work goes to the handle's register. `inline`: on the current stream.

    A group numbers its ranks in ascending order. A team in another order takes the calls that name every block.
    """
    x, out, handle = op.x, op.out, op.handle
    order = [op.team.index(rank) for rank in members]
    if op.kind == "allreduce":
        options = _options(AllreduceOptions, inline)

        def allreduce() -> None:
            registers[handle] = group.allreduce([registers[out]], options)

        return allreduce
    if order != sorted(order):
        return _block_by_block(op, registers, group, order, inline)
    if op.kind == "alltoall":
        options = _options(AllToAllOptions, inline)

        def alltoall() -> None:
            registers[handle] = group.alltoall_base(registers[out], registers[x], [], [], options)

        return alltoall
    gather = op.kind == "allgather"
    call = group._allgather_base if gather else group._reduce_scatter_base
    options = _options(AllgatherOptions if gather else ReduceScatterOptions, inline)

    def base() -> None:
        registers[handle] = call(registers[out], registers[x], options)

    return base


def _options(kind: Any, inline: bool) -> Any:
    options = kind()
    options.asyncOp = not inline  # else NCCL runs on the current stream, in the way of what follows
    return options


def _block_by_block(op: Collective, registers: list[Any], group: Any, order: list[int], inline: bool) -> Step:
    def blocks(register: int) -> list[torch.Tensor]:
        rows = registers[register].view(len(order), -1).unbind(0)
        return [rows[i] for i in order]

    def flat(register: int) -> torch.Tensor:
        return registers[register].view(-1)

    def step() -> None:
        if op.kind == "allgather":
            work = group.allgather([blocks(op.out)], [flat(op.x)], _options(AllgatherOptions, inline))
        elif op.kind == "reduce_scatter":
            options = _options(ReduceScatterOptions, inline)
            work = group.reduce_scatter([flat(op.out)], [blocks(op.x)], options)
        else:
            work = group.alltoall(blocks(op.out), blocks(op.x), _options(AllToAllOptions, inline))
        registers[op.handle] = work

    return step


def messages(op: Messages, registers: list[Any], group: Any, members: tuple[int, ...], device: torch.device) -> Step:
    """The closure that sends and receives all of an exchange's pieces as one NCCL group."""
    handle = op.handle
    sends = [(register, members.index(rank)) for register, rank in op.sends]
    receives = [(register, members.index(rank)) for register, rank in op.receives]

    def step() -> None:
        group._start_coalescing(device)
        for register, peer in sends:
            group.send([registers[register]], peer, 0)
        for register, peer in receives:
            group.recv([registers[register]], peer, 0)
        registers[handle] = group._end_coalescing(device)

    return step
