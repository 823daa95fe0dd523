"""What gloo carries between CPU processes: collectives, transfers and messages.

Everything travels as bytes, whatever its dtype. Sums are taken here, in f32 and in the order of the team, so that bf16
loses nothing on the way and every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from hostir.runtime.plan import Collective, Messages

Members = tuple[int, ...]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _blocks(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(-1).view(count, -1)


def _places(op: Collective, members: Members) -> list[int]:
    """For each rank of the group, which numbers its ranks in ascending order, its place in the team."""
    return [op.team.index(rank) for rank in members]


def _gather(x: torch.Tensor, blocks: Sequence[torch.Tensor], places: list[int], group: Any) -> None:
    """`blocks[i]` becomes `x` of the team's i-th rank."""
    group.allgather([[_bytes(blocks[i]) for i in places]], [_bytes(x)], AllgatherOptions()).wait()


def _swap(x: torch.Tensor, places: list[int], group: Any) -> torch.Tensor:
    """Sends block i of `x` to the team's i-th rank; returns the blocks received, by the sender's place in the team."""
    sent = _blocks(x, len(places))[places].contiguous()
    received, ordered = torch.empty_like(sent), torch.empty_like(sent)
    group.alltoall_base(_bytes(received), _bytes(sent), [], [], AllToAllOptions()).wait()
    ordered[places] = received
    return ordered


def _sum(blocks: torch.Tensor, out: torch.Tensor) -> None:
    total = blocks[0].float()
    for block in blocks[1:]:
        total += block
    out.view(-1).copy_(total)


def allgather(op: Collective, registers: list[Any], group: Any, members: Members) -> None:
    """Every rank gets all parts."""
    out = registers[op.out]
    _gather(registers[op.x], _blocks(out, len(members)).unbind(0), _places(op, members), group)


def allreduce(op: Collective, registers: list[Any], group: Any, members: Members) -> None:
    """Every rank gets the sum, in place."""
    x = registers[op.out]
    parts = x.new_empty(len(members), x.numel())
    _gather(x, parts.unbind(0), _places(op, members), group)
    _sum(parts, x)


def reduce_scatter(op: Collective, registers: list[Any], group: Any, members: Members) -> None:
    """Each rank gets its block of the sum."""
    _sum(_swap(registers[op.x], _places(op, members), group), registers[op.out])


def alltoall(op: Collective, registers: list[Any], group: Any, members: Members) -> None:
    """Each rank sends a block to each rank."""
    _blocks(registers[op.out], len(members)).copy_(_swap(registers[op.x], _places(op, members), group))


COLLECTIVES = {f.__name__: f for f in (allgather, allreduce, reduce_scatter, alltoall)}


def exchange(op: Messages, registers: list[Any], group: Any, members: Members) -> None:
    """Sends and receives pieces."""
    if [rank for _, rank in op.sends] == [members[group.rank()]]:  # an exchange with itself
        registers[op.receives[0][0]].copy_(registers[op.sends[0][0]])
        return
    sent = [group.send([_bytes(registers[x])], members.index(rank), 0) for x, rank in op.sends]
    received = [group.recv([_bytes(registers[x])], members.index(rank), 0) for x, rank in op.receives]
    for work in (*sent, *received):
        work.wait()
