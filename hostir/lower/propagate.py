"""Pass `propagate`: gives every tensor a sharding, starting from the annotated inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from hostir.ir.comm_ops import Communication, Reshard
from hostir.ir.op import Codec, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sharding import CONTRACTED, Map, flat_marks, is_multiple, place_marks, refine
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import Add, Binary, Cast, Contraction, RmsNorm, Sum, TensorOp, Unary
from hostir.ir.types import STREAM, Axis, Factor, Mesh, TensorType
from hostir.ir.view_ops import Permute, Reshape, Shard, ViewStatement
from hostir.lower import Pass

# Shardings of one computation -----------------------------------------------------------------------------------------
# The choice of operand shardings that need no communication; `propagate` and `reshard` share it.


@dataclass(frozen=True)
class OperandShardings:
    """Operand types with which a computation needs no communication, and the type of its result."""

    operands: tuple[TensorType, ...]
    result: TensorType


def choose(op: TensorOp, types: Sequence[TensorType], wanted: TensorType) -> OperandShardings:
    """Choose which axis each mesh axis shards in a computation.

    The rules, in this order: if all operands of a contraction are sharded on the contracted axis, it stays sharded and
    the result is a partial sum. Else the sharding of an annotated result decides; else the sharding of the weight's
    rows or columns; else of an axis of the left operand. Otherwise no axis is sharded, and sharded operands are
    gathered. Raises if ranks cannot compute on such parts.
    """
    mesh = wanted.mesh or next(t.mesh for t in types if t.mesh)
    here = tuple(t if t.mesh == mesh else _replicated(t, mesh) for t in types)
    chosen = _Computation(op, mesh, here, op.maps(), wanted).choose(types)
    op.check_parts(chosen.operands)
    return chosen


def _replicated(type: TensorType, mesh: Mesh) -> TensorType:
    return TensorType(type.dtype, tuple(Axis.of(s) for s in type.shape), mesh)


@dataclass(frozen=True)
class _Computation:
    """A computation on operands of these types, on one mesh; each map takes an operand's axes to the result's axes."""

    op: TensorOp
    mesh: Mesh
    types: tuple[TensorType, ...]
    maps: tuple[Map, ...]
    wanted: TensorType  # the annotated type of the result; without a mesh if it has no annotation

    def choose(self, types: Sequence[TensorType]) -> OperandShardings:
        dtype, shape = self.op.result()
        homes = {mark: self.home(mark) for mark in self.mesh.axes}
        for j, size in enumerate(shape):
            self.thin_out(j, size, homes)
        layouts = [self.layout(j, size, _at(homes, j)) for j, size in enumerate(shape)]
        inner = self.contracted_layout(_at(homes, CONTRACTED))

        def layout(axis: Axis, to: int) -> Axis:
            sharded = layouts[to] if to >= 0 else inner if to == CONTRACTED else None
            return Axis.of(axis.extent) if sharded is None else sharded.resized(axis.extent)

        operands = tuple(
            replace(
                t,
                mesh=self.mesh,
                partial=tuple(mark for mark in t.partial if self.stays(mark, homes, i)),
                axes=tuple(layout(axis, to) for axis, to in zip(t.axes, m, strict=True)),
            )
            for i, (t, m) in enumerate(zip(types, self.maps, strict=True))
        )
        partial = tuple(sorted(_at(homes, CONTRACTED)))
        return OperandShardings(operands, TensorType(dtype, tuple(layouts), self.mesh, partial))

    @property
    def contracting(self) -> list[int]:
        """Return the positions of operands with a contracted axis, except operands that follow others."""
        return [i for i, m in enumerate(self.maps) if CONTRACTED in m and i not in self.op.following]

    @property
    def added(self) -> set[str]:
        """Return the mesh axes over which the result of an addition or of an exact cast stays a partial sum."""
        if isinstance(self.op, Cast) and self.op.exact:
            return set(self.types[0].partial) & set(self.wanted.partial)
        if not isinstance(self.op, Add):
            return set()
        return set.intersection(*(set(t.partial) for t in self.types))

    def stays(self, mark: str, homes: Mapping[str, int | None], operand: int) -> bool:
        """Return True if an operand may be a partial sum over a mesh axis, as a term of a sum or a product's addend."""
        added = operand in self.op.following and homes[mark] == CONTRACTED
        return mark in self.added or added

    def home(self, mark: str) -> int | None:
        """Return the axis of the result that a mesh axis shards, CONTRACTED for a partial sum, or None."""
        if mark in self.added:
            return CONTRACTED
        at = [m[k] if (k := t.axis_on(mark)) is not None else None for t, m in zip(self.types, self.maps, strict=True)]
        if self.contracting and all(at[i] == CONTRACTED for i in self.contracting):
            return CONTRACTED
        if self.wanted.mesh is not None:
            axis = self.wanted.axis_on(mark)
            return axis if any(axis in m for m in self.maps) else None  # else the axis is gathered on each rank
        first = (1, 0, 2) if isinstance(self.op, Contraction) else range(len(at))
        leading = [i for i in first if i < len(at) and i not in self.op.following]
        return next((to for i in leading if (to := at[i]) is not None and to >= 0), None)

    def thin_out(self, axis: int, size: Size, homes: dict[str, int | None]) -> None:
        """Remove mesh axes from an axis of the result that is too short to be sharded over all of them."""
        marks = [mark for mark in self.mesh.axes if homes[mark] == axis]
        while marks and self.from_annotation(axis, set(marks)) is None:
            if size.divisible_by(prod(self.mesh.size(mark) for mark in marks)):
                return
            homes[marks.pop()] = None

    def layout(self, axis: int, size: Size, marks: set[str]) -> Axis:
        """Return the sharding of an axis of the result: as annotated, as in an operand, or plain blocks."""
        return (self.from_annotation(axis, marks) or _blocks(self.mesh, size, marks)).resized(size)

    def from_annotation(self, axis: int, marks: set[str]) -> Axis | None:
        """Return an axis with exactly these marks from the annotation or from an operand, or None."""
        candidates = [self.wanted.axes[axis]] if self.wanted.mesh else []
        operands = (
            pair for i, pair in enumerate(zip(self.types, self.maps, strict=True)) if i not in self.op.following
        )
        candidates += [t.axes[k] for t, m in operands for k, to in enumerate(m) if to == axis]
        return next((a.without(STREAM) for a in candidates if set(a.without(STREAM).marks) == marks), None)

    def contracted_layout(self, marks: set[str]) -> Axis | None:
        """Return the sharding of the contracted axis, or None without a contracted axis."""
        axes = [self.types[i].axes[self.maps[i].index(CONTRACTED)] for i in self.contracting]
        layout = next((a.without(STREAM) for a in axes if set(a.marks) - {STREAM} == marks), None)
        return layout or (_blocks(self.mesh, axes[0].extent, marks) if axes else None)


