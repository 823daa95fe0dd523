"""Compute shardings: of a result from its operands, of a tensor after a reshape, and of a slice.

A mark is the mesh axis (or STREAM) on which a factor of a tensor axis lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hostir.ir.sizes import ONE, Size
from hostir.ir.types import Axis, DType, Factor, Mesh, TensorType

if TYPE_CHECKING:
    from hostir.ir.op import Statement, Value

MEET = "bring both to the same sharding: by 'reshard' in a fusion, by a communication in a host program"
CONTRACTED = -1  # in a Map: the axis is summed over, and the result does not have it
ALONE = -2  # in a Map: each rank reads all of the axis, for example a broadcast axis of extent 1
# For each axis of an operand: the axis of the result that has the same elements. An operand such as a scale may have
# one element for each block of the result's axis.
Map = tuple[int, ...]
Mark = tuple[str, Size, int]  # mesh axis; number of blocks outside it in the flattened tensor; number of ranks


def join(
    op: Statement, dtype: DType, shape: tuple[Size, ...], operands: Sequence[Value], maps: Sequence[Map]
) -> TensorType:
    """Return the type of the result if each rank computes on its local parts of the operands.

    An axis of the result has the sharding of the operands' axes that map to it. If a summed axis is sharded, the result
    is a partial sum over the same mesh axes. Raises if the parts of two operands do not match, because the operands
    then need a reshard first.
    """
    mesh = next((v.tensor.mesh for v in operands if v.tensor.mesh), None)
    axes: list[Axis | None] = [None] * len(shape)
    summed: list[tuple[Value, Axis]] = []
    for value, map in zip(operands, maps, strict=True):
        if value.tensor.partial:
            raise op.fail(f"{value} is a partial sum over {', '.join(value.tensor.partial)}", hint="reduce it first")
        for axis, to in zip(value.tensor.host().axes, map, strict=True):
            if to == CONTRACTED:
                summed.append((value, axis.resized(summed[0][1].extent) if summed else axis))
            elif to >= 0 and axes[to] is None:
                axes[to] = axis.resized(shape[to])
            elif to >= 0 and axes[to] != axis.resized(shape[to]):
                raise op.fail(
                    f"{value} is sharded unlike the other operands: {axis} meets {axes[to]}",
                    hint=MEET,
                )
            elif to == ALONE and axis.marks:
                raise op.fail(
                    f"each rank reads an axis of {value} as a whole, and it is sharded: {axis}",
                    hint="gather the axis first",
                )
    if any(axis != summed[0][1] for _, axis in summed):
        raise op.fail(
            "the contracted axes are sharded differently: " + " and ".join(f"{v} has {a}" for v, a in summed),
            hint=MEET,
        )
    partial = summed[0][1].marks if summed else ()
    full = tuple(axis or Axis.of(size) for axis, size in zip(axes, shape, strict=True))
    marks = [*partial, *(m for axis in full for m in axis.marks)]
    if twice := next((m for m in marks if marks.count(m) > 1), None):
        raise op.fail(f"two axes lie on {twice} at once", hint="gather one of the operands first")
    return TensorType(dtype, full, mesh, tuple(sorted(partial)))


def flat_marks(type: TensorType) -> tuple[Mark, ...]:
    """Return the mesh axes that shard a tensor, with their positions in the flattened tensor, outermost first.

    A reshape that moves no element to another rank keeps these positions.
    """
    marks, outer = [], ONE
    for axis in type.host().axes:
        for factor in axis.factors:
            if factor.on and type.mesh:
                marks.append((factor.on, outer, type.mesh.size(factor.on)))
            outer = outer * factor.extent
    return tuple(marks)


def place_marks(shape: tuple[Size, ...], marks: Sequence[Mark]) -> tuple[Axis, ...] | None:
    """Return axes of this shape that are sharded at the given positions of the flattened tensor (see `flat_marks`).

    Return None if the sharding over a mesh axis does not fit into a single axis.
    """
    axes, before, left = [], ONE, list(marks)
    for extent in shape:
        factors, rest, done = [], extent, ONE
        while (
            left
            and (left[0][1] / (before * done)).is_integer
            and is_multiple(rest, left[0][1] / (before * done) * left[0][2])
        ):
            name, outer, count = left.pop(0)
            skip = outer / (before * done)
            factors += [Factor(skip), Factor(Size(count), name)]
            rest, done = rest / (skip * count), done * skip * count
        axes.append(Axis((*factors, Factor(rest))).normal())
        before = before * extent
    return None if left else tuple(axes)


def refine(
    axis: Axis, outer: Size, count: Size, mesh: Mesh | None
) -> tuple[tuple[Factor, ...], tuple[Factor, ...]] | None:
    """Split an axis into [outer, count, inner]; return the factors of `outer` and the factors of `inner`.

    Return None if the sharding does not allow this split. A factor of E elements over D ranks counts as two factors: D
    over the ranks, and E/D on each rank. The split may separate these two.
    """
    pieces: list[Factor] = []
    for factor in axis.factors:
        ranks = mesh.size(factor.on) if mesh and factor.on in mesh.axes else None
        pieces += [Factor(Size(ranks), factor.on), Factor(factor.extent / ranks)] if ranks else [Factor(factor.extent)]
    before, position = [], ONE
    while position != outer:
        if not pieces:
            return None
        piece = pieces.pop(0)
        need = outer / position
        if piece.on is None and piece.extent != need and is_multiple(piece.extent, need):
            pieces.insert(0, Factor(piece.extent / need))
            piece = Factor(need)
        before.append(piece)
        position = position * piece.extent
        if not is_multiple(outer, position):
            return None
    while pieces and pieces[0].on is None and pieces[0].extent.is_one:
        pieces.pop(0)
    if not pieces or pieces[0].on is not None or not is_multiple(pieces[0].extent, count):
        return None if not count.is_one else (tuple(before), tuple(pieces))
    inner = (Factor(pieces[0].extent / count), *pieces[1:])
    return tuple(before), inner


def leads(type: TensorType, mark: str, axes: Iterable[Axis] | None = None) -> bool:
    """Return True if the factor on `mark` is outermost in memory: a rank has one element of each factor outside it.

    `axes` replaces the axes of the type.
    """
    for axis in type.axes if axes is None else axes:
        for factor in axis.factors:
            if factor.on == mark:
                return True
            if not type.local_factor(factor).is_one:
                return False
    return False


def is_multiple(extent: Size, of: Size) -> bool:
    """Return True if `extent` is a multiple of `of`, or may be one for some values of the symbols.

    `M` counts as a multiple of 4. 4 does not count as a multiple of `M`.
    """
    quotient = extent / of
    if quotient.is_integer or (of / extent).is_integer:
        return quotient.is_integer
    return bool(quotient.symbols) and all(power > 0 for _, power in quotient.symbols)
