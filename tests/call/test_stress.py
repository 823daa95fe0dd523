"""The parts of tests/gpu/stress_*.py that need no GPU, and complete runs on CPU processes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

import hostir as hi
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from tests.call.test_torchrun import ROOT, environment
from tests.gpu import stress_cases as cases
from tests.gpu import stress_units
from tests.gpu.stress_lost import CASES, Case, Ended
from tests.gpu.stress_onesided import Stress, Tally
from tests.gpu.stress_units import Delays
from tests.launch import launch
from tests.machines.cuda.simulated_gpus import Gpus, Stream, gpus, plans

__all__ = ["gpus"]  # a fixture
SCRIPT = ROOT / "tests" / "gpu" / "stress_onesided.py"


def configs(seeds: int = 6) -> Iterator[tuple[int, cases.Config]]:
    for seed in range(seeds):
        for ranks in (2, 4, 8):
            yield from ((ranks, config) for config in cases.pool(seed, ranks, 12))


@pytest.mark.slow
def test_every_drawn_program_can_be_lowered_and_is_small_enough() -> None:
    for ranks, config in configs():
        program = config.program()
        assert len(program.outputs) == max(1, len(config.products)) + config.kept
        assert len(program.inputs) == 1 + len(config.products) + sum(p.bias for p in config.products)
        assert program.ranks <= ranks
        assert max(config.rows) * config.slices * len(config.mesh) <= cases.MOST_ROWS
        if len(config.mesh) < ranks:  # a rank without a shard has no input that binds a symbol
            assert not program.size_names, config


def test_draws_cover_all_options() -> None:
    drawn = [(ranks, config) for ranks, config in configs()]
    assert {(c.strategy, c.kernels) for _, c in drawn} == {
        (s, k) for s in ("ring", "fused", "push", cases.LOW_LATENCY, "chain") for k in ("aten", "triton")
    }
    assert {c.dtype for _, c in drawn} == {"bf16", "f16", "f32"}
    assert {c.slices for _, c in drawn} == {1, 2, 3}
    assert {1, 3, 129} <= {m for _, c in drawn for m in c.rows}
    assert {len(c.products) for _, c in drawn} == {0, 1, 2}
    sums = {(c.strategy, c.steps) for _, c in drawn if c.reduced and not c.scattered}
    assert sums == {
        ("ring", ""),
        (cases.LOW_LATENCY, ""),
        *((s, steps) for s in ("fused", "push") for steps in ("", "blocks", "two")),
    }
    assert all(c.reduced and not c.scattered for c in cases.pool(0, 4, 12, mode="allreduces"))
    assert {(p.linear, p.bias) for _, c in drawn for p in c.products} == {(False, False), (True, False), (True, True)}
    assert any(len(c.mesh) < ranks for ranks, c in drawn)
    assert any(sorted(c.mesh) != list(c.mesh) for _, c in drawn)
    assert any(c.kept for _, c in drawn)
    iterations = [cases.iteration(0, n, cases.pool(0, 4, 24), cases.GPU_FORMS) for n in range(300)]
    jobs = [job for it in iterations for job in it.jobs]
    assert {job.form for job in jobs} == set(cases.GPU_FORMS)
    assert {len(job.sizes) for job in jobs} == {1, 2, 3, 4}
    assert any(len(set(job.sizes)) == 2 for job in jobs)
    assert {len(it.jobs) for it in iterations} == {1, 2}
    assert {p for it in iterations for p in it.priorities} == {0, -1, None}


def test_a_draw_depends_on_its_seed_and_number_alone() -> None:
    pool = cases.pool(3, 4, 24)
    assert pool == cases.pool(3, 4, 24) != cases.pool(4, 4, 24)
    once = [cases.iteration(3, n, pool, cases.GPU_FORMS) for n in range(50)]
    assert once[::-1] == [cases.iteration(3, n, pool, cases.GPU_FORMS) for n in reversed(range(50))]
    assert len(set(once)) == 50
    seeds = [
        cases.inputs_seed(s, n, job, call) for s in range(3) for n in range(50) for job in range(2) for call in range(5)
    ]
    assert len(set(seeds)) == len(seeds)


def test_two_kernels_that_hold_sms_run_at_once_only_in_mode_fused_pairs() -> None:
    pool = cases.pool(0, 4, 24)
    for n in range(300):
        it = cases.iteration(0, n, pool, cases.GPU_FORMS)
        assert sum(pool[job.config].spins for job in it.jobs) <= 1
        pair = cases.iteration(0, n, pool, cases.GPU_FORMS, "fused_pairs")
        assert [pool[job.config].spins for job in pair.jobs] == [True, True]
        assert pair.jobs[0].config != pair.jobs[1].config


def test_the_command_that_repeats_an_iteration_has_all_its_options() -> None:
    chosen = cases.options(["fused_pairs", "--seed", "7", "--pool", "9", "--seconds", "1"])
    words = cases.to_repeat(chosen, 4, 123).split("stress_onesided.py ")[1].split()
    again = cases.options(words)
    assert (again.mode, again.seed, again.pool, again.device) == ("fused_pairs", 7, 9, "cuda")
    assert (again.first, again.iterations) == (123, 1)


@pytest.mark.parametrize(
    "words",
    [["fused_pairs", "--device", "cpu"], ["fused_pairs", "--pool", "7"], ["--pool", "0"], ["--iterations", "0"]],
)
def test_invalid_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cases.options(words)
    assert "at least" in capsys.readouterr().err


def test_products_by_torch_equal_the_reference_of_the_fusion() -> None:
    for _, config in configs(seeds=1):
        fusion = config.fusion()
        sizes = {"M": 3} if fusion.size_names else {}
        inputs = random_inputs(fusion, sizes, seed=1)
        products = cases.products_of(config, [x.double() for x in inputs])
        assert all(torch.allclose(x, y) for x, y in zip(products, reference(fusion, inputs), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torchs_result_is_within_the_allowed_error_and_a_wrong_one_is_not(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(2, 200, 128).to(dtype), torch.randn(128, 64).to(dtype)
    exact, plain = a.double() @ b.double(), a @ b
    assert cases.share_of_allowed(plain, exact, plain, 128) <= 1
    assert cases.share_of_allowed(exact.to(dtype), exact, plain, 128) <= 1

    def share(at: tuple[int, ...], value: float) -> float:
        wrong = plain.clone()
        wrong[at] = value
        return float(cases.share_of_allowed(wrong, exact, plain, 128))

    assert share((0, 7), 0.0) > 1, "a row that never arrived"
    assert share((1, 199, 63), float(plain[1, 199, 63]) + 2) > 1, "one wrong element"
    assert share((1, 199, 63), float("nan")) > 1


def test_results_that_differ_in_one_bit_are_different() -> None:
    x = torch.randn(5, 7).bfloat16()
    y = x.clone()
    assert cases.differing(x, y) == 0
    assert cases.fingerprint(x) == cases.fingerprint(y)
    y.view(torch.int16)[4, 6] ^= 1
    assert cases.differing(x, y) == float("inf")
    assert cases.fingerprint(x) != cases.fingerprint(y)
    assert cases.fingerprint(x) != cases.fingerprint(x.flip(0))
    assert cases.differing(torch.tensor([0.0]), torch.tensor([-0.0])) == float("inf")


def test_sums_with_different_bits_on_different_ranks_are_named() -> None:
    failures: list[tuple[int, str]] = []
    prints, tally = [(3, "call 0", None), (3, "call 1", None), (4, "call 0", None)], Tally()
    fake = SimpleNamespace(prints=prints, tally=tally, say_failed=lambda *words: failures.append(words))
    assert Stress.judge_bits(fake, [7.0, 9.0, 8.0, -7.0, -8.0, -8.0]) == {3}  # type: ignore[arg-type]
    assert failures == [(3, "call 1: ranks hold different bits of a sum")]
    assert tally.sums == 3


SAID = "error: rank 0 is ended at 'barrier of %a over tp', which waits for rank 1: rank 1 died"
STALLED = "error: rank 0, 'matmul %a, %b -> %c': rank 0: flag %there[1] did not reach epoch 1 (stands at 0)"


@pytest.mark.parametrize(
    ("case", "ended", "fault"),
    [
        (CASES["killed_eager"], Ended(0, 11.0, 1, SAID), ""),
        (CASES["killed_eager"], Ended(0, 31.0, 1, SAID), "did not end within 30 s"),
        (CASES["killed_eager"], Ended(0, -1.0, -9, SAID), "did not end within 30 s"),
        (CASES["killed_eager"], Ended(0, 11.0, 0, SAID), "ended as if all were well"),
        (CASES["killed_eager"], Ended(2, 11.0, 1, SAID), "does not name its statement"),
        (CASES["stalled_spinning"], Ended(0, 41.0, 1, STALLED), ""),
        (CASES["stalled_ring"], Ended(0, 41.0, 1, "error: rank 0, 'get %a': too late"), "does not name the flag"),
        (CASES["stalled_ring"], Ended(0, 41.0, 1, "error: rank 0: the device"), "does not name its statement"),
    ],
)
def test_a_rank_must_end_in_time_and_name_what_it_waits_for(case: Case, ended: Ended, fault: str) -> None:
    assert ended.fault(case) == fault


def test_every_statement_can_be_delayed_on_its_stream(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = (cases.Product(5, linear=False, bias=False, split=False),)
    drawn = cases.Config("fused", "aten", "f32", (0, 1), 2, (3, 3), 8, sides, kept=True, priorities=(0,))
    program = hi.lower(drawn.fusion(), "fused")
    a, b = random_inputs(program, {}, seed=2)
    parts = [[shard(x, v.tensor, r, {}) for x, v in zip((a, b), program.inputs, strict=True)] for r in range(2)]
    rank_plans = plans(gpus, program, parts, monkeypatch)
    delays, late = Delays(torch.device("cpu")), []
    monkeypatch.setattr(stress_units, "SELDOM", 1.0)
    monkeypatch.setattr(delays, "copy", lambda stream, size: gpus.streams[stream].add(lambda: late.append(stream)))
    delays.into(rank_plans)
    delays.random = Random(0)
    outputs = []
    for plan, inputs in zip(rank_plans, parts, strict=True):
        gpus.current = Stream()
        outputs.append(plan.run(inputs))
    gpus.run(Random(1))
    assert len(late) == sum(len(plan.steps) for plan in rank_plans)
    assert {gpus.streams[i] for i in late} == {s for plan in rank_plans for s in plan.streams}
    for c, full in outputs:
        assert torch.allclose(c, a @ b, atol=1e-5)
        assert torch.equal(full, a)


def stress(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return launch(2, str(script), "--device", "cpu", "--pool", "4", *arguments, env=environment(), timeout=100)


@pytest.mark.torchrun
@pytest.mark.timeout(120)
def test_iterations_on_cpu_processes_are_right() -> None:
    ended = stress(SCRIPT, "--iterations", "30")
    assert ended.returncode == 0, ended.stderr
    assert "30 iterations, 0 mismatches, 0 hangs, seed 0" in ended.stdout


BROKEN = f"""import os, sys
sys.path.insert(0, {str(ROOT)!r})
from hostir.kernels import aten
from tests.gpu import stress_onesided
right, calls = aten.KERNELS["matmul"], 0
def matmul(out, *operands):
    global calls
    right(out, *operands)
    calls += 1
    if os.environ["RANK"] == "1" and calls == 60:
        out[..., -1, -1] += 9
aten.KERNELS["matmul"] = matmul
sys.exit(stress_onesided.main())
"""


@pytest.mark.torchrun
@pytest.mark.timeout(120)
def test_one_wrong_element_on_one_rank_is_reported_with_a_command_that_repeats_it(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    ended = stress(script, "--iterations", "30")
    assert ended.returncode == 1
    assert "30 iterations, 1 mismatches, 0 hangs, seed 0" in ended.stdout
    failed = re.search(r"FAILED rank 1, iteration (\d+), .* of program \d: \d+\.\d\d of what is allowed", ended.stdout)
    assert failed, ended.stdout
    assert f"--seed 0 --pool 4 --first {failed[1]} --iterations 1 --device cpu" in ended.stdout