def _at(homes: dict[str, int | None], axis: int) -> set[str]:
    return {mark for mark, home in homes.items() if home == axis}


def _blocks(mesh: Mesh, size: Size, marks: set[str]) -> Axis:
    names = [m for m in mesh.axes if m in marks]
    if not names:
        return Axis.of(size)
    outer = [Factor(Size(mesh.size(m)), m) for m in names[:-1]]
    rest = size
    for factor in outer:
        rest = rest / factor.extent
    return Axis((*outer, Factor(rest, names[-1])))


def choose_view(op: ViewStatement, x: TensorType, wanted: TensorType) -> OperandShardings:
    """Choose the operand's sharding for a view: elements stay on their ranks if possible; else they are gathered first.

    A partial sum is reduced before the view, unless the result is declared as a partial sum as well.
    """
    mesh = wanted.mesh or x.mesh
    assert mesh is not None
    partial = tuple(mark for mark in x.partial if mark in wanted.partial)
    source = replace(x.host(), mesh=mesh, partial=partial) if x.mesh == mesh else _replicated(x, mesh)
    if isinstance(op, Permute):
        return OperandShardings((source,), source.with_axes(source.axes[i] for i in op.axes))
    assert isinstance(op, Reshape)
    shape = wanted.shape
    while (axes := place_marks(shape, flat_marks(source))) is None:
        last = flat_marks(source)[-1][0]
        source = source.with_axes(a.without(last) for a in source.axes)
    return OperandShardings((source,), source.with_axes(axes))


def result_of(s: Statement) -> Value:
    """Return the tensor that a statement of a fusion defines: each statement of a fusion defines exactly one."""
    assert isinstance(s, (TensorOp, ViewStatement, Communication, Reshard))
    return s.out


def operands_of(s: Statement) -> tuple[Value, ...]:
    """Return the tensors that a statement of a fusion reads or views."""
    return tuple(s.values(Codec.READ, Codec.ALIAS))


def users_of(program: Program) -> dict[str, list[Statement]]:
    """Map each tensor of a fusion to the statements that read or view it, with one entry for each use."""
    users: dict[str, list[Statement]] = {}
    for s in program.body:
        for v in operands_of(s):
            users.setdefault(v.name, []).append(s)
    return users


