"""Pass `communicate`: chooses the communication for each reshard, by what changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hostir.ir import Program, Statement, TensorType, Value
from hostir.ir.comm_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    ReduceScatter,
    Reshard,
    Scatter,
    SendRecv,
)
from hostir.ir.layout import leads
from hostir.ir.program import Names
from hostir.ir.tensor_ops import Copy
from hostir.ir.view_ops import Reshape, Shard
from hostir.lower.layout import isolate
from hostir.lower.passes import Pass


@dataclass(frozen=True)
class Communicate(Pass):
    """Turns each reshard into the communication that does it; a part of what a rank has already is a view."""

    name = "communicate"

    def run(self, program: Program) -> Program:
        names = Names.of(program)
        same: dict[str, Value] = {}  # a reshard that changes nothing: its operand stands for it
        body: list[Statement] = []
        for s in program.body:
            s = s.rename(same)
            if not isinstance(s, Reshard):
                body.append(s)
            elif s.x.tensor.host() == s.out.tensor.host() and s.x.tensor.mesh == s.out.tensor.mesh:
                same[s.out.name] = s.x
            else:
                body += _communication(s, names)
        return replace(program, body=tuple(body), outputs=tuple(same.get(v.name, v) for v in program.outputs))


def _communication(s: Reshard, names: Names) -> Iterator[Statement]:
    old, new = s.x.tensor, s.out.tensor
    assert old.mesh
    assert new.mesh
    if old.mesh != new.mesh:
        sides = (bool(_marks(old)), bool(_marks(new)))
        kind = {(False, False): Broadcast, (True, False): Gather, (False, True): Scatter, (True, True): SendRecv}[sides]
        yield kind(s.x, s.out, span=s.span)
        return
    mark = next(
        m for m in old.mesh.axes if (m in old.partial) != (m in new.partial) or old.axis_on(m) != new.axis_on(m)
    )
    if old.axis_on(mark) is None and mark not in old.partial:
        yield from _shard(s, mark, names)
        return
    there = new.axis_on(mark) is not None
    collective = (ReduceScatter if there else AllReduce) if mark in old.partial else AllToAll if there else AllGather
    yield collective(s.x, s.out, over=mark, span=s.span)


def _marks(type: TensorType) -> list[str]:
    return [m for axis in type.host().axes for m in axis.marks]


def _shard(s: Reshard, mark: str, names: Names) -> Iterator[Statement]:
    """Each rank's block: a view where the block is in one piece, else a copy of the pieces."""
    new = s.out.tensor.host()
    axis = next(a for a in new.axes if mark in a.marks)
    if leads(new, mark, [axis]):
        yield Shard(s.x, s.out, span=s.span)
        return
    cut = isolate(new, mark)

    def value(suffix: str, type: TensorType) -> Value:
        return Value(names.fresh(f"{s.out.name}_{suffix}"), type, s.span)

    view = value("view", s.x.tensor.with_axes(a.without(mark) for a in cut))
    block = value("block", view.tensor.with_axes(cut))
    dense = value("dense", block.tensor)
    yield Reshape(s.x, view, span=s.span)
    yield Shard(view, block, span=s.span)
    yield Copy(out=dense, x=block, span=s.span, note="copy: the blocks of a rank lie apart")
    yield Reshape(dense, s.out, span=s.span)
