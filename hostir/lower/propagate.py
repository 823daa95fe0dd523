"""Pass `propagate`: gives every tensor a sharding, from the annotated inputs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostir.ir import Program, TensorType, Value
from hostir.ir.comm_ops import Communication, Reshard
from hostir.ir.layout import refine
from hostir.ir.op import Codec, Statement
from hostir.ir.tensor_ops import Binary, Sum, TensorOp, Unary
from hostir.ir.types import STREAM, Axis, Factor, Mesh
from hostir.ir.view_ops import Shard, ViewOp
from hostir.lower.passes import Pass
from hostir.lower.sharding import choose, choose_view, result_of, stream_place


@dataclass(frozen=True)
class Propagate(Pass):
    """Inputs without a mesh are replicated; a result without one lies where its computation leaves it, whole."""

    name = "propagate"
    settles = False

    def run(self, program: Program) -> Program:
        program = _without_lone_axes(program)
        values: dict[str, Value] = {}
        for value in program.inputs:
            values[value.name] = _settled(value, _on(value.tensor, program.meshes[0]))
        body = []
        wishes = _wishes(program)
        for s in program.body:
            moved = s.rename(values)
            result = result_of(moved)
            if result.tensor.mesh is None:
                values[result.name] = _settled(result, _spread(moved, result.tensor, wishes.get(result.name)))
                moved = moved.rename(values)
            body.append(moved)
        outputs = tuple(values.get(v.name, v) for v in program.outputs)
        return replace(program, inputs=tuple(values[v.name] for v in program.inputs), outputs=outputs, body=tuple(body))


def _without_lone_axes(program: Program) -> Program:
    """Takes off the marks of mesh axes of one rank, unless there are explicit communications that may name them."""
    if any(isinstance(s, (Communication, Shard)) for s in program.body):
        return program
    every = {v.name: v for v in (*program.inputs, *map(result_of, program.body))}
    values = {name: replace(v, type=_without_lone(v.tensor)) for name, v in every.items()}
    return replace(
        program,
        inputs=tuple(values[v.name] for v in program.inputs),
        outputs=tuple(values[v.name] for v in program.outputs),
        body=tuple(s.rename(values) for s in program.body),
    )


def _without_lone(type: TensorType) -> TensorType:
    lone = {mark for mark in type.mesh.axes if type.mesh.size(mark) == 1} if type.mesh else set()
    axes = (axis.without(*lone) if lone & set(axis.marks) else axis for axis in type.axes)
    return replace(type, axes=tuple(axes), partial=tuple(mark for mark in type.partial if mark not in lone))


def _settled(value: Value, type: TensorType) -> Value:
    return replace(value, type=type)


def _on(type: TensorType, mesh: Mesh) -> TensorType:
    return type if type.mesh else replace(type, mesh=mesh)


def _wishes(program: Program) -> dict[str, TensorType]:
    """How the one elementwise user of a tensor wants it to lie: what a partial sum is best reduced to."""
    users: dict[str, list[Statement]] = {}
    for s in program.body:
        for v in s.values(Codec.READ, Codec.ALIAS):
            users.setdefault(v.name, []).append(s)
    wishes: dict[str, TensorType] = {}
    for s in reversed(program.body):
        result = result_of(s)
        if result.tensor.mesh is not None:
            wishes[result.name] = result.tensor
        if not isinstance(s, (Unary, Binary)) or isinstance(s, Sum) or result.name not in wishes:
            continue
        for v in s.operands:
            if v.tensor.mesh is None and users[v.name] == [s] and v.tensor.shape == result.tensor.shape:
                wishes[v.name] = wishes[result.name]
    return wishes


def _spread(s: Statement, declared: TensorType, wish: TensorType | None) -> TensorType:
    """The declared type with the sharding that the statement gives it; its Stream marks stay."""
    if isinstance(s, Reshard):
        return replace(declared, mesh=s.x.tensor.mesh)
    if isinstance(s, (Communication, Shard)):
        raise s.fail(f"the type of {s.out} must say where it lies", hint=f"{s.keyword()} is there to choose that")
    if isinstance(s, ViewOp):
        given = choose_view(s, s.x.tensor, declared).result
    else:
        assert isinstance(s, TensorOp)
        given = choose(s, _one_mesh(s), declared).result
        if wish and given.partial and wish.mesh == given.mesh:
            given = _reduced(given, wish)
    axes = [_with_stream(s, g, d, given.mesh) for g, d in zip(given.axes, declared.axes, strict=True)]
    return TensorType(declared.dtype, tuple(axes), given.mesh)


def _one_mesh(op: TensorOp) -> Sequence[TensorType]:
    types = [v.tensor for v in op.operands]
    if len({t.mesh for t in types if t.mesh}) > 1:
        where = ", ".join(f"{v} on {v.tensor.mesh}" for v in op.operands)
        raise op.fail(
            f"operands of {op.keyword()} lie on different meshes: {where}",
            hint="reshard one of them, by hi.reshard in Python, or say on which mesh the result lies",
        )
    return types


def _reduced(given: TensorType, wish: TensorType) -> TensorType:
    """A partial sum as its user wants it: the mesh axes it is summed over go where the wish has them."""
    axes = list(given.axes)
    for k, wanted in enumerate(wish.host().axes):
        if wanted.marks and set(wanted.marks) <= set(given.partial) and not axes[k].marks:
            axes[k] = wanted
    return given.with_axes(axes)


def _with_stream(s: Statement, given: Axis, declared: Axis, mesh: Mesh | None) -> Axis:
    """The given axis, with the Stream part where it was declared."""
    place = stream_place(declared)
    if place is None:
        return given
    cut = refine(given, *place, mesh)
    if cut is None:
        raise s.fail(
            f"the Stream part of {declared} cuts across ranks: here the axis is {given}",
            hint="put the Stream part inside the sharded one: split the axis by the mesh first",
        )
    before, inside = cut
    return Axis((*before, Factor(place[1], STREAM), *inside))
