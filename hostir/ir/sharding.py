"""Compute the sharding of the result of a computation, of a reshaped tensor, and of a slice of a tensor.

A tensor axis is a product of factors. The mark of a factor is the mesh axis over which it is sharded, or STREAM if a
loop runs over slices of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hostir.ir.sizes import ONE, Size
from hostir.ir.types import Axis, DType, Factor, Mesh, TensorType

if TYPE_CHECKING:
    from hostir.ir.op import Statement, Value

MEET = "bring both to the same sharding: by 'reshard' in a fusion, by a communication in a host program"
CONTRACTED = -1  # the entry in a Map for an axis that is summed over: the result does not have it
ALONE = -2  # the entry in a Map for an axis that each rank reads completely, such as a broadcast axis of extent 1
# For each axis of an operand: the index of the matching axis of the result. The two axes have the same extent, or one
# element of the operand's axis belongs to a block of elements of the result's axis, as for a scale.
Map = tuple[int, ...]
Mark = tuple[str, Size, int]  # a mesh axis, the product of all extents outside the factor on it, the number of ranks


def join(
    op: Statement, dtype: DType, shape: tuple[Size, ...], operands: Sequence[Value], maps: Sequence[Map]
) -> TensorType:
    """Return the type of the result of a computation in which each rank computes on its parts of the operands.

    An axis of the result has the sharding of the operands' axes that map to it. If a summed axis is sharded, the result
    is a partial sum over the same mesh axes. Raises if the shardings of two operands do not match, because an operand
    then needs a reshard first.

    Args:
        op: the computation, for errors.
        dtype: the dtype of the result.
        shape: the shape of the unsharded result.
        operands: the operands.
        maps: for each operand, the `Map` from its axes to the axes of the result.
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
    """Return a `Mark` for each sharded factor of a tensor, outermost first.

    A mark gives the position of the factor in the flattened tensor. A reshape that moves no element to another rank
    does not change the marks.
    """
    marks, outer = [], ONE
    for axis in type.host().axes:
        for factor in axis.factors:
            if factor.on and type.mesh:
                marks.append((factor.on, outer, type.mesh.size(factor.on)))
            outer = outer * factor.extent
    return tuple(marks)


def place_marks(shape: tuple[Size, ...], marks: Sequence[Mark]) -> tuple[Axis, ...] | None:
    """Return the sharded axes of a tensor with this shape. `marks` describes its sharding (see `flat_marks`).

    Return None if a sharded factor does not fit into a single axis of the shape.
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
    """Split an axis into three axes [outer, count, inner]; return the factors of `outer` and the factors of `inner`.

    A factor of E elements that is sharded over D ranks is treated as two factors: D over the ranks, and E/D on each
    rank. So `outer` may be the ranks, and `inner` a part of each rank's elements. Return None if the sharding does not
    allow the split.
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
    """Return True if the factor on the mesh axis `mark` is outermost in the memory of a rank.

    The factor is outermost if a rank has only one element of each factor outside it. If `axes` is given, `axes`
    replaces the axes of the type.
    """
    for axis in type.axes if axes is None else axes:
        for factor in axis.factors:
            if factor.on == mark:
                return True
            if not type.local_factor(factor).is_one:
                return False
    return False


def is_multiple(extent: Size, of: Size) -> bool:
    """Return True if `extent` is a multiple of `of`, or if it can be a multiple for some values of the symbols.

    The symbol `M` can be a multiple of 4. But 4 is not treated as a multiple of `M`.
    """
    quotient = extent / of
    if quotient.is_integer or (of / extent).is_integer:
        return quotient.is_integer
    return bool(quotient.symbols) and all(power > 0 for _, power in quotient.symbols)
