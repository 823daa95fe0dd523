"""How a communication lies in memory: what it moves must be outermost in dense buffers.

Where an operand does not lie so, the ranks' axis is split off and brought to the front: as a view where that moves
nothing in memory, else by way of a dense buffer and a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostir.ir import TensorType
from hostir.ir.comm_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communication,
    Gather,
    ReduceScatter,
    Scatter,
    SendRecv,
)
from hostir.ir.layout import leads
from hostir.ir.sizes import Size
from hostir.ir.types import Axis, Factor


@dataclass(frozen=True)
class Front:
    """How to see a tensor so that what a communication moves is outermost: split axes, then their order."""

    split: TensorType
    order: tuple[int, ...]

    @property
    def type(self) -> TensorType:
        return self.split.with_axes(self.split.axes[i] for i in self.order)


def isolate(type: TensorType, mark: str) -> tuple[Axis, ...]:
    """The axes with the factor on `mark` as an axis of exactly the ranks, and its neighbours as axes of their own."""
    assert type.mesh
    ranks = Size(type.mesh.size(mark))
    axes: list[Axis] = []
    for axis in type.host().axes:
        if mark not in axis.marks:
            axes.append(axis)
            continue
        for factor in axis.factors:
            if factor.on != mark:
                axes.append(Axis((factor,)))
                continue
            axes.append(Axis((Factor(ranks, mark),)))
            if factor.extent != ranks:
                axes.append(Axis.of(factor.extent / ranks))
    return tuple(axes)


def fronts(s: Communication, x: TensorType, out: TensorType) -> tuple[Front, Front] | None:
    """How to see both sides, or None where they serve as they are."""
    if isinstance(s, (AllReduce, Broadcast, SendRecv)):
        return None
    if isinstance(s, AllToAll):
        return _exchange(s.over, x, out)
    sharded = x if isinstance(s, (AllGather, Gather)) else out
    assert isinstance(s, (AllGather, ReduceScatter, Gather, Scatter))
    assert sharded.mesh
    mark = (
        s.over if isinstance(s, (AllGather, ReduceScatter)) else next(m for a in sharded.host().axes for m in a.marks)
    )
    if leads(sharded, mark):
        return None
    axes = isolate(sharded, mark)
    at = next(i for i, a in enumerate(axes) if mark in a.marks)
    order = (at, *(i for i in range(len(axes)) if i != at))
    bare = tuple(a.without(mark) for a in axes)
    left, right = (axes, bare) if sharded is x else (bare, axes)
    return Front(x.with_axes(left), order), Front(out.with_axes(right), order)


def _exchange(mark: str, x: TensorType, out: TensorType) -> tuple[Front, Front]:
    """`[.., A@m, .., B, ..]` as `[D, A@m, rest]`, and `[.., A, .., B@m, ..]` as `[D@m, A, rest]`."""
    a = x.axis_on(mark)
    assert a is not None
    axes = isolate(out, mark)
    ranks = next(i for i, axis in enumerate(axes) if axis.marks == (mark,))
    before = out.axis_on(mark)
    assert before is not None
    from_a = a if a < before else a + len(axes) - len(out.axes)
    order = (ranks, from_a, *(i for i in range(len(axes)) if i not in (ranks, from_a)))
    left = tuple(x.axes[a] if i == from_a else axis.without(mark) for i, axis in enumerate(axes))
    return Front(x.with_axes(left), order), Front(out.with_axes(axes), order)
