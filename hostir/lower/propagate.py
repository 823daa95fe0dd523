"""Pass `propagate`: gives every tensor a sharding, starting from the annotated inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import Communication, Reshard
from hostir.ir.op import Codec, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sharding import flat_marks, is_multiple, place_marks, refine
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import Binary, RmsNorm, Sum, TensorOp, Unary
from hostir.ir.types import STREAM, Axis, Factor, Mesh, TensorType
from hostir.ir.view_ops import Permute, Reshape, Shard, ViewStatement
from hostir.lower import Pass
from hostir.lower.shardings import choose, choose_view


def result_of(s: Statement) -> Value:
    """Return the tensor that a statement of a fusion defines: each statement of a fusion defines exactly one."""
    assert isinstance(s, (TensorOp, ViewStatement, Communication, Reshard))
    return s.out


def operands_of(s: Statement) -> tuple[Value, ...]:
    """Return the tensors that a statement of a fusion reads or views."""
    return tuple(s.values(Codec.READ, Codec.ALIAS))


def users_of(program: Program) -> dict[str, list[Statement]]:
    """Return a map from each tensor of a fusion to the statements that read or view it, with one entry for each use."""
    users: dict[str, list[Statement]] = {}
    for s in program.body:
        for v in operands_of(s):
            users.setdefault(v.name, []).append(s)
    return users


def stream_place(axis: Axis) -> tuple[Size, Size] | None:
    """Return the product of the extents of the factors outside the Stream factor, and the extent of the Stream factor.

    Return None if the axis has no Stream factor.
    """
    outer = Size()
    for factor in axis.factors:
        if factor.on == STREAM:
            return outer, factor.extent
        outer = outer * factor.extent
    return None


def keeps_dense(s: Statement) -> bool:
    """Return True if the result of a view is dense whenever the operand is dense.

    This is true for a reshape, and for a permute that moves only axes of extent 1.
    """
    if not isinstance(s, Permute):
        return isinstance(s, Reshape)
    local = s.x.tensor.local_shape
    long = [i for i in s.axes if not local[i].is_one]
    return long == sorted(long)


def splits_only(s: Reshape) -> bool:
    """Return True if a reshape only splits axes. Such a reshape is a view for all strides of the operand."""
    inside = [size for size in s.out.tensor.local_shape if not size.is_one]
    for rest in s.x.tensor.local_shape:
        while inside and not rest.is_one and is_multiple(rest, inside[0]):
            rest = rest / inside.pop(0)
        if not rest.is_one:
            return False
    return True


@dataclass(frozen=True)
class Propagate(Pass):
    """Gives a sharding to each tensor without a mesh.

    Inputs without a mesh are replicated. The sharding of a result follows from the shardings of the operands.
    """

    name = "propagate"
    explicit_reshards = False

    def run(self, program: Program) -> Program:
        program = _without_lone_axes(program)
        values: dict[str, Value] = {}
        for value in program.inputs:
            values[value.name] = replace(value, type=_on(value.tensor, program.meshes[0]))
        body = []
        wanted, summed_later = _wanted(program), _summed_later(program)
        for s in program.body:
            renamed = s.rename(values)
            result = result_of(renamed)
            if result.tensor.mesh is None:
                type = _sharded(renamed, result.tensor, wanted.get(result.name), result.name in summed_later)
                values[result.name] = replace(result, type=type)
                renamed = renamed.rename(values)
            body.append(renamed)
        outputs = tuple(values.get(v.name, v) for v in program.outputs)
        return replace(program, inputs=tuple(values[v.name] for v in program.inputs), outputs=outputs, body=tuple(body))


def _without_lone_axes(program: Program) -> Program:
    """Return the program without sharding over mesh axes that have only one rank.

    A program with explicit communications stays as it is, because they may name such a mesh axis.
    """
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


def _on(type: TensorType, mesh: Mesh) -> TensorType:
    return type if type.mesh else replace(type, mesh=mesh)


def _wanted(program: Program) -> dict[str, TensorType]:
    """Return a map from names of tensors to the shardings that they get after a reduction, if they are partial sums.

    A tensor with a declared sharding keeps it. Another tensor gets the sharding of the result of its only user, if this
    user is an elementwise computation, a norm or a reshape.
    """
    users = users_of(program)
    declared = [*program.inputs, *(result_of(s) for s in program.body)]
    promised = [part for v in declared if v.tensor.mesh for part in _parts(v.tensor)]
    wanted: dict[str, TensorType] = {}
    for s in reversed(program.body):
        result = result_of(s)
        if result.tensor.mesh is not None:
            wanted[result.name] = result.tensor
        if isinstance(s, Reshape) and result.name in wanted and s.x.tensor.mesh is None and users[s.x.name] == [s]:
            axes = place_marks(s.x.tensor.shape, flat_marks(wanted[result.name]))
            type = None if axes is None else replace(wanted[result.name], axes=axes)
            # The number of ranks may divide M*N, but not M. So a new division must follow from a declared one.
            if type and all(p.is_integer or any((p / other).is_integer for other in promised) for p in _parts(type)):
                wanted[s.x.name] = type
        if not isinstance(s, (Unary, Binary, RmsNorm)) or isinstance(s, Sum) or result.name not in wanted:
            continue
        for v in s.operands:
            if v.tensor.mesh is None and users[v.name] == [s] and v.tensor.shape == result.tensor.shape:
                wanted[v.name] = wanted[result.name]
    return wanted


def _summed_later(program: Program) -> set[str]:
    """Return the names of tensors that stay partial sums, because their only user is linear in them."""
    users = users_of(program)
    linear = [(s, s.linear_in) for s in program.body if isinstance(s, TensorOp)]
    return {v.name for s, v in linear if v is not None and users[v.name] == [s] and v not in program.outputs}


def _parts(type: TensorType) -> list[Size]:
    """Return, for each sharded factor of the type, its extent on one rank."""
    return [type.local_factor(f) for axis in type.host().axes for f in axis.factors if f.on]


def _sharded(s: Statement, declared: TensorType, wanted: TensorType | None, summed_later: bool) -> TensorType:
    """Return the type of a statement's result.

    The operands decide its sharding, and `declared` decides its Stream factors. A partial sum stays one if it is
    `summed_later`. Otherwise it is reduced, if possible to the sharding of `wanted`.
    """
    if isinstance(s, Reshard):
        return replace(declared, mesh=s.x.tensor.mesh)
    if isinstance(s, (Communication, Shard)):
        raise s.fail(f"the type of {s.out} must declare its sharding", hint=f"{s.keyword()} moves a tensor to it")
    if isinstance(s, ViewStatement):
        inferred = choose_view(s, s.x.tensor, declared).result
    else:
        assert isinstance(s, TensorOp)
        inferred = choose(s, _one_mesh(s), declared).result
        if wanted and inferred.partial and wanted.mesh == inferred.mesh and not summed_later:
            inferred = _reduced(inferred, wanted)
    axes = [_with_stream(s, g, d, inferred.mesh) for g, d in zip(inferred.axes, declared.axes, strict=True)]
    return TensorType(declared.dtype, tuple(axes), inferred.mesh, inferred.partial if summed_later else ())


def _one_mesh(op: TensorOp) -> Sequence[TensorType]:
    types = [v.tensor for v in op.operands]
    if len({t.mesh for t in types if t.mesh}) > 1:
        where = ", ".join(f"{v} on {v.tensor.mesh}" for v in op.operands)
        raise op.fail(
            f"operands of {op.keyword()} lie on different meshes: {where}",
            hint="reshard one of them, by hi.reshard in Python, or declare the mesh of the result",
        )
    return types


def _reduced(type: TensorType, goal: TensorType) -> TensorType:
    """Return the type of a partial sum after its reduction.

    If `goal` shards an axis over a mesh axis of the sum, the reduced tensor shards this axis in the same way.
    """
    axes = list(type.axes)
    for k, wanted in enumerate(goal.host().axes):
        if wanted.marks and set(wanted.marks) <= set(type.partial) and not axes[k].marks:
            axes[k] = wanted
    return type.with_axes(axes)


def _with_stream(s: Statement, axis: Axis, declared: Axis, mesh: Mesh | None) -> Axis:
    """Return `axis` with the Stream factor of the axis `declared`. Raise HostIRError if a slice would span ranks."""
    place = stream_place(declared)
    if place is None:
        return axis
    cut = refine(axis, *place, mesh)
    if cut is None:
        raise s.fail(
            f"the Stream part of {declared} cuts across ranks: here the axis is {axis}",
            hint="put the Stream part inside the sharded one: split the axis by the mesh first",
        )
    before, inside = cut
    return Axis((*before, Factor(place[1], STREAM), *inside))
