"""Programs for several hosts: collectives in two levels, and the strategy `hierarchical`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hostir as hi
from examples import patterns
from hostir.call.bounds import compare
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir import HostIRError
from hostir.ir.comm_ops import Collective
from hostir.ir.program import Program, shared_across, sharing_teams, with_hosts
from hostir.job.hosts import equal_hosts
from hostir.lower.levels import Levels, hosts_along
from hostir.lower.pipeline import Sequential
from hostir.lower.strategies import EXPLICIT, FINISH, run_passes
from tests.call.whole import run_whole
from tests.golden import Golden
from tests.judging.mutation import tiny, unreported

OVERLAPPED = [
    patterns.allgather_matmul,
    patterns.allgather_matmul_rows,
    patterns.allgather_matmul_kept,
    patterns.column_parallel,
    patterns.gate_up,
    patterns.row_parallel_scattered,
    patterns.mlp,
    patterns.all_gather,
    patterns.reduce_scatter,
]
SUMMED = [patterns.row_parallel, patterns.row_parallel_bias, patterns.mlp_replicated, patterns.all_reduce]
OTHERS = [
    patterns.matmul_allgather,
    patterns.no_communication,
    patterns.weight_gathered_k,
    *patterns.NORMED,
    *patterns.EXPERTS,
    *patterns.SCALED,
]
GOLDEN = [patterns.allgather_matmul_rows, patterns.row_parallel_scattered, patterns.row_parallel, patterns.mlp]
# Deleting any statement that waits must be reported.
WAITS = ("delete wait", "delete synchronize", "delete barrier", "delete signal", "delete fork", "delete join")
Pattern = Callable[..., hi.Fusion]


def on_hosts(pattern: Pattern, ranks: int, hosts: int) -> Program:
    return with_hosts(pattern(ranks=ranks).program(), hosts)


def is_right(fusion: Program, program: Program, seed: int) -> bool:
    inputs = random_inputs(fusion, {}, seed=11)
    plain, exact = reference(fusion, inputs, dtype=None), reference(fusion, inputs)
    return all(c.good for c in compare(program, run_whole(program, inputs, seed=seed), plain, exact))


# Collectives in two levels --------------------------------------------------------------------------------------------
def collectives(program: Program) -> list[str]:
    return [f"{s.keyword()} {s.over}" for s in program.walk() if isinstance(s, Collective)]


def in_levels(fusion: Program) -> Program:
    return run_passes(fusion, [*EXPLICIT, Levels(), Sequential(), *FINISH])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (patterns.allgather_matmul_rows, ["allgather didx_hosts", "allgather didx"]),
        (patterns.row_parallel_scattered, ["reduce_scatter didx", "reduce_scatter didx_hosts"]),
        (patterns.row_parallel, ["reduce_scatter didx", "allreduce didx_hosts", "allgather didx"]),
    ],
)
def test_each_collective_between_hosts_has_two_levels(pattern: Pattern, expected: list[str]) -> None:
    fusion = on_hosts(pattern, 8, 2)
    program = in_levels(fusion)
    assert collectives(program) == expected
    assert is_right(fusion, program, seed=0)


def gathered(mesh: hi.DeviceMesh, *axes: str) -> Program:
    with hi.Fusion("gathered") as fusion:
        a, b = hi.tensor("a", [64, 8], "f32"), hi.tensor("b", [8, 6], "f32")
        c = a @ b
        fusion.output(c)
    for t in (a, b, c):
        t.set_device_mesh(mesh)
    for at, axis in enumerate(axes):
        a.split(at, mesh.ranks(axis))
        a.axis(at).parallelize(axis)
    return fusion.program()


def test_a_mesh_with_an_axis_for_hosts_gets_the_same_order() -> None:
    grid = hi.DeviceMesh([[0, 1], [2, 3]], names=("node", "tp"), hosts=2)
    assert collectives(hi.lower(gathered(grid, "node", "tp"), "sequential")) == ["allgather tp", "allgather node"]
    assert collectives(in_levels(gathered(grid, "node", "tp"))) == ["allgather node", "allgather tp"]
    text = str(hi.lower(gathered(grid, "node", "tp"), "hierarchical"))
    flat = str(hi.lower(gathered(hi.DeviceMesh(range(4), hosts=2), "didx"), "hierarchical"))
    assert flat.replace("didx_hosts", "node").replace("didx", "tp") == text


def test_ranks_of_a_team_must_lie_side_by_side_on_their_hosts() -> None:
    grid = hi.DeviceMesh([[0, 2], [1, 3]], names=("node", "tp"), hosts=2)
    mesh = gathered(grid, "node", "tp").meshes[0]
    assert [hosts_along(mesh, axis, 4) for axis in mesh.axes] == [1, 2]
    with pytest.raises(HostIRError, match=r"ranks 0 2 1 3 along didx lie on hosts 0 1 0 1"):
        hi.lower(gathered(hi.DeviceMesh([0, 2, 1, 3], hosts=2), "didx"), "hierarchical")


# Overlap --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pattern", GOLDEN)
def test_a_hierarchical_program_prints_as_its_golden_file(pattern: Pattern, golden: Golden) -> None:
    golden(f"hosts/{pattern.__name__}.hir", str(hi.lower(on_hosts(pattern, 4, 2), "hierarchical")))


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("pattern", [*OVERLAPPED, *SUMMED, *OTHERS])
def test_every_pattern_is_right_in_any_order(pattern: Pattern, hosts: int) -> None:
    fusion = on_hosts(pattern, 8, hosts)
    program = hi.lower(fusion, "hierarchical")
    assert is_right(fusion, program, seed=hosts)
    assert shared_across(program, equal_hosts(8, hosts)) is None


@pytest.mark.parametrize("pattern", OVERLAPPED)
def test_hosts_of_one_rank_share_no_memory(pattern: Pattern) -> None:
    fusion = on_hosts(pattern, 4, 4)
    program = hi.lower(fusion, "hierarchical")
    assert sharing_teams(program) == frozenset()
    assert program.streams
    assert is_right(fusion, program, seed=1)


@pytest.mark.parametrize("in_host", [2, 4, 8])
@pytest.mark.parametrize("pattern", [patterns.allgather_matmul_rows, patterns.row_parallel, patterns.mlp])
def test_programs_for_two_hosts_are_proved(pattern: Pattern, in_host: int) -> None:
    program = hi.lower(on_hosts(pattern, 2 * in_host, 2), "hierarchical")
    assert hi.check(program) == []
    assert {len(team) for team in sharing_teams(program)} == {in_host}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "ranks", "hosts"),
    [
        *((pattern, 4, hosts) for pattern in OVERLAPPED for hosts in (2, 4)),
        (patterns.row_parallel, 4, 2),
        (patterns.row_parallel, 8, 2),
        (patterns.mlp, 8, 2),
        (patterns.allgather_matmul_rows, 16, 2),
        (patterns.row_parallel_scattered, 16, 2),
    ],
)
def test_every_deleted_wait_is_reported(pattern: Pattern, ranks: int, hosts: int) -> None:
    sizes = {"M": 4 * ranks} if pattern is patterns.row_parallel else {}
    program = hi.lower(with_hosts(tiny(pattern, ranks, 2, **sizes).program(), hosts), "hierarchical", 2)
    assert hi.check(program) == []
    assert unreported(program, WAITS) == []


def test_slices_go_between_hosts_while_a_rank_computes_on_the_rows_of_its_host() -> None:
    fusion = with_hosts(patterns.allgather_matmul_rows(16, M=16384, K=8192, N=3584, dtype="bf16").program(), 2)
    hierarchical, sequential = (
        hi.timeline(hi.lower(fusion, strategy, 2), machine="h100x8") for strategy in ("hierarchical", "sequential")
    )
    assert hierarchical.exposed(0) < 0.03 * hierarchical.us
    assert 1.2 * hierarchical.us < sequential.us


@pytest.mark.parametrize(("streams", "slices"), [(1, 1), (2, 2), (4, 4), (5, 4), (8, 8)])
def test_the_number_of_streams_limits_the_number_of_slices(streams: int, slices: int) -> None:
    program = hi.lower(on_hosts(patterns.allgather_matmul_rows, 4, 2), "hierarchical", streams)
    assert f"for %s in 0..{slices} {{\n    set_stream 0" in str(program)


def test_rows_of_unknown_number_are_cut_in_two_slices() -> None:
    fusion = hi.parse(
        "hostir 1\nmesh @mesh [didx] = 0 1 2 3 hosts 2\n"
        "fusion @gathered(%a: f32[M@didx, 8], %b: f32[8, 6]) -> (%c) { %c: f32[M, 6] = matmul %a, %b }"
    )
    program = hi.lower(fusion, "hierarchical")
    assert "0..2 {\n    set_stream 0" in str(program)
    with pytest.raises(HostIRError, match="M"):
        program.check_sizes({"M": 4})
    program.check_sizes({"M": 8})


# What is refused ------------------------------------------------------------------------------------------------------
def test_a_mesh_must_state_its_hosts() -> None:
    with pytest.raises(HostIRError, match="the meshes of @mlp state no hosts") as refusal:
        hi.lower(patterns.mlp(), "hierarchical")
    assert "hosts=2" in str(refusal.value)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (patterns.alltoall, "'alltoall' moves rows between ranks of several hosts, and has no form in two levels"),
        (patterns.gather, "'gather' moves rows between ranks of several hosts"),
        (patterns.weight_gathered, "it moves the last axis, of which every row has a part on each rank"),
        (patterns.broadcast, "only allgathers, reduce_scatters and allreduces have two levels"),
        (patterns.mlp_2d, "its ranks share a host"),
    ],
)
def test_what_cannot_overlap_between_hosts_is_refused_with_the_reason(pattern: Pattern, reason: str) -> None:
    with pytest.raises(HostIRError) as refusal:
        hi.lower(with_hosts(pattern().program(), 2), "hierarchical")
    assert reason in str(refusal.value)


def test_an_allreduce_of_one_rank_a_host_is_refused_with_the_reason() -> None:
    with pytest.raises(HostIRError, match="only if its teams have several ranks on each host"):
        hi.lower(on_hosts(patterns.row_parallel, 2, 2), "hierarchical")
