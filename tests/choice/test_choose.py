"""The choice of a strategy: the times that decide it, and its messages."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir import knobs
from hostir.choice import cache
from hostir.choice.cache import Entry
from hostir.choice.candidates import Candidates, candidates_of
from hostir.choice.choices import Candidate, Choice, Impossible, Timing, ranked_by
from hostir.choice.decision import UNMEASURED, choose, decide, estimated
from hostir.choice.hardware import CPU, H100, H200
from hostir.choice.platforms import FOR_TESTING, Platform, reference
from hostir.ir import source as notices
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.lower import STRATEGIES
from tests.choice.fusions import gathered_weight, turned

GPUS = Platform("cuda", "NVIDIA H200", 8, "nvlink", (("torch", "2.11"),), H200)
PROCESSES = Platform("gloo", "CPU", 4, "one host", (), CPU, FOR_TESTING, runs_all=True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path) -> Iterator[None]:
    notices._warned.clear()
    with knobs.scope(cache=tmp_path):
        yield


def rows(m: int, **sizes: int) -> hi.Fusion:
    return patterns.allgather_matmul_rows(ranks=8, S=1, M=m, **{"N": 3584, "K": 8192, **sizes}, dtype="bf16")


def symbolic() -> hi.Fusion:
    with hi.Fusion("symbolic") as fusion:
        a, b = hi.tensor("a", ["M", "K"], "f32"), hi.tensor("b", ["K", 8], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(2))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


def tuned(fusion: hi.Fusion, platform: Platform, times: dict[str, tuple[float, float | None]]) -> None:
    """Fill the cache as `hostir tune` would."""
    program = fusion.program()
    every = candidates_of(program, platform, for_testing=True).programs
    entries = {c: Entry.measured(p, *times[str(c)]) for c, p in every.items() if str(c) in times}
    assert len(entries) == len(times)
    cache.write(cache.key_of(program, {}, platform), program.name, entries)


def test_small_matmuls_stay_sequential_and_large_ones_are_overlapped() -> None:
    small = patterns.allgather_matmul_rows(ranks=8, S=1, M=64, N=1792, K=512, dtype="bf16")
    assert decide(small.program(), reference(H200, 8), {}, calls="graph").strategy == "sequential by low_latency"
    few = patterns.allgather_matmul_rows(ranks=8, S=1, M=2048, N=1792, K=4096, dtype="bf16")
    assert decide(few.program(), reference(H200, 8), {}, calls="graph").strategy == "push"
    assert decide(rows(8192).program(), reference(H200, 8), {}, calls="graph").strategy == "fused"


def test_without_measurements_the_lowest_estimate_is_chosen_and_listed_first() -> None:
    choice = decide(rows(4096).program(), GPUS, {})
    assert choice.source == "estimated"
    assert choice.taken == choice.timings[0].candidate
    times = [timing.us for timing in choice.timings]
    assert times == sorted(times)


def test_measurements_decide_before_estimates() -> None:
    tuned(rows(8192), GPUS, {"sequential, cublas": (100.0, 90.0), "fused, triton": (300.0, 95.0)})
    choice = decide(rows(8192).program(), GPUS, {})
    assert (choice.source, choice.strategy) == ("measured", "fused")
    assert len(choice.timings) == 2
    assert Impossible(Candidate("ring", 2, "cublas"), UNMEASURED) in choice.impossible


@pytest.mark.parametrize(("calls", "taken"), [("out", "fused"), ("eager", "sequential"), ("graph", "sequential")])
def test_the_mode_of_calls_selects_the_times_that_are_compared(calls: str, taken: str) -> None:
    tuned(rows(8192), GPUS, {"sequential, cublas": (100.0, 90.0), "fused, triton": (300.0, 95.0)})
    assert decide(rows(8192).program(), GPUS, {}, calls=calls).strategy == taken


def test_calls_with_few_driver_calls_are_estimated_without_a_graph() -> None:
    fusion = patterns.row_parallel(ranks=2, S=1, M=16, K=8192, N=8192, dtype="bf16")
    slow_host = replace(H100, launch={name: 4 * us for name, us in H100.launch.items()})
    choice = decide(fusion.program(), reference(slow_host, 2), {}, calls="out")
    times = {timing.candidate.strategy: timing for timing in choice.timings}
    few, many = times["sequential by low_latency"], times["push"]
    assert few.us == few.eager != few.graph
    assert many.us == many.graph
    assert decide(fusion.program(), reference(H100, 2), {}, calls="out").strategy == "sequential by low_latency"


def test_a_program_without_a_replay_is_ranked_by_its_eager_time() -> None:
    assert ranked_by("graph", 5.0, None, captured_by_caller=True) == 5.0


def test_measurements_of_another_machine_or_of_other_sizes_do_not_count() -> None:
    tuned(rows(8192), GPUS, {"sequential, cublas": (1.0, 1.0)})
    other = Platform("cuda", "NVIDIA H200", 8, "peer access", (("torch", "2.11"),), H200)
    assert decide(rows(8192).program(), other, {}).source == "estimated"
    assert decide(rows(4096).program(), GPUS, {}).source == "estimated"


def test_a_measurement_of_another_program_does_not_count() -> None:
    program = rows(8192).program()
    entries = {Candidate("sequential", 1, "cublas"): Entry("of an older lowering", 1.0, 1.0)}
    cache.write(cache.key_of(program, {}, GPUS), program.name, entries)
    assert decide(program, GPUS, {}).source == "estimated"


def test_a_candidate_that_failed_its_measurement_is_impossible_and_reported_as_a_fallback() -> None:
    program = rows(8192).program()
    every = candidates_of(program, GPUS).programs
    entries = {c: Entry.measured(p, 10.0, 10.0) for c, p in every.items() if c.strategy == "sequential"}
    broken = Candidate("fused", 1, "triton")
    entries[broken] = Entry(every[broken].digest, failure="it gives another result")
    cache.write(cache.key_of(program, {}, GPUS), program.name, entries)
    choice = decide(program, GPUS, {})
    assert choice.strategy == "sequential"
    assert choice.fallbacks == ("fused is not possible here: it gives another result",)


def test_a_candidate_that_could_not_be_captured_is_left_out_of_calls_in_graphs() -> None:
    program = rows(8192).program()
    every = candidates_of(program, GPUS).programs
    entries = {c: Entry.measured(p, 10.0, 10.0) for c, p in every.items() if c.strategy == "sequential"}
    fastest = Candidate("fused", 1, "triton")
    entries[fastest] = Entry.measured(every[fastest], 1.0)
    cache.write(cache.key_of(program, {}, GPUS), program.name, entries)
    assert decide(program, GPUS, {}, calls="eager").taken == fastest
    choice = decide(program, GPUS, {}, calls="graph")
    assert choice.strategy == "sequential"
    assert Impossible(fastest, "it cannot be captured in a CUDA graph") in choice.impossible


def test_an_estimate_for_calls_in_graphs_leaves_out_candidates_that_could_not_be_captured() -> None:
    program = rows(8192).program()
    estimate = decide(program, GPUS, {}, calls="graph")
    first, second, *_ = (timing.candidate for timing in estimate.timings)
    entries = {first: Entry.measured(candidates_of(program, GPUS).programs[first], 1.0)}
    cache.write(cache.key_of(program, {}, GPUS), program.name, entries)
    choice = decide(program, GPUS, {}, calls="graph")
    assert (choice.taken, choice.source) == (second, "estimated")
    assert Impossible(first, "it cannot be captured in a CUDA graph") in choice.impossible
    assert decide(program, GPUS, {}, calls="eager").taken == first


def test_an_estimate_leaves_out_candidates_that_failed_their_measurement() -> None:
    program = rows(8192).program()
    first, second, *_ = (timing.candidate for timing in decide(program, GPUS, {}, calls="eager").timings)
    entries = {first: Entry.measured(candidates_of(program, GPUS).programs[first], None, failure="another result")}
    cache.write(cache.key_of(program, {}, GPUS), program.name, entries)
    choice = decide(program, GPUS, {}, calls="eager")
    assert (choice.taken, choice.source) == (second, "estimated")
    assert Impossible(first, "another result", warn=True) in choice.impossible


def test_on_a_cpu_each_fusion_warns_once_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostir.choice.decision.platform_here", lambda machine, ranks, group: PROCESSES)
    fusion = patterns.allgather_matmul()
    with pytest.warns(hi.FallbackWarning, match="runs '.*for testing") as warned:
        choice = choose(fusion, machine="gloo")
    assert len(warned) == len(choice.fallbacks) == 1
    assert choice.fallbacks[0].startswith("ring, chain, fused and push are not possible here: ")
    assert all(Path(one.filename) == Path(__file__) for one in warned)  # the user's line, not one in hostir
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(fusion, machine="gloo")
    with pytest.warns(hi.FallbackWarning):
        choose(patterns.allgather_matmul(M=512), machine="gloo")


def test_a_single_possible_candidate_is_a_fallback() -> None:
    choice = decide(gathered_weight().program(), reference(H200, 4), {})
    assert choice.source == "fallback"
    assert any("no matmul has" in reason for reason in choice.fallbacks)


def test_a_choice_survives_json() -> None:
    for choice in (decide(rows(4096).program(), GPUS, {}), decide(patterns.row_parallel().program(), PROCESSES, {})):
        assert Choice.from_json(json.loads(json.dumps(choice.to_json()))) == choice


def test_an_unbound_size_is_an_error_that_names_it() -> None:
    with pytest.raises(HostIRError, match="depends on the size 'K' of @symbolic, which is not bound"):
        choose(symbolic(), sizes={"M": 8})
    with pytest.raises(HostIRError, match="has no size 'N'"):
        choose(symbolic(), sizes={"M": 8, "K": 8, "N": 8})
    assert choose(symbolic(), sizes={"M": 1 << 16, "K": 1 << 12}).strategy in ("sequential", "ring", "fused", "push")


@pytest.mark.parametrize("size", [-4, 2.5, True, "8"])
def test_an_invalid_size_is_refused(size: object) -> None:
    with pytest.raises(HostIRError, match="expected: an integer from 0"):
        choose(symbolic(), sizes={"M": size, "K": 8})


def test_a_strategy_that_the_sizes_do_not_fit_is_left_out_with_a_warning() -> None:
    candidates = candidates_of(symbolic().program(), reference(H200, 2))
    broken = Candidates({c: p if c.strategy == "sequential" else unfit(p) for c, p in candidates.programs.items()}, ())
    timings, impossible = estimated(broken, reference(H200, 2), {"M": 2, "K": 8}, "out")
    assert {timing.candidate.strategy for timing in timings} == {"sequential"}
    assert impossible
    assert all("M must be a multiple of 4" in it.reason and it.warn for it in impossible)


def unfit(program: Program) -> Program:
    """Return the program with one more buffer: its size M/4 is an integer only if 4 divides M."""
    odd = hi.parse(
        "hostir 1\nmesh @mesh [didx] = 0 1\nprogram @p(%x: f32[M, 4]) -> (%x) {\n  %y: f32[M/4, 4] = allocate\n"
        "  free %y\n}\n"
    )
    return program.with_body((*odd.body, *program.body))


def test_a_host_program_and_a_string_are_refused() -> None:
    with pytest.raises(HostIRError, match="host program already"):
        choose(hi.lower(patterns.mlp()))
    with pytest.raises(HostIRError, match="not a fusion"):
        choose("a text")


@pytest.mark.parametrize(
    ("option", "message"), [({"machine": "tpu"}, "unknown machine"), ({"calls": "fast"}, "unknown kind of calls")]
)
def test_bad_options_are_refused(option: dict[str, str], message: str) -> None:
    with pytest.raises(HostIRError, match=message):
        choose(patterns.mlp(), **option)


# Compiling --------------------------------------------------------------------------------------------------------
def runs(executor: hi.Executor, fusion: hi.Fusion) -> None:
    shapes = [[n.value for n in v.tensor.shape] for v in fusion.program().inputs]
    a, b = (torch.randn([n or 16 for n in shape]) for shape in shapes)
    (c,) = hi.run(executor.program, a, b)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


def test_compile_returns_an_executor_with_its_choice() -> None:
    fusion = patterns.allgather_matmul()
    executor = hi.compile(fusion)
    assert isinstance(executor.choice, Choice)
    assert executor.choice.source == "estimated"
    assert "h200" in executor.choice.machine
    assert executor.program == hi.lower(fusion, executor.choice.strategy, executor.choice.streams)
    assert executor.kernels == executor.choice.kernels == "aten"
    runs(executor, fusion)


def test_a_requested_strategy_is_used() -> None:
    executor = hi.compile(patterns.allgather_matmul(), "ring", streams=2)
    assert isinstance(executor.choice, Choice)
    assert (executor.choice.source, executor.choice.strategy) == ("asked for", "ring")
    assert executor.program == hi.lower(patterns.allgather_matmul(), "ring", 2)


def test_a_communication_that_a_requested_strategy_does_not_overlap_is_a_warning() -> None:
    with pytest.warns(hi.FallbackWarning) as warned:
        executor = hi.compile(turned(), "fused")
    hi.compile(turned(), "fused")  # a second warning would be an error
    (warning,) = warned
    first, hint = str(warning.message).splitlines()
    place = r"the alltoall at .*fusions.py:\d+:\d+"
    why = "fused handles only allgathers and reduce_scatters of rows, and allreduces"
    assert re.fullmatch(rf"warning: In @turned {place} is not overlapped: {why}\.", first)
    assert hint.startswith("  hint: 'pipeline' slices any communication")
    assert Path(warning.filename) == Path(__file__)
    assert executor.choice.notes


def without_a_stream_axis() -> hi.Fusion:
    with hi.Fusion("rows") as fusion:
        a, b = hi.tensor("a", [8, 4], "f32"), hi.tensor("b", [4, 4], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(2))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


def test_a_pipeline_without_a_stream_axis_is_sequential_and_gives_the_reason() -> None:
    fusion = without_a_stream_axis()
    why = "not overlapped: no tensor has a Stream axis to slice it along, so 'pipeline' does the same as 'sequential'"
    with pytest.warns(hi.FallbackWarning, match=f"In @rows the allgather at .* is {why}"):
        executor = hi.compile(fusion, "pipeline")
    assert executor.program == hi.lower(fusion, "sequential")
    assert why in str(hi.lower(fusion, "pipeline"))
    assert str(executor.choice) == "@rows runs 'sequential, auto' (asked for) on local"
    assert why in executor.choice.notes[0]
    assert executor.choice.notes[1:] == ("'pipeline' lowers to the sequential program",)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "sequential"])
def test_without_a_communication_every_strategy_is_reported_as_sequential(strategy: str) -> None:
    executor = hi.compile(patterns.no_communication(), strategy)
    assert executor.choice.strategy == "sequential"
    assert executor.choice.notes == (f"'{strategy}' lowers to the sequential program: no communication to overlap",)


def test_a_choice_has_the_streams_of_its_program() -> None:
    executor = hi.compile(patterns.allgather_matmul(ranks=4), "ring", streams=8)
    assert executor.choice.streams == executor.program.streams == 3
    assert str(executor.choice.taken) == "ring, 3 streams, auto"


def test_only_rank_0_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hi.compile(turned(), "fused", machine="local")


def test_streams_with_auto_are_refused() -> None:
    for call in (hi.compile, hi.lower):
        with pytest.raises(HostIRError, match="'auto' chooses it too"):
            call(patterns.mlp(), "auto", streams=2)


def test_an_executor_runs_other_sizes_than_those_it_was_chosen_for() -> None:
    executor = hi.compile(symbolic(), sizes={"M": 4096, "K": 4096})
    a, b = torch.randn(6, 4), torch.randn(4, 8)
    (parts,) = executor([a[:3], a[3:]], [b, b])
    for part in parts:
        torch.testing.assert_close(part, a @ b)


def test_lower_and_run_accept_auto() -> None:
    fusion = patterns.allgather_matmul()
    choice = choose(fusion)
    assert hi.lower(fusion, "auto") == hi.lower(fusion, choice.strategy, choice.streams)
    a, b = torch.randn(4, 4, 16, 64), torch.randn(64, 48)
    (c,) = hi.run(fusion, a, b, strategy="auto")
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
    a, b = torch.randn(6, 4), torch.randn(4, 8)
    (c,) = hi.run(symbolic(), a, b, strategy="auto")
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


def test_lower_without_auto_is_the_plain_lowering() -> None:
    from hostir.lower import lower

    assert hi.lower(patterns.mlp()) == lower(patterns.mlp())
    assert hi.lower(patterns.mlp(), streams=2) == lower(patterns.mlp(), streams=2)


def test_a_candidate_prints_its_strategy_streams_and_kernels() -> None:
    assert str(Timing(Candidate("pipeline", 2, "triton"), 5.0).candidate) == "pipeline, 2 streams, triton"
    assert str(Candidate("fused", 1, "cublas")) == "fused, cublas"


def test_an_unknown_option_of_compile_is_refused_at_the_users_line() -> None:
    with pytest.raises(
        HostIRError, match=r"test_choose.py:\d+:\d+: error: hi.compile has no option 'graph'\n[^$]*'graphs'"
    ):
        hi.compile(patterns.allgather_matmul(), "pipeline", graph=False)


PUSHED, PLAIN, BY_COPIES = (
    Candidate("push", 1, "triton"),
    Candidate("sequential", 1, "cublas"),
    Candidate("ring", 1, "triton"),
)


@pytest.mark.parametrize(
    ("source", "replays", "captured"),
    [
        ("measured", {PUSHED: 38.0, PLAIN: 30.0}, PLAIN),
        ("measured", {PUSHED: 38.0, BY_COPIES: 20.0, PLAIN: 30.0}, PLAIN),  # `ring` has symmetric memory
        ("measured", {PUSHED: 30.3, PLAIN: 30.0}, PUSHED),  # too little to gain
        ("measured", {PUSHED: 30.0, PLAIN: 38.0}, PUSHED),
        ("measured", {PUSHED: None, PLAIN: 30.0}, PUSHED),
        ("measured", {PUSHED: 38.0, PLAIN: None}, PUSHED),
        ("measured", {PLAIN: 30.0}, PUSHED),
        ("estimated", {PUSHED: 38.0, PLAIN: 30.0}, PUSHED),
        ("being measured (2 of 3)", {PUSHED: 38.0, PLAIN: 30.0}, PUSHED),
    ],
)
def test_captures_run_what_replays_faster_without_symmetric_memory(
    source: str, replays: dict[Candidate, float | None], captured: Candidate
) -> None:
    timings = [Timing(it, 50.0, graph=us, symmetric=0 if it == PLAIN else 4096) for it, us in replays.items()]
    assert Choice("layer", PUSHED, source, "two GPUs", tuple(timings)).captured == captured


@pytest.mark.parametrize(("source", "plain"), [("measured", True), ("measured", False), ("estimated", True)])
def test_calls_are_replayed_unless_plain_calls_were_faster(source: str, plain: bool) -> None:
    timings = Timing(PLAIN, 30.0, plain=not plain), Timing(PUSHED, 34.0, plain=plain)
    reason = "a trial has shown that plain calls are faster" if plain and source == "measured" else ""
    assert Choice("layer", PUSHED, source, "two GPUs", timings).plain == reason
