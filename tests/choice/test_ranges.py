"""Programs by ranges of sizes: the program that each call runs, and the ranges that users see."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import hostir as hi
from hostir import knobs
from hostir.choice import Candidate, Choice, Ranges, Timing, cache, ranged, ranges
from hostir.choice.cache import Entry
from hostir.choice.choices import Impossible, TrialState
from hostir.choice.decision import Decider
from hostir.choice.hardware import CPU, H200
from hostir.choice.platforms import Platform, reference
from hostir.cli.explain import describe_ranges
from hostir.ir import source as notices
from hostir.ir.source import HostIRError
from tests.choice.test_choose import unfit

GPUS = Platform("cuda", "NVIDIA H200", 8, "nvlink", (("torch", "2.11"),), H200)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path) -> Iterator[None]:
    notices._warned.clear()
    with knobs.scope(cache=tmp_path):
        yield


def layer(ranks: int = 2, n: int | str = 48, k: int | str = 64, dtype: str = "f32") -> hi.Fusion:
    """Return a column-parallel matmul of M rows; each call binds M."""
    with hi.Fusion("layer") as fusion:
        a, b = hi.tensor("a", ["M", k], dtype), hi.tensor("b", [k, n], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


def ranges_of(fusion: hi.Fusion, platform: Platform | None = None, **sizes: int) -> Ranges:
    return Ranges(Decider(fusion.program(), platform or reference(H200, 8)), sizes)


LARGE = layer(8, 3584, 8192, "bf16")


def test_a_size_runs_the_program_of_the_nearest_power_of_two() -> None:
    every = ranges_of(layer(1))
    near = {m: every.representative({"M": m})["M"] for m in (0, 1, 2, 3, 5, 6, 47, 48, 3071, 3072, 6143, 6144, 10**9)}
    assert near == {
        **{0: 1, 1: 1, 2: 2, 3: 4, 5: 4, 6: 8, 47: 32, 48: 64, 3071: 2048, 3072: 4096, 6143: 4096, 6144: 8192},
        10**9: 65536,
    }
    firsts = [ranges._first(power) for power in range(17)]
    for power, first in enumerate(firsts):
        assert ranges._power(first) == power
        assert power == 0 or ranges._power(first - 1) == power - 1


def test_representative_sizes_are_multiples_that_fit_all_candidates() -> None:
    assert ranges_of(layer(8)).representatives[:3] == [{"M": 8}, {"M": 16}, {"M": 32}]
    assert [m["M"] for m in ranges_of(layer(3)).representatives[:4]] == [3, 9, 15, 33]
    assert all(m["M"] % 3 == 0 for m in ranges_of(layer(3)).representatives)


def test_neighbours_with_the_same_candidate_are_one_range_and_ranges_cover_all_sizes() -> None:
    every = ranges_of(LARGE)
    merged = every.ranges
    assert merged[0].first == 0
    assert merged[-1].last is None
    assert [it.last for it in merged[:-1]] == [it.first - 1 for it in merged[1:]]
    assert all(a.choice.taken != b.choice.taken for a, b in pairwise(merged))
    assert merged[0].choice.strategy == "sequential by low_latency"
    assert merged[-1].choice.strategy == "fused"
    for it in merged:
        for m in (it.first, it.last or 10**6):
            assert every.choice({"M": m}).taken == it.choice.taken


def test_the_choice_of_a_range_is_the_choice_for_its_power_of_two() -> None:
    fusion = layer()
    expected = Decider(fusion.program(), reference(H200, 2)).choice({"M": 4096})
    assert ranges_of(fusion, reference(H200, 2)).choice({"M": 4000}) == expected


def test_a_choice_is_made_at_the_first_call_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, int]] = []
    decided = Decider.choice
    monkeypatch.setattr(
        Decider, "choice", lambda self, sizes, *rest: asked.append(sizes) or decided(self, sizes, *rest)
    )
    executor = hi.compile(layer())
    assert asked == [{"M": 65536}]
    run(executor, 64)
    run(executor, 66)
    assert asked == [{"M": 65536}, {"M": 64}]


def run(executor: hi.Executor, m: int) -> None:
    a, b = torch.randn(m, 64), torch.randn(64, 48)
    parts = executor([a[: m // 2], a[m // 2 :]], [b, b])
    for part in parts[0]:
        torch.testing.assert_close(part, a @ b, rtol=1e-4, atol=1e-4)


def with_times(monkeypatch: pytest.MonkeyPatch, fastest: dict[int, str]) -> None:
    """Make a strategy the fastest for sizes from `M` rows on, for each item `M: strategy` of `fastest`."""
    decided = Decider.choice

    def choice(self: Decider, sizes: dict[str, int], *rest: object) -> Choice:
        estimate = decided(self, sizes)
        first = fastest[max(m for m in fastest if m <= sizes["M"])]
        timings = sorted(estimate.timings, key=lambda it: it.candidate.strategy != first)
        return Choice("layer", timings[0].candidate, "estimated", "here", tuple(timings))

    monkeypatch.setattr(Decider, "choice", choice)


def test_each_call_runs_the_program_of_its_range_which_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, {0: "sequential", 16: "push", 256: "fused"})
    executor = hi.compile(layer())
    taken = []
    for m in (512, 8, 510, 20, 10, 32, 256):
        run(executor, m)
        taken.append(executor.current.program)
    by = {s: hi.lower(layer(), s, 1) for s in ("sequential", "push", "fused")}
    assert taken == [by[s] for s in ("fused", "sequential", "fused", "push", "sequential", "push", "fused")]
    assert len(executor.executors) == 3
    assert executor.program == by["fused"]  # the latest call's program, as `current`
    assert [str(it) for it in executor.choice.ranges] == ["from 0 to 11", "from 12 to 191", "from 192 on"]


def test_a_program_of_one_rank_runs_by_ranges_without_torchrun() -> None:
    executor = hi.compile(layer(1), machine="gloo")
    assert executor.machine == "gloo"
    for m in (0, 3, 64, 3):
        a, b = torch.randn(m, 64), torch.randn(64, 48)
        out = torch.full((m, 48), torch.nan)
        assert executor(a, b, out=out)[0] is out
        torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(executor(a, b)[0], a @ b, rtol=1e-4, atol=1e-4)
    assert executor.symmetric_bytes == 0
    assert executor.graph_refusal == "machine 'gloo' has no CUDA graphs"
    assert executor.places(a, b) == (None, None)
    executor.synchronize()


def test_calls_with_the_shapes_of_the_last_call_make_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = hi.compile(layer(1), machine="gloo")
    a, b = torch.randn(8, 64), torch.randn(64, 48)
    executor(a, b)
    monkeypatch.setattr(type(executor), "_sizes", None)
    executor(a.clone(), b)
    with pytest.raises(TypeError):
        executor(a[:4], b)


def test_a_call_after_a_refused_one_of_its_size_looks_its_program_up(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = hi.compile(layer(1), machine="gloo")
    a, b = torch.randn(64, 64), torch.randn(64, 48)
    executor(a[:8], b)
    with pytest.raises(HostIRError):
        executor(a, b[:63])
    chosen: list[object] = []
    program_for = type(executor)._executor
    monkeypatch.setattr(type(executor), "_executor", lambda self, it: chosen.append(it) or program_for(self, it))
    executor(a, b)
    assert len(chosen) == 1


def test_no_program_gets_an_executor_before_a_call_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, {0: "sequential", 16: "push", 256: "fused"})
    executor = hi.compile(layer())
    assert [c.strategy for c in executor.executors] == ["fused"]
    assert isinstance(executor, hi.Executor)
    assert (executor.machine, executor.rank, executor.kernels) == ("local", 0, "aten")


def test_sizes_that_do_not_fit_the_fastest_candidate_take_the_next_best_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = ranges_of(layer(), reference(H200, 2))
    candidates = every.decider.candidates
    # `unfit` programs need a multiple of 4 for M.
    picky = {c: unfit(p) if c.strategy in ("push", "fused") else p for c, p in candidates.programs.items()}
    every.decider.__dict__["candidates"] = type(candidates)(picky, candidates.impossible)
    order = [Candidate("fused", 1, "cublas"), Candidate("ring", 1, "cublas"), Candidate("sequential", 1, "cublas")]
    fixed = Choice("layer", order[0], "estimated", "here", tuple(Timing(c, 1.0 + i) for i, c in enumerate(order)))
    monkeypatch.setattr(Decider, "choice", lambda *_: fixed)
    assert every.candidate({"M": 64}) == order[0]
    assert every.candidate({"M": 66}) == order[1]
    assert every.candidate({"M": 65}) == order[2]  # fits no candidate: the sequential program gives the reason


def test_sizes_that_fit_no_program_and_wrong_inputs_are_refused() -> None:
    executor = hi.compile(layer())
    with pytest.raises(HostIRError, match="M must be a multiple of 2"):
        executor(torch.randn(3, 64), torch.randn(64, 48))
    with pytest.raises(HostIRError, match=r"input %a has dtype torch.float64"):
        executor(torch.randn(4, 64).double(), torch.randn(64, 48))
    with pytest.raises(HostIRError, match="was given 1 input"):
        executor(torch.randn(4, 64))
    with pytest.raises(HostIRError, match="neither all whole nor all in parts"):
        executor(5, torch.randn(64, 48))
    run(executor, 4)


def test_calls_with_zero_rows_run() -> None:
    (parts,) = hi.compile(layer())([torch.zeros(0, 64)] * 2, [torch.zeros(64, 48)] * 2)
    assert [part.shape for part in parts] == [(0, 48)] * 2


def test_several_free_sizes_have_one_choice_for_each_call() -> None:
    fusion = layer(n="N", k="K")
    executor = hi.compile(fusion)
    for m, k, n in ((64, 32, 48), (8192, 16, 8), (66, 33, 47)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        (parts,) = executor([a[: m // 2], a[m // 2 :]], [b, b])
        torch.testing.assert_close(parts[1], a @ b, rtol=1e-4, atol=1e-4)
    assert executor.choice.free == ("K", "M", "N")
    assert executor.choice.ranges == ()
    assert "as is chosen for the K, M, N of each call" in str(executor.choice)
    assert hi.compile(fusion, sizes={"K": 32, "N": 8}).choice.free == ("M",)


def test_the_first_choice_is_for_tensors_that_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model visits all tiles: with two sizes of 65536 it would take minutes."""
    asked: list[dict[str, int]] = []
    decided = Decider.choice
    monkeypatch.setattr(
        Decider, "choice", lambda self, sizes, *rest: asked.append(sizes) or decided(self, sizes, *rest)
    )
    hi.compile(layer(k="K"))
    hi.compile(layer(n="N", k="K"))
    assert asked == [{"K": 256, "M": 256}, {"K": 32, "M": 32, "N": 32}]


