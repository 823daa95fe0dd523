"""Shardings after reshapes and slices, compared element by element with what each rank holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hostir.call.parts import shard
from hostir.ir import Axis, Mesh, TensorType
from hostir.ir.sharding import flat_marks, is_multiple, leads, place_marks, refine
from hostir.ir.sizes import Size
from hostir.ir.types import DTYPES, Factor

MESH = Mesh("mesh", ("dp", "tp"), (2, 2), (0, 1, 2, 3))


def axis(*factors: tuple[int, str | None]) -> Axis:
    return Axis(tuple(Factor(Size(extent), on) for extent, on in factors))


def tensor(*axes: Axis) -> TensorType:
    return TensorType(DTYPES["f32"], axes, MESH)


def parts(type: TensorType) -> list[list[float]]:
    """Return the elements of the flattened tensor that each rank holds, in order."""
    shape = [s.bind({}) for s in type.shape]
    unsharded = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return [p.flatten().tolist() for rank in MESH.devices if (p := shard(unsharded, type, rank, {})) is not None]


factors = st.sampled_from([(2, None), (2, "dp"), (4, "tp"), (2, "tp"), (3, None), (4, "dp")])


@st.composite
def tensors(draw: st.DrawFn) -> TensorType:
    drawn = draw(st.lists(st.lists(factors, min_size=1, max_size=2), min_size=1, max_size=3))
    seen: set[str] = set()
    axes = []
    for parts in drawn:
        kept = [(e, on if on not in seen else None) for e, on in parts]
        kept = [(e, on if on is None or [o for _, o in kept].count(on) == 1 else None) for e, on in kept]
        seen |= {on for _, on in kept if on}
        axes.append(axis(*kept))
    return tensor(*axes)


@given(tensors(), st.data())
def test_a_reshape_leaves_every_element_on_its_rank(type: TensorType, data: st.DataObject) -> None:
    total = torch.Size([s.bind({}) for s in type.shape]).numel()
    outer = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    shape = (Size(outer), Size(total // outer))
    placed = place_marks(shape, flat_marks(type))
    if placed is None:
        return
    other = tensor(*placed)
    assert other.shape == shape
    assert flat_marks(other) == flat_marks(type)
    assert parts(other) == parts(type)


@given(tensors())
def test_marks_can_always_be_placed_in_the_same_shape(type: TensorType) -> None:
    placed = place_marks(type.shape, flat_marks(type))
    assert placed is not None
    assert parts(tensor(*placed)) == parts(type)


@pytest.mark.parametrize(
    ("given_axis", "outer", "count", "before", "inner"),
    [
        (axis((16, None)), 1, 4, (), ((4, None),)),
        (axis((16, None)), 2, 4, ((2, None),), ((2, None),)),
        (axis((16, "dp")), 2, 4, ((2, "dp"),), ((2, None),)),
        (axis((2, "dp"), (8, "tp")), 4, 2, ((2, "dp"), (2, "tp")), ((2, None),)),
        (axis((16, "dp")), 1, 4, None, None),
        (axis((16, None)), 1, 3, None, None),
        (axis((6, None)), 4, 1, None, None),
        (axis((16, "dp")), 1, 1, (), ((2, "dp"), (8, None))),
    ],
)
def test_an_axis_is_cut_only_if_no_piece_spans_ranks(
    given_axis: Axis,
    outer: int,
    count: int,
    before: tuple[tuple[int, str | None], ...] | None,
    inner: tuple[tuple[int, str | None], ...] | None,
) -> None:
    cut = refine(given_axis, Size(outer), Size(count), MESH)
    if before is None or inner is None:
        assert cut is None
        return
    assert cut is not None
    assert [Axis(factors).normal() for factors in cut] == [axis(*before).normal(), axis(*inner).normal()]


def test_a_leading_mark_is_outermost_in_the_part_of_a_rank() -> None:
    assert leads(tensor(axis((1, None), (4, "tp"))), "tp")
    assert leads(tensor(axis((2, "dp")), axis((4, "tp"))), "tp")
    assert not leads(tensor(axis((4, "dp")), axis((4, "tp"))), "tp")
    assert not leads(tensor(axis((4, None))), "tp")


@pytest.mark.parametrize(
    ("extent", "of", "multiple"),
    [("8", "4", True), ("6", "4", False), ("M", "4", True), ("4", "M", False), ("2*M", "M", True), ("M", "2*M", False)],
)
def test_symbolic_sizes_can_be_multiples(extent: str, of: str, multiple: bool) -> None:
    assert is_multiple(Size.of(extent), Size.of(of)) == multiple


def test_every_rank_has_a_part() -> None:
    type = tensor(axis((4, "dp")), axis((2, "tp")))
    assert sorted(e for part in parts(type) for e in part) == [float(i) for i in range(8)]
