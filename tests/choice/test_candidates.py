"""The candidates that a platform can run, and the reasons why the others are impossible."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

import hostir as hi
from examples import patterns
from hostir.choice import platforms
from hostir.choice.candidates import candidates_of
from hostir.choice.choices import Candidate
from hostir.choice.hardware import CPU, H200
from hostir.choice.platforms import FOR_TESTING, Platform, reference
from hostir.ir.comm_ops import Implemented
from hostir.ir.program import shares_memory
from hostir.lower import STRATEGIES
from tests.choice.fusions import turned

H200X4 = reference(H200, 4)
GPUS = Platform("cuda", "NVIDIA H200", 4, "nvlink", (("torch", "2.11"),), H200)
PROCESSES = Platform("gloo", "CPU", 4, "one host", (), CPU, FOR_TESTING, runs_all=True)


def strategies(fusion: hi.Fusion, platform: Platform = H200X4, kernels: str = "auto") -> set[str]:
    return {c.strategy for c in candidates_of(fusion.program(), platform, kernels).programs}


def reasons(fusion: hi.Fusion, platform: Platform = H200X4) -> dict[str, str]:
    return {it.candidate.strategy: it.reason for it in candidates_of(fusion.program(), platform).impossible}


GATHERS = "sequential by low_latency", "sequential by copy_engine"


def test_an_allgather_of_rows_can_run_with_every_strategy() -> None:
    candidates = candidates_of(patterns.allgather_matmul(S=4).program(), H200X4, for_testing=True)
    assert {c.strategy for c in candidates.programs} == {*STRATEGIES, *GATHERS} - {"chain"}
    assert {c.streams for c in candidates.programs if c.strategy == "pipeline"} == {2, 4}
    assert {c.kernels for c in candidates.programs} == {"cublas", "triton"}
    assert [(it.candidate.strategy, it.warn) for it in candidates.impossible] == [("chain", False)]
    assert candidates.not_overlapped == ()
    for candidate, program in candidates.programs.items():
        assert program == hi.lower(patterns.allgather_matmul(S=4), candidate.strategy, candidate.streams)


def test_without_a_stream_axis_there_is_no_pipeline() -> None:
    with hi.Fusion("f") as fusion:
        a, b = hi.tensor("a", [8, 4], "f32"), hi.tensor("b", [4, 4], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(2))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    assert strategies(fusion, reference(H200, 2)) == {
        "sequential",
        *GATHERS,
        "ring",
        "fused",
        "push",
    }
    assert re.fullmatch(
        r"the allgather at .*test_candidates.py:\d+:\d+ is not overlapped: "
        "no tensor has a Stream axis to slice it along, so 'pipeline' does the same as 'sequential'",
        reasons(fusion, reference(H200, 2))["pipeline"],
    )


SCALES_AND_SUM = """hostir 1
mesh @mesh [didx] = 0 1
fusion @f(%s: f32[2@didx, M, 1], %x: bf16[M, 64] partial(didx)) -> (%t, %y) {
  %t: f32[2, M, 1] = reshard %s
  %y: bf16[M, 64] = reshard %x
}
"""


def test_a_gather_that_not_all_sizes_allow_does_not_keep_sums_from_an_implementation() -> None:
    program = hi.lower(hi.parse(SCALES_AND_SUM), "sequential by low_latency")
    by = {s.keyword(): s.by for s in program.walk() if isinstance(s, Implemented)}
    assert by == {"allgather": "", "allreduce": "low_latency"}
    assert not list(program.divisions)
    alone = SCALES_AND_SUM.replace("  %y: bf16[M, 64] = reshard %x\n", "").replace("%t, %y", "%t")
    (gather,) = [s for s in hi.lower(hi.parse(alone), "sequential by low_latency").walk() if isinstance(s, Implemented)]
    assert gather.by == "low_latency", "by itself it may need a multiple of 4 as M"
    refused = SCALES_AND_SUM.replace("bf16[M, 64]", "bf16[3]")
    by = {s.keyword(): s.by for s in hi.lower(hi.parse(refused), "sequential by low_latency").walk() if "by" in vars(s)}
    assert by == {"allgather": "low_latency", "allreduce": ""}, "a sum that is refused limits nothing"


def test_the_reason_is_the_refusal_of_the_lowering() -> None:
    refusals = reasons(patterns.alltoall())
    assert "handles only allgathers and reduce_scatters of rows, and allreduces" in refusals["ring"]
    assert "handles only allgathers and reduce_scatters of rows, and allreduces" in refusals["fused"]
    assert strategies(patterns.alltoall()) == {"sequential"}
    named = {"sequential by low_latency", "sequential by one_shot", "sequential by two_shot"}
    assert strategies(patterns.row_parallel()) == {"sequential", "pipeline", "ring", "chain", "fused", "push", *named}


def test_a_fusion_without_communication_has_only_the_sequential_candidate() -> None:
    assert strategies(patterns.no_communication()) == {"sequential"}
    assert set(reasons(patterns.no_communication())) == {"pipeline", "ring", "chain", "fused", "push"}
    assert set(reasons(patterns.no_communication()).values()) == {"no communication to overlap"}


def test_a_communication_that_one_candidate_overlaps_is_not_reported() -> None:
    candidates = candidates_of(turned().program(), H200X4)
    fused = next(p for c, p in candidates.programs.items() if c.strategy == "fused")
    assert any(s.note.startswith("not overlapped: ") for s in fused.walk())
    assert candidates.not_overlapped == ()  # the pipeline overlaps them


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"link": "no peer access", "refuses": platforms.NO_PEER_ACCESS}, "no peer access"),
        ({"link": "several hosts", "hosts": ((0, 1, 2), (3,))}, "ranks 0 and 3 are on different hosts"),
    ],
)
def test_without_peer_access_only_candidates_with_collectives_remain(change: Mapping[str, str], reason: str) -> None:
    candidates = candidates_of(patterns.allgather_matmul().program(), replace(GPUS, **change))
    assert {c.strategy for c in candidates.programs} == {"sequential", "pipeline"}
    assert not any(shares_memory(p) for p in candidates.programs.values())
    impossible = {"ring", "chain", "fused", "push", *GATHERS}
    assert {it.candidate.strategy for it in candidates.impossible} == impossible
    assert all(reason in it.reason and it.warn for it in candidates.impossible)


def test_on_a_cpu_copies_between_ranks_are_for_testing_but_can_be_measured() -> None:
    program = patterns.allgather_matmul().program()
    chosen = candidates_of(program, PROCESSES)
    assert {c.strategy for c in chosen.programs} == {"sequential", "pipeline"}
    assert {c.kernels for c in chosen.programs} == {"aten"}
    assert {it.reason for it in chosen.impossible} == {FOR_TESTING}
    measured = candidates_of(program, PROCESSES, for_testing=True)
    assert {c.strategy for c in measured.programs} == {"sequential", "pipeline", "ring", "fused", "push"}


def test_requested_kernels_are_the_only_candidates() -> None:
    candidates = candidates_of(patterns.allgather_matmul().program(), GPUS, "triton")
    assert {c.kernels for c in candidates.programs} == {"triton"}


def test_a_sum_without_a_matmul_uses_triton_and_a_lone_allgather_uses_aten() -> None:
    summed = candidates_of(patterns.reduce_scatter(ranks=4).program(), H200X4)
    assert {c.kernels for c in summed.programs} == {"triton"}
    assert {c.kernels for c in candidates_of(patterns.all_gather(ranks=4).program(), H200X4).programs} == {"aten"}


def test_candidates_with_the_same_program_are_listed_once() -> None:
    candidates = candidates_of(patterns.allgather_matmul(S=2).program(), H200X4, "aten")
    assert [c for c in candidates.programs if c.strategy == "pipeline"] == [Candidate("pipeline", 2, "aten")]


def test_fused_on_two_streams_is_a_candidate_if_a_kernel_waits_for_several_copies() -> None:
    def fused(ranks: int, slices: int = 1) -> list[str]:
        fusion = patterns.allgather_matmul(ranks=ranks, S=slices, M=64 * ranks)
        candidates = candidates_of(fusion.program(), reference(H200, ranks))
        return [str(c) for c in candidates.programs if c.strategy == "fused"]

    assert fused(2) == ["fused, cublas", "fused, triton"]
    assert fused(4) == fused(2, slices=4) == ["fused, cublas", "fused, triton", "fused, 2 streams, triton"]


# Platforms --------------------------------------------------------------------------------------------------------
def facts(**changes: object) -> dict[str, object]:
    versions = {"torch": "2.11"}
    return {
        **{"machine": "cuda", "versions": versions, "peers": "nvlink", "refuses": "", "name": "H200"},
        "calibration": ({}, 1),
        **changes,
    }


def test_one_rank_without_peer_access_is_enough_to_rule_it_out() -> None:
    platform = platforms.platform_of([facts(), facts(peers="no peer access")])
    assert (platform.link, platform.ranks) == ("no peer access", 2)
    assert platform.refuses


def test_only_ranks_of_one_host_share_memory() -> None:
    assert platforms.platform_of([facts()] * 2, ((0,), (1,))).link == "several hosts"
    platform = platforms.platform_of([facts(machine="gloo", name="CPU")] * 4, ((0, 2), (1, 3)))
    assert str(platform) == "4 x CPU on 2 hosts"
    across = hi.lower(patterns.allgather_matmul(), "ring")
    assert platform.unreachable(across).endswith("ranks 0 and 1 are on different hosts")
    assert not replace(platform, hosts=()).unreachable(across)
    assert not platform.unreachable(hi.lower(patterns.allgather_matmul(), "pipeline"))


def test_a_symmetric_memory_backend_without_peer_copies_is_the_reason() -> None:
    assert platforms.platform_of([facts(), facts(refuses="its backend is NVSHMEM")]).refuses == "its backend is NVSHMEM"


def test_a_gpu_without_constants_is_estimated_as_h200_with_a_note() -> None:
    platform = platforms.platform_of([facts(name="NVIDIA B200")] * 2)
    assert platform.hardware == H200
    assert "no constants for NVIDIA B200" in platform.note
    assert not platforms.platform_of([facts()] * 2).note


def test_the_identity_of_a_platform_has_everything_that_times_depend_on() -> None:
    one = platforms.platform_of([facts()] * 2).identity
    others = [
        platforms.platform_of([facts()] * 4),
        platforms.platform_of([facts(name="H100")] * 2),
        platforms.platform_of([facts(peers="peer access")] * 2),
        platforms.platform_of([facts(versions={"torch": "2.12"})] * 2),
    ]
    assert all(other.identity != one for other in others)


def test_a_gpu_without_triton_has_aten_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostir.choice.candidates.find_spec", lambda name: None)
    for fusion in (patterns.reduce_scatter(ranks=4), patterns.allgather_matmul(ranks=4)):
        assert {c.kernels for c in candidates_of(fusion.program(), GPUS).programs} == {"aten"}
    elsewhere = candidates_of(patterns.allgather_matmul(ranks=4).program(), reference(H200, 4)).programs
    assert {c.kernels for c in elsewhere} == {"cublas", "triton"}, "estimates for another machine assume Triton"
