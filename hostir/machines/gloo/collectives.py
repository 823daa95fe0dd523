"""Collectives, transfers and messages between CPU processes by gloo.

Tensors of all dtypes are sent as bytes. The ranks sum in f32 or better, in the order of the team. So sums of bf16 are
rounded once, and every run gives the same bits.

The functions of communications take the operation, the registers of the plan, the process group, the ranks of the group
(`members`), and a function `finish` that waits until a collective has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from hostir.kernels.aten import add_up
from hostir.plan.operations import (
    CollectiveOp,
    MessagesOp,
)

Members = tuple[int, ...]
Finish = Callable[[Any], None]  # takes the Work of a collective, and returns once the collective has ended


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _blocks(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(-1).view(count, -1)


def _places(op: CollectiveOp, members: Members) -> list[int]:
    """Return the index in the team of each rank of the group, for the ranks in ascending order.

    A process group numbers its ranks in this order.
    """
    return [op.team.index(rank) for rank in members]


def _gather(x: torch.Tensor, blocks: Sequence[torch.Tensor], places: list[int], group: Any, finish: Finish) -> None:
    """All-gather: write the tensor `x` of the team's i-th rank to `blocks[i]`, for every i."""
    finish(group.allgather([[_bytes(blocks[i]) for i in places]], [_bytes(x)], AllgatherOptions()))


def _swap(x: torch.Tensor, places: list[int], group: Any, finish: Finish) -> torch.Tensor:
    """All-to-all: send block i of `x` to the team's i-th rank, for every i.

    Returns the received blocks as rows, in the order of the senders in the team.
    """
    sent = _blocks(x, len(places))[places].contiguous()
    received, ordered = torch.empty_like(sent), torch.empty_like(sent)
    finish(group.alltoall_base(_bytes(received), _bytes(sent), [], [], AllToAllOptions()))
    ordered[places] = received
    return ordered


def allgather(op: CollectiveOp, registers: list[Any], group: Any, members: Members, finish: Finish) -> None:
    """All-gather: every rank gets the parts of all ranks."""
    out = registers[op.out]
    _gather(registers[op.x], _blocks(out, len(members)).unbind(0), _places(op, members), group, finish)


def allreduce(op: CollectiveOp, registers: list[Any], group: Any, members: Members, finish: Finish) -> None:
    """All-reduce: every rank gets the sum."""
    x = registers[op.x]
    parts = x.new_empty(len(members), x.numel())
    _gather(x, parts.unbind(0), _places(op, members), group, finish)
    add_up(registers[op.out].view(-1), parts.unbind(0))


def reduce_scatter(op: CollectiveOp, registers: list[Any], group: Any, members: Members, finish: Finish) -> None:
    """Reduce-scatter: each rank gets one block of the sum."""
    add_up(registers[op.out].view(-1), _swap(registers[op.x], _places(op, members), group, finish).unbind(0))


def alltoall(op: CollectiveOp, registers: list[Any], group: Any, members: Members, finish: Finish) -> None:
    """All-to-all: each rank sends one block to each rank."""
    _blocks(registers[op.out], len(members)).copy_(_swap(registers[op.x], _places(op, members), group, finish))


COLLECTIVES = {f.__name__: f for f in (allgather, allreduce, reduce_scatter, alltoall)}


def exchange(op: MessagesOp, registers: list[Any], group: Any, members: Members, finish: Finish) -> None:
    """Send and receive all pieces of an exchange. Return when all of them have been sent and received.

    This function does not use `finish`, because a wait that times out breaks gloo's connection.
    """
    if [rank for _, rank in op.sends] == [members[group.rank()]]:  # a message of this rank to itself
        registers[op.receives[0][0]].copy_(registers[op.sends[0][0]])
        return
    sent = [group.send([_bytes(registers[x])], members.index(rank), 0) for x, rank in op.sends]
    received = [group.recv([_bytes(registers[x])], members.index(rank), 0) for x, rank in op.receives]
    for work in (*sent, *received):
        work.wait()