def test_given_sizes_have_one_choice_for_all_calls() -> None:
    executor = hi.compile(layer(), sizes={"M": 4096})
    assert isinstance(executor.choice, Choice)
    run(executor, 64)


def test_a_size_that_no_input_binds_is_an_error_that_names_it() -> None:
    text = "hostir 1\nmesh @mesh [didx] = 0 1\nfusion @f(%a: f32[M@didx, 8]) -> (%c) {\n"
    text += "  %full: f32[M, 8] = allgather %a over didx\n  %c: f32[M/S, 8*S] = reshape %full\n}\n"
    with pytest.raises(HostIRError, match="depends on the size 'S' of @f, which is not bound"):
        hi.compile(hi.parse(text))


def test_a_requested_strategy_is_one_program_for_all_sizes() -> None:
    executor = hi.compile(layer(), "ring", streams=2)
    assert isinstance(executor.choice, Choice)
    run(executor, 8)
    run(executor, 4096)


def test_measurements_for_a_power_of_two_decide_its_range() -> None:
    every = ranges_of(LARGE, GPUS)
    entries = {
        c: Entry.measured(p, t := 10.0 + (c.strategy != "ring"), t)
        for c, p in every.decider.candidates.programs.items()
    }
    cache.write(cache.key_of(LARGE.program(), {"M": 1024}, GPUS), "layer", entries)
    assert (every.choice({"M": 1000}).source, every.choice({"M": 1000}).strategy) == ("measured", "ring")
    assert every.choice({"M": 512}).source == "estimated"
    message = json.loads(json.dumps(ranges._encoded(every)))["measured"]
    assert list(message) == ["M=1024"]
    assert {Candidate(*c): Entry(*e) for c, e in message["M=1024"]} == entries
    assert Ranges(every.decider, {}, {}).choice({"M": 1000}).source == "estimated"  # not measured on rank 0


