"""Passes `reshard` and `communicate`. The first makes each change of sharding a statement, a reshard.

The second turns the reshards into communications.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hostir.ir.comm_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communication,
    Gather,
    ReduceScatter,
    Reshard,
    Scatter,
    SendRecv,
)
from hostir.ir.op import Codec, Statement, Value, codecs_of
from hostir.ir.program import Names, Program
from hostir.ir.scaled_ops import ScaledMatmul
from hostir.ir.sharding import leads
from hostir.ir.tensor_ops import Add, DenseCopy, Linear, TensorOp
from hostir.ir.types import Axis, Mesh, TensorType
from hostir.ir.view_ops import Reshape, Shard, ViewStatement
from hostir.lower import Pass
from hostir.lower.host import isolate
from hostir.lower.propagate import result_of, users_of
from hostir.lower.shardings import OperandShardings, choose, choose_view


@dataclass(frozen=True)
class MakeReshards(Pass):
    """Inserts a reshard wherever an operand or a result does not have the sharding that it needs.

    An operand needs the sharding with which its statement computes. A result needs its declared sharding. After this
    pass, every change of sharding is a statement.
    """

    name = "reshard"
    explicit_reshards = False

    def run(self, program: Program) -> Program:
        names = Names.of(program)
        body: list[Statement] = []
        resharded: dict[tuple[str, TensorType], Value] = {}
        for s in program.body:
            body += _explicit(s, names, resharded)
        return program.with_body(body)


def _explicit(s: Statement, names: Names, resharded: dict[tuple[str, TensorType], Value]) -> Iterator[Statement]:
    """Yield a statement and the reshards that it needs.

    The reshards of its operands come before it, and the reshard of its result comes after it.
    """
    declared = result_of(s).tensor
    if isinstance(s, Reshard):
        yield from chain(s.x, s.out, s, names)
        return
    if isinstance(s, (Communication, Shard)):  # explicit already
        yield s
        return
    choice = _choice(s, declared)
    if isinstance(s, (Linear, ScaledMatmul)) and s.bias is not None and _added_once(s.bias, choice.result):
        yield from _bias_last(s, names, resharded)
        return
    operands = {
        n: c for n, c in codecs_of(type(s)).items() if c in (Codec.READ, Codec.ALIAS) and getattr(s, n) is not None
    }
    moved: dict[str, Any] = {}  # by field: one tensor may be two operands with different shardings
    for name, needed in zip(operands, choice.operands, strict=True):
        value: Value = getattr(s, name)
        if _same(value.tensor, needed):
            continue
        key = (value.name, needed.host())
        if key not in resharded:
            resharded[key] = Value(
                names.fresh(f"{value.name}_full" if not _marks(needed) else f"{value.name}_part"), needed.host(), s.span
            )
            yield from chain(value, resharded[key], s, names)
        moved[name] = resharded[key]
    s = replace(s, **moved)
    if _same(choice.result, declared):
        yield s
        return
    raw = Value(names.fresh(f"{result_of(s).name}_part"), _keep_stream(choice.result, declared), s.span)
    yield s.rename({result_of(s).name: raw})
    yield from chain(raw, result_of(s), s, names)


def _marks(type: TensorType) -> bool:
    return any(axis.marks for axis in type.axes)


def _choice(s: Statement, declared: TensorType) -> OperandShardings:
    if isinstance(s, TensorOp):
        return choose(s, [v.tensor for v in s.operands], declared)
    assert isinstance(s, ViewStatement)
    return choose_view(s, s.x.tensor, declared)


def _added_once(bias: Value, product: TensorType) -> bool:
    """Return True if a bias must be added after the reduction of a partial product.

    Only a bias that is a partial sum over the same mesh axes can be added before the reduction.
    """
    return bool(product.partial) and bias.tensor.partial != product.partial


def _bias_last(
    s: Linear | ScaledMatmul, names: Names, resharded: dict[tuple[str, TensorType], Value]
) -> Iterator[Statement]:
    """Yield the product without its bias, the reduction of this product, and the addition of the bias.

    So the bias is added once to the sum, instead of once on every rank.
    """
    assert s.bias is not None
    bias = s.bias
    product = Value(names.fresh(f"{s.out.name}_sum"), s.out.type, s.span)
    yield from _explicit(replace(s, bias=None, out=product), names, resharded)
    yield from _explicit(Add(out=s.out, x=product, y=bias, span=s.span), names, resharded)


def _same(a: TensorType, b: TensorType) -> bool:
    return a.host() == b.host()


def _keep_stream(type: TensorType, declared: TensorType) -> TensorType:
    """Return `type` with the Stream factors of the declared type, on the axes that have the declared sharding."""
    return type.with_axes(
        d if d.without("stream").normal() == a.normal() else a for a, d in zip(type.axes, declared.axes, strict=True)
    )


def chain(x: Value, out: Value, s: Statement, names: Names) -> Iterator[Statement]:
    """Yield the reshards that lead from `x` to `out`.

    Each reshard changes the sharding over one mesh axis, or moves the tensor to another mesh. Errors point at the
    statement `s`.
    """
    if partial := [mark for mark in out.tensor.partial if mark not in x.tensor.partial]:
        raise s.fail(f"{out} cannot be made a partial sum over {partial[0]}", expected="a complete result")
    steps = list(_steps(x.tensor, out.tensor))
    if not steps:
        steps = [out.tensor.host()]
    current = x
    for step in steps[:-1]:
        following = Value(names.fresh(f"{out.name}_step"), step, s.span)
        yield Reshard(current, following, span=s.span)
        current = following
    yield Reshard(current, out, span=s.span)


def _steps(old: TensorType, new: TensorType) -> Iterator[TensorType]:
    """Yield the types of the tensor after each step from `old` to `new`. The last one is `new`."""
    assert old.mesh
    assert new.mesh
    current, goal = old.host(), new.host()
    if old.mesh != new.mesh:
        yield from _between(current, goal, old.mesh, new.mesh)
        return
    while current != goal:
        current = _next_step(current, goal, old.mesh)
        yield current


def _next_step(current: TensorType, goal: TensorType, mesh: Mesh) -> TensorType:
    """Return the type after the next step towards `goal`. The step changes the sharding over one mesh axis.

    Reductions come first, then local slices, then moves from one tensor axis to another, then gathers.
    """
    for mark in current.partial:
        if mark not in goal.partial:
            reduced = replace(current, partial=tuple(m for m in current.partial if m != mark))
            return _with_mark(reduced, goal, mark) or reduced
    spread = [mark for mark in mesh.axes if current.axis_on(mark) is not None]
    for mark in mesh.axes:
        if mark not in spread and (put := _with_mark(current, goal, mark)):
            return put
    for mark in spread:
        before, after = current.axis_on(mark), goal.axis_on(mark)
        put = _with_mark(_without(current, mark), goal, mark)
        if put is None or before is None or after is None or before == after:
            continue
        if len(current.axes[before].factors) == len(put.axes[after].factors) == 1:
            return put  # one alltoall
    wrong = next(k for k, axis in enumerate(current.axes) if axis != _with_only(goal.axes[k], axis.marks))
    marks = current.axes[wrong].marks
    extra = [mark for mark in marks if mark not in goal.axes[wrong].marks]
    return _without(current, (extra or marks)[-1])


def _without(type: TensorType, *marks: str) -> TensorType:
    return type.with_axes(axis.without(*marks) for axis in type.axes)


def _with_only(axis: Axis, marks: Sequence[str]) -> Axis:
    """Return the axis without its sharding over mesh axes that are not in `marks`."""
    return axis.without(*(mark for mark in axis.marks if mark not in marks))


def _with_mark(type: TensorType, goal: TensorType, mark: str) -> TensorType | None:
    """Return `type` after one step towards `goal`: one axis is then sharded over the mesh axis `mark`, too.

    Return None if `goal` shards no axis over `mark`. Also return None if `goal`, without `mark`, shards this axis in
    another way than `type` does.
    """
    k = goal.axis_on(mark)
    if k is None:
        return None
    axis = _with_only(goal.axes[k], (*type.axes[k].marks, mark))
    if axis.without(mark) != type.axes[k]:
        return None
    return type.with_axes(axis if i == k else a for i, a in enumerate(type.axes))


def _between(current: TensorType, goal: TensorType, source: Mesh, target: Mesh) -> Iterator[TensorType]:
    """Yield the types of the tensor after each step from one mesh to another.

    Partial sums are reduced on the source mesh. If no transfer between meshes fits the shardings, the tensor is also
    gathered on the source mesh.
    """
    for mark in current.partial:
        current = replace(current, partial=tuple(m for m in current.partial if m != mark))
        yield current
    sends = replace(current, mesh=target) == goal and source.shape == target.shape
    gathers = not _marks(goal) and _in_line(current, source)
    if sends or gathers:
        yield goal
        return
    for mark in source.axes:
        if current.axis_on(mark) is not None:
            current = _without(current, mark)
            yield current
    if not _marks(goal) or _in_line(goal, target):
        yield goal
        return
    bare = replace(current, mesh=target)
    yield bare
    yield from _steps(bare, goal)


def _in_line(type: TensorType, mesh: Mesh) -> bool:
    """Return True if the mesh has one axis and each axis of the tensor has one factor: gather and scatter need this."""
    return len(mesh.axes) == 1 and all(len(axis.factors) == 1 for axis in type.axes)


@dataclass(frozen=True)
class Communicate(Pass):
    """Turns each reshard into a communication, or into a view if each rank already has the elements.

    If both terms of an addition are partial sums that are reduced in the same way, they are added before the reduction,
    and the sum is reduced once.
    """

    name = "communicate"

    def run(self, program: Program) -> Program:
        names = Names.of(program)
        same: dict[str, Value] = {}  # results of reshards that change nothing, replaced by their operands
        body: list[Statement] = []
        for s in program.body:
            s = s.rename(same)
            if not isinstance(s, Reshard):
                body.append(s)
            elif s.x.tensor.host() == s.out.tensor.host() and s.x.tensor.mesh == s.out.tensor.mesh:
                same[s.out.name] = s.x
            else:
                body += _communication(s, names)
        outputs = tuple(same.get(v.name, v) for v in program.outputs)
        return _reduced_once(replace(program, body=tuple(body), outputs=outputs))


def _communication(s: Reshard, names: Names) -> Iterator[Statement]:
    old, new = s.x.tensor, s.out.tensor
    assert old.mesh
    assert new.mesh
    if old.mesh != new.mesh:
        transfers = {(False, False): Broadcast, (True, False): Gather, (False, True): Scatter, (True, True): SendRecv}
        yield transfers[_marks(old.host()), _marks(new.host())](s.x, s.out, span=s.span)
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


def _shard(s: Reshard, mark: str, names: Names) -> Iterator[Statement]:
    """Yield the statements that shard a tensor over the mesh axis `mark`, over which it is replicated.

    Each rank takes its block of the tensor. If the block is contiguous in its axis, the only statement is a view.
    Otherwise the pieces of the block are copied.
    """
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
    yield DenseCopy(out=dense, x=block, span=s.span, note="copy: the blocks of a rank lie apart")
    yield Reshape(dense, s.out, span=s.span)


Reduction = AllReduce | ReduceScatter


def _reduced_once(program: Program) -> Program:
    """Return the program with one reduction instead of two for each addition of terms that are reduced in the same way.

    The partial sums are then added first, and their sum is reduced once.
    """
    names, users = Names.of(program), users_of(program)
    reductions: dict[str, Reduction] = {}  # reductions with a single reader, by the name of their result
    body: list[Statement] = []
    for s in program.body:
        if isinstance(s, Add) and (pair := _reduced_alike(s, reductions)):
            body = [other for other in body if other not in pair]
            part = Value(names.fresh(f"{s.out.name}_part"), pair[0].x.type, s.span)
            body.append(Add(out=part, x=pair[0].x, y=pair[1].x, span=s.span))
            s = replace(pair[0], x=part, out=s.out, span=s.span)
        body.append(s)
        if isinstance(s, Reduction) and s.out not in program.outputs and len(users.get(s.out.name, [])) == 1:
            reductions[s.out.name] = s
    return program.with_body(body)


def _reduced_alike(s: Add, reductions: Mapping[str, Reduction]) -> tuple[Reduction, Reduction] | None:
    """Return the two reductions that compute the terms of an addition; None if they do not reduce in the same way.

    The two reductions must be the same collective over the same mesh axis. The types of their operands must be equal,
    and the types of their results must be equal.
    """
    x, y = reductions.get(s.x.name), reductions.get(s.y.name)
    if x is None or y is None or (type(x), x.over, x.x.type) != (type(y), y.over, y.x.type):
        return None
    return (x, y) if x.out.tensor.host() == y.out.tensor.host() == s.out.tensor.host() else None
