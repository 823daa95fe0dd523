"""Choose operand shardings with which a statement needs no communication; for the passes `propagate` and `reshard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from hostir.ir.sharding import CONTRACTED, Map, flat_marks, place_marks
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import Add, Cast, TensorOp
from hostir.ir.types import STREAM, Axis, Factor, Mesh, TensorType
from hostir.ir.view_ops import Permute, Reshape, ViewStatement


@dataclass(frozen=True)
class OperandShardings:
    """Types of operands with which a statement needs no communication, and the type of the result."""

    operands: tuple[TensorType, ...]
    result: TensorType


def choose(op: TensorOp, types: Sequence[TensorType], wanted: TensorType) -> OperandShardings:
    """Choose, for each mesh axis, the tensor axis that it shards in a computation; return the resulting types.

    The first of these rules that applies decides:

    - If all operands of a contraction are sharded on the contracted axis, they stay so, and the result is a partial
      sum.
    - If the result is annotated (`wanted`), operands are sharded to fit the annotation.
    - In a contraction, the sharding of the right operand decides; if it is not sharded, the left operand decides.
    - In other computations, the sharding of the first sharded operand decides.

    If no rule applies, no axis is sharded, and sharded operands are gathered. Raise HostIRError if ranks cannot compute
    on the resulting parts.
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
    """A computation on one mesh, with the types of its operands.

    `maps` holds, for each axis of each operand, the corresponding axis of the result.
    """

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
        """The positions of the operands with a contracted axis.

        Operands that follow the sharding of another operand are left out.
        """
        return [i for i, m in enumerate(self.maps) if CONTRACTED in m and i not in self.op.following]

    @property
    def added(self) -> set[str]:
        """The mesh axes over which an addition, an exact cast or a linear computation keeps a partial sum."""
        if isinstance(self.op, Cast) and self.op.exact:
            return set(self.types[0].partial) & set(self.wanted.partial)
        if self.op.linear_in is not None:
            return set(self.types[self.op.operands.index(self.op.linear_in)].partial)
        if not isinstance(self.op, Add):
            return set()
        return set.intersection(*(set(t.partial) for t in self.types))

    def stays(self, mark: str, homes: Mapping[str, int | None], operand: int) -> bool:
        """Return True if an operand may stay a partial sum over the mesh axis `mark`.

        Such an operand is a term of an addition of partial sums, the operand of an exact cast, or the bias of a product
        that is a partial sum.
        """
        if self.op.linear_in is not None and self.op.operands[operand] != self.op.linear_in:
            return False
        added = operand in self.op.following and homes[mark] == CONTRACTED
        return mark in self.added or added

    def home(self, mark: str) -> int | None:
        """Return the axis of the result that the mesh axis `mark` shards.

        Return CONTRACTED if the result is a partial sum over `mark`, and None if `mark` shards no axis of the result.
        """
        if mark in self.added:
            return CONTRACTED
        at = [m[k] if (k := t.axis_on(mark)) is not None else None for t, m in zip(self.types, self.maps, strict=True)]
        if self.contracting and all(at[i] == CONTRACTED for i in self.contracting):
            return CONTRACTED
        if self.wanted.mesh is not None:
            axis = self.wanted.axis_on(mark)
            return axis if any(axis in m for m in self.maps) else None  # else the axis is gathered on each rank
        first = (1, 0, 2) if self.op.contracts else range(len(at))
        leading = [i for i in first if i < len(at) and i not in self.op.following]
        return next((to for i in leading if (to := at[i]) is not None and to >= 0), None)

    def thin_out(self, axis: int, size: Size, homes: dict[str, int | None]) -> None:
        """Remove mesh axes from an axis of the result until the number of its ranks divides the size of the axis.

        `homes` maps each mesh axis to the axis of the result that it shards. This method changes the map.
        """
        marks = [mark for mark in self.mesh.axes if homes[mark] == axis]
        while marks and self.from_annotation(axis, set(marks)) is None:
            if size.divisible_by(prod(self.mesh.size(mark) for mark in marks)):
                return
            homes[marks.pop()] = None

    def layout(self, axis: int, size: Size, marks: set[str]) -> Axis:
        """Return an axis of the result, sharded over the mesh axes `marks`.

        The layout is taken from the annotation, or else from an operand. If neither fits, the axis is cut into plain
        blocks.
        """
        return (self.from_annotation(axis, marks) or _blocks(self.mesh, size, marks)).resized(size)

    def from_annotation(self, axis: int, marks: set[str]) -> Axis | None:
        """Return the annotated axis of the result if it is sharded over exactly the mesh axes `marks`.

        Otherwise return the first corresponding axis of an operand that is sharded over exactly these mesh axes. Return
        None if there is no such axis.
        """
        candidates = [self.wanted.axes[axis]] if self.wanted.mesh else []
        operands = (
            pair for i, pair in enumerate(zip(self.types, self.maps, strict=True)) if i not in self.op.following
        )
        candidates += [t.axes[k] for t, m in operands for k, to in enumerate(m) if to == axis]
        return next((a.without(STREAM) for a in candidates if set(a.without(STREAM).marks) == marks), None)

    def contracted_layout(self, marks: set[str]) -> Axis | None:
        """Return the contracted axis, sharded over the mesh axes `marks`; None if there is no contracted axis."""
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
    """Choose the sharding of a view's operand; return the types of operand and result.

    Elements stay on their ranks if possible. Otherwise they are gathered first. A partial sum is reduced before the
    view, unless the result is declared as a partial sum, too.
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