def test_on_a_cpu_each_warning_is_for_all_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Platform("gloo", "CPU", 2, "one host", (), CPU, "for testing", runs_all=True)
    monkeypatch.setattr("hostir.choice.decision.platform_here", lambda machine, ranks, group: processes)
    with pytest.warns(hi.FallbackWarning) as warned:
        every = ranges.agreed_ranges(layer().program(), {}, None, "gloo", "out")
    reasons = [str(each.message).splitlines()[0] for each in warned]
    assert len(reasons) == 2
    assert any("ring, chain, fused and push are not possible here: for testing" in reason for reason in reasons)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [it.choice.strategy for it in every.ranges] == ["sequential"]
    assert str(every.ranges[0]) == "of any value"


def test_ranges_are_shown_as_a_table_and_as_data() -> None:
    every = ranges_of(LARGE)
    shown = describe_ranges(every)
    lines = shown.splitlines()
    assert lines[0] == "@layer runs on 8 x h200 as estimated elsewhere, by the M of each call:"
    assert lines[2].split()[:3] == ["M", "from", "to"]
    assert len(lines) == 3 + len(every.ranges)
    assert [int(line.split()[0]) for line in lines[3:]] == [it.first for it in every.ranges]
    data = json.loads(json.dumps(every.to_json()))
    assert [it["first"] for it in data["ranges"]] == [it.first for it in every.ranges]
    assert data["free"] == ["M"]
    assert Choice.from_json(data["ranges"][0]["choice"]) == every.ranges[0].choice
    assert str(every).count("\n") == len(every.ranges)