def stream_place(axis: Axis) -> tuple[Size, Size] | None:
    """Return two extents of an axis: outside its Stream part, and of the Stream part; None without one."""
    outer = Size()
    for factor in axis.factors:
        if factor.on == STREAM:
            return outer, factor.extent
        outer = outer * factor.extent
    return None


def keeps_dense(s: Statement) -> bool:
    """Return True if the view of a dense tensor is dense: a reshape, or a permute that only moves axes of extent 1."""
    if not isinstance(s, Permute):
        return isinstance(s, Reshape)
    local = s.x.tensor.local_shape
    long = [i for i in s.axes if not local[i].is_one]
    return long == sorted(long)


def splits_only(s: Reshape) -> bool:
    """Return True if every axis of the result lies within one axis of the operand; then any strides allow a view."""
    inside = [size for size in s.out.tensor.local_shape if not size.is_one]
    for rest in s.x.tensor.local_shape:
        while inside and not rest.is_one and is_multiple(rest, inside[0]):
            rest = rest / inside.pop(0)
        if not rest.is_one:
            return False
    return True


# The pass -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Propagate(Pass):
    """Gives each tensor without a mesh a sharding: inputs are replicated, results follow from their operands."""

    name = "propagate"
    explicit_reshards = False

    def run(self, program: Program) -> Program:
        program = _without_lone_axes(program)
        values: dict[str, Value] = {}
        for value in program.inputs:
            values[value.name] = replace(value, type=_on(value.tensor, program.meshes[0]))
        body = []
        wanted = _wanted(program)
        for s in program.body:
            renamed = s.rename(values)
            result = result_of(renamed)
            if result.tensor.mesh is None:
                type = _sharded(renamed, result.tensor, wanted.get(result.name))
                values[result.name] = replace(result, type=type)
                renamed = renamed.rename(values)
            body.append(renamed)
        outputs = tuple(values.get(v.name, v) for v in program.outputs)
        return replace(program, inputs=tuple(values[v.name] for v in program.inputs), outputs=outputs, body=tuple(body))


def _without_lone_axes(program: Program) -> Program:
    """Remove sharding over mesh axes of one rank, unless explicit communications may name them."""
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
    """Map each tensor to the sharding that its only user, elementwise or a reshape, needs: the goal of a reduction."""
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
            # Ranks may divide M*N, and not M: rows that lie there need what the user has not promised.
            if type and all(p.is_integer or any((p / other).is_integer for other in promised) for p in _parts(type)):
                wanted[s.x.name] = type
        if not isinstance(s, (Unary, Binary, RmsNorm)) or isinstance(s, Sum) or result.name not in wanted:
            continue
        for v in s.operands:
            if v.tensor.mesh is None and users[v.name] == [s] and v.tensor.shape == result.tensor.shape:
                wanted[v.name] = wanted[result.name]
    return wanted


def _parts(type: TensorType) -> list[Size]:
    """Return what a rank holds of each factor that lies over ranks."""
    return [type.local_factor(f) for axis in type.host().axes for f in axis.factors if f.on]


def _sharded(s: Statement, declared: TensorType, wanted: TensorType | None) -> TensorType:
    """Return the declared type with the sharding that follows from the statement; its Stream marks stay."""
    if isinstance(s, Reshard):
        return replace(declared, mesh=s.x.tensor.mesh)
    if isinstance(s, (Communication, Shard)):
        raise s.fail(f"the type of {s.out} must declare its sharding", hint=f"{s.keyword()} moves a tensor to it")
    if isinstance(s, ViewStatement):
        inferred = choose_view(s, s.x.tensor, declared).result
    else:
        assert isinstance(s, TensorOp)
        inferred = choose(s, _one_mesh(s), declared).result
        if wanted and inferred.partial and wanted.mesh == inferred.mesh:
            inferred = _reduced(inferred, wanted)
    axes = [_with_stream(s, g, d, inferred.mesh) for g, d in zip(inferred.axes, declared.axes, strict=True)]
    return TensorType(declared.dtype, tuple(axes), inferred.mesh)


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
    """Return the type of a partial sum once reduced. Its mesh axes shard the axes where the type `goal` has them."""
    axes = list(type.axes)
    for k, wanted in enumerate(goal.host().axes):
        if wanted.marks and set(wanted.marks) <= set(type.partial) and not axes[k].marks:
            axes[k] = wanted
    return type.with_axes(axes)


def _with_stream(s: Statement, axis: Axis, declared: Axis, mesh: Mesh | None) -> Axis:
    """Return `axis` with the declared Stream part."""
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
