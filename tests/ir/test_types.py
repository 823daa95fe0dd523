from __future__ import annotations

import pytest

from hostir.ir import Axis, DType, Mesh, TensorType
from hostir.ir.sizes import Size
from hostir.ir.types import DTYPES, STREAM, Factor

GRID = Mesh("grid", ("dp", "tp"), (2, 3), (5, 4, 3, 2, 1, 0))
LINE = Mesh("line", ("x",), (4,), (3, 1, 0, 2))


def axis(*factors: tuple[int, str | None]) -> Axis:
    return Axis(tuple(Factor(Size(extent), on) for extent, on in factors))


def tensor(*axes: Axis, mesh: Mesh | None = GRID) -> TensorType:
    return TensorType(DTYPES["f32"], axes, mesh)


def test_a_mesh_knows_the_coordinates_of_each_device() -> None:
    assert [(GRID.coordinate(d, "dp"), GRID.coordinate(d, "tp")) for d in GRID.devices] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_a_team_lists_the_devices_along_one_axis_in_mesh_order() -> None:
    assert GRID.teams("tp") == ((5, 4, 3), (2, 1, 0))
    assert GRID.teams("dp") == ((5, 2), (4, 1), (3, 0))
    assert GRID.team(1, "tp") == (2, 1, 0)
    assert LINE.teams("x") == ((3, 1, 0, 2),)


def test_a_mesh_prints_as_it_is_written() -> None:
    assert str(GRID) == "@grid [dp, tp] = (5 4 3) (2 1 0)"
    assert str(LINE) == "@line [x] = 3 1 0 2"


def test_a_rank_holds_its_part_of_every_sharded_factor() -> None:
    type = tensor(axis((8, None), (6, "tp")), axis((4, "dp")), axis((5, None)))
    assert [s.value for s in type.shape] == [48, 4, 5]
    assert [s.value for s in type.local_shape] == [16, 2, 5]


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        (axis((2, None), (4, None)), axis((8, None))),
        (axis((2, "dp"), (4, None)), axis((8, "dp"))),
        (axis((2, "dp"), (3, "tp"), (4, None)), axis((2, "dp"), (12, "tp"))),
        (axis((1, None), (6, "tp")), axis((6, "tp"))),
        (axis((1, None), (1, None)), axis((1, None))),
        (axis((2, None), (3, STREAM), (4, None)), axis((2, None), (3, STREAM), (4, None))),
    ],
)
def test_the_normal_form_merges_factors_that_no_mark_separates(written: Axis, normal: Axis) -> None:
    assert written.normal() == normal
    assert written.extent == normal.extent


def test_marks_are_removed_one_by_one() -> None:
    both = axis((2, "dp"), (3, "tp"), (4, None))
    assert both.marks == ("dp", "tp")
    assert both.without("dp") == axis((2, None), (12, "tp"))
    assert both.without("tp") == axis((24, "dp"))
    assert both.without("dp", "tp") == axis((24, None))


def test_a_type_prints_as_it_is_written() -> None:
    type = tensor(axis((8, None), (6, "tp")), axis((4, "dp")), Axis.of("M"))
    assert str(type) == "f32[(8 6@tp), 4@dp, M]"
    assert str(TensorType(DTYPES["bf16"], (), GRID, ("tp",))) == "bf16[] partial tp"


def test_a_host_program_has_no_stream_axes() -> None:
    assert tensor(axis((2, STREAM), (4, None))).host() == tensor(axis((8, None)))


def test_each_dtype_has_its_size_in_bytes() -> None:
    wide = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
    assert {name: d.bytes for name, d in DTYPES.items()} == wide | {"f8e4m3": 1, "f8e5m2": 1, "i32": 4, "i64": 8}
    assert str(tensor(Axis.of(4), mesh=None).__class__(DType("f8e4m3", 1), (Axis.of(4),))) == "f8e4m3[4]"
