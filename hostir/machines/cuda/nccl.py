"""Collectives and messages by NCCL, through torch's process groups."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from hostir.machines.binding import Step
from hostir.plan.operations import CollectiveOp, MessagesOp


def collective(
    op: CollectiveOp, registers: list[Any], backend: Any, members: tuple[int, ...], inline: bool = False
) -> Step:
    """Return the step that starts a collective and puts torch's `Work` object into the handle's register.

    A process group numbers its ranks in ascending order. If the team has another order, the step passes a list of
    blocks in the order of the group.

    Args:
        op: the operation.
        registers: the registers of the plan.
        backend: the NCCL backend of the process group. It takes less host time than the methods of the group, which
            go through torch's dispatcher.
        members: the ranks of the group.
        inline: True to run the collective on the current stream instead of NCCL's internal stream.
    """
    x, out, handle = op.x, op.out, op.handle
    order = [op.team.index(rank) for rank in members]
    if op.communication == "allreduce":
        options = _options(AllreduceOptions, inline)

        def allreduce() -> None:
            registers[handle] = backend.allreduce([registers[out]], options)

        return allreduce
    if order != sorted(order):
        return _block_by_block(op, registers, backend, order, inline)
    if op.communication == "alltoall":
        options = _options(AllToAllOptions, inline)

        def alltoall() -> None:
            registers[handle] = backend.alltoall_base(registers[out], registers[x], [], [], options)

        return alltoall
    gather = op.communication == "allgather"
    call = backend._allgather_base if gather else backend._reduce_scatter_base
    options = _options(AllgatherOptions if gather else ReduceScatterOptions, inline)

    def base() -> None:
        registers[handle] = call(registers[out], registers[x], options)

    return base


def _options(options_class: Any, inline: bool) -> Any:
    options = options_class()
    options.asyncOp = not inline  # if False, NCCL runs on the current stream and delays the work that follows
    return options


def _block_by_block(op: CollectiveOp, registers: list[Any], backend: Any, order: list[int], inline: bool) -> Step:
    def blocks(register: int) -> list[torch.Tensor]:
        rows = registers[register].view(len(order), -1).unbind(0)
        return [rows[i] for i in order]

    def flat(register: int) -> torch.Tensor:
        return registers[register].view(-1)

    def step() -> None:
        if op.communication == "allgather":
            work = backend.allgather([blocks(op.out)], [flat(op.x)], _options(AllgatherOptions, inline))
        elif op.communication == "reduce_scatter":
            options = _options(ReduceScatterOptions, inline)
            work = backend.reduce_scatter([flat(op.out)], [blocks(op.x)], options)
        else:
            work = backend.alltoall(blocks(op.out), blocks(op.x), _options(AllToAllOptions, inline))
        registers[op.handle] = work

    return step


def messages(op: MessagesOp, registers: list[Any], group: Any, members: tuple[int, ...], device: torch.device) -> Step:
    """Return the step that sends and receives all pieces of an exchange in one NCCL group call.

    The step puts torch's `Work` object into the handle's register. `members` are the ranks of `group`.
    """
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