def test_the_sizes_with_measurements_of_a_fusion_are_listed() -> None:
    fusion, platform = layer().program(), reference(H200, 2)
    other = reference(H200, 4)
    assert cache.sizes_of(fusion, platform) == []
    for sizes in ({"M": 64, "K": 32}, {"M": 128, "K": 32}):
        cache.write(cache.key_of(fusion, sizes, platform), "p", {Candidate("ring", 1, "triton"): Entry("d1", 12.5)})
    cache.write(
        cache.key_of(fusion, {"M": 256, "K": 32}, other), "p", {Candidate("ring", 1, "triton"): Entry("d1", 12.5)}
    )
    assert sorted(sizes["M"] for sizes in cache.sizes_of(fusion, platform)) == [64, 128]
    assert [sizes["M"] for sizes in cache.sizes_of(fusion, other)] == [256]
    damaged = cache.path_of(cache.key_of(fusion, {"M": 64, "K": 32}, platform))
    damaged.write_text("[]")
    with pytest.warns(cache.CacheWarning, match="it is damaged"):
        assert [sizes["M"] for sizes in cache.sizes_of(fusion, platform)] == [128]


def test_two_threads_of_a_rank_alone_try_the_candidates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    class SlowTrial:
        def __init__(self, name: str, *others: object) -> None:
            begun.append(name)

        def run(self, inputs: object, out: object) -> None:
            time.sleep(0.2)

    with hi.Fusion("alone") as fusion:
        a, b = hi.tensor("a", ["M", 8], "f32"), hi.tensor("b", [8, 4], "f32")
        fusion.output(a @ b)
    for x in (a, b):
        x.set_device_mesh(hi.DeviceMesh([0]))
    executor = hi.compile(fusion, machine="gloo", tune=2)
    monkeypatch.setattr(ranged, "Trial", SlowTrial)
    monkeypatch.setattr(Ranges, "rivals", lambda self, sizes: (1, 2))
    threads = [threading.Thread(target=executor, args=(torch.ones(16, 8), torch.ones(8, 4))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 1


def test_nccl_and_cublas_are_tried_even_if_their_estimate_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    every = Ranges(Decider(layer(2, 3584, 4096, "bf16").program(), GPUS), {})
    every.budget = 2.0
    few, plain = {"M": 64}, Candidate("sequential", 1, "cublas")
    estimates, impossible = every.decider.estimates(every.representative(few))
    slow = [replace(timing, us=1000.0) if timing.candidate == plain else timing for timing in estimates]
    monkeypatch.setattr(Decider, "estimates", lambda self, *given: (tuple(slow), impossible))
    best = [timing.candidate for timing in sorted(slow, key=lambda timing: timing.us)[: ranges.MOST_RIVALS]]
    assert plain not in best
    assert Candidate("sequential", 1, "triton") in best
    assert [timing.candidate for timing in every.rivals(few)] == [*best, plain]


@pytest.mark.parametrize(("machine", "compared"), [("cuda", "graph"), ("gloo", "eager")])
def test_calls_in_graphs_are_tried_too_and_are_plain_calls_without_a_gpu(machine: str, compared: str) -> None:
    every = Ranges(Decider(LARGE.program(), replace(GPUS, machine=machine), calls="graph"), {})
    assert every.decider.calls == compared
    every.budget = 2.0
    assert every.rivals({"M": 4096})
    every.budget = 0.0
    assert not every.rivals({"M": 4096})


def test_a_trial_replaces_earlier_reasons_against_a_candidate() -> None:
    every, sizes = Ranges(Decider(LARGE.program(), GPUS, calls="graph"), {}), {"M": 4096}
    first, second, third, *_ = every.choice(sizes).timings
    before = [Impossible(each.candidate, "an earlier reason") for each in (first, second, third)]
    choice = replace(every.choice(sizes), impossible=tuple(before))
    progress = TrialState(first.candidate, {first.candidate: 9.0}, refused={second.candidate: "a new reason"})
    every.tried(sizes, choice, [first, second], False, progress)
    found = every.choice(sizes).impossible
    assert [each.reason for each in found if each.candidate == second.candidate] == ["a new reason"]
    assert {each.candidate for each in found} == {second.candidate, third.candidate}
