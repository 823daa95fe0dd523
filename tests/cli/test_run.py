"""`hostir run --compare` of host programs, whose reference is a run on simulated ranks in program order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import hostir as hi
from examples import patterns
from examples.ag_matmul import ag_matmul
from hostir.__main__ import main
from hostir.call.bounds import compare, relative_error
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.cli.run import rehearsed
from hostir.ir.program import Program
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernel_table
from hostir.machines.simulated import machine as local
from tests.call.small_programs import program, said
from tests.cli.commands_on_ranks import FAULTS, Ended, on_ranks

ROOT = Path(__file__).parent.parent.parent
ONESIDED = sorted((ROOT / "tests" / "cases" / "onesided").glob("*.hir"))
GATHERED = [patterns.allgather_matmul, patterns.allgather_matmul_rows, patterns.allgather_matmul_kept]
GATHERED += [patterns.column_parallel, patterns.gate_up, patterns.mlp, patterns.mlp_2d]
REFERENCE = "simulated ranks in program order"
every_strategy = pytest.mark.parametrize("strategy", ["fused", "ring"])


def lowered(strategy: str, ranks: int = 4, S: int = 4, dtype: str = "bf16") -> Program:
    return hi.lower(ag_matmul(ranks, S, 4 * ranks * S, 32, 16, dtype), strategy)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[Program], str]:
    """Return a function that writes a program as `hostir lower -o` does, and returns the path."""

    def written(text: Program) -> str:
        path = tmp_path / f"{text.name}.hir"
        path.write_text(str(text))
        return str(path)

    return written


# Runs on simulated ranks ------------------------------------------------------------------------------------------
@every_strategy
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("S", [1, 4])
def test_a_lowered_program_is_compared_with_simulated_ranks(
    strategy: str, ranks: int, S: int, file: Callable[[Program], str], capfd: pytest.CaptureFixture[str]
) -> None:
    text = file(lowered(strategy, ranks, S))
    for more in (["--repeat", "3"], ["--schedule-seed", "5", "--kernels", "aten"]):
        assert main(["run", text, "--ranks", str(ranks), "--compare", *more]) == 0
        shown = capfd.readouterr()
        assert "%c: error " in shown.out
        assert f" from {REFERENCE}\n" in shown.out
        assert shown.err == ""


@pytest.mark.parametrize("case", ONESIDED, ids=lambda case: case.stem)
def test_programs_with_puts_gets_sends_and_sums_are_compared(case: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(case), "--compare", "--schedule-seed", "3"]) == 0
    assert ": ok" in capfd.readouterr().out


@every_strategy
@pytest.mark.parametrize("off", [1.02, float("nan")])
def test_a_wrong_kernel_is_reported(
    strategy: str,
    off: float,
    file: Callable[[Program], str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def spoiled(policy: str, device: str) -> Mapping[str, Kernel]:
        """Return a kernel table with a matmul that multiplies the last row of its result by `off`."""
        table = kernel_table(policy, device)

        def matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
            table["matmul"](out, a, b)
            out.select(-2, -1).mul_(off)

        return {**table, "matmul": matmul}

    monkeypatch.setattr(local, "kernel_table", spoiled)
    assert main(["run", file(lowered(strategy)), "--compare", "--json"]) == 1
    shown = json.loads(capfd.readouterr().out)
    assert shown["reference"] == REFERENCE
    assert bool(shown["wrong"]) == (off != off)
    assert not any(output["good"] for output in shown["outputs"])


def test_a_fusion_and_a_program_without_ranks_are_compared_with_the_unsharded_result(
    file: Callable[[Program], str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "examples/patterns.py:allgather_matmul", "--strategy", "fused", "--compare", "--json"]) == 0
    assert main(["run", file(hi.lower(patterns.allgather_matmul())), "--compare", "--json"]) == 0
    shown = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [one["reference"] for one in shown] == ["the unsharded result"] * 2


# The reference ---------------------------------------------------------------------------------------------------
@every_strategy
@pytest.mark.parametrize("pattern", GATHERED, ids=lambda pattern: pattern.__name__)
def test_the_reference_run_of_a_lowered_fusion_is_the_fusions_exact_result(
    pattern: Callable[[], hi.Fusion], strategy: str
) -> None:
    fusion = pattern()
    inputs = random_inputs(fusion.program(), {}, seed=2)
    exact = reference(fusion.program(), inputs)
    for got, expected in zip(rehearsed(hi.lower(fusion, strategy), inputs), exact, strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_the_reference_run_sums_over_ranks_in_f64() -> None:
    grid = hi.parse((ROOT / "tests" / "cases" / "onesided" / "grid.hir").read_text())
    (x,) = inputs = random_inputs(grid, {})
    y, z = rehearsed(grid, inputs)
    torch.testing.assert_close(z, x.double(), rtol=0, atol=1e-15)
    assert torch.equal(y, z.relu())


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_reference_run_in_the_programs_dtype_rounds_once_for_each_statement(dtype: str) -> None:
    text = lowered("ring", dtype=dtype)
    a, b = inputs = random_inputs(text, {})
    (c,) = rehearsed(text, inputs, dtype=None)
    assert c.dtype == a.dtype
    exact = a.double() @ b.double()
    limit = relative_error(a @ b, exact) if dtype == "f32" else relative_error(exact.to(a.dtype), exact)
    assert relative_error(c, exact) <= 1.02 * limit


def test_the_error_bound_uses_the_dtype_of_the_output_for_unrounded_partial_sums() -> None:
    y = "%y: bf16[1, 4] partial(didx)"
    p = program(f"{y} = allocate\n  matmul %a, %b -> %y", "%a: bf16[1, 8@didx], %b: bf16[8@didx, 4]", "%y")
    exact = torch.ones(1, 4, dtype=torch.float64)
    unrounded, rounded = (compare(p, [exact], [plain], [exact])[0] for plain in (exact, exact.bfloat16()))
    assert unrounded.bound == rounded.bound > torch.finfo(torch.bfloat16).eps / 2


# Refusals ---------------------------------------------------------------------------------------------------------
DEADLOCK = """%f: flag[1] = allocate_symmetric
  wait_signal %f[0] >= 1
  signal %f[0] = 1 at 0 over didx"""
OTHERS = """%r = rank of %x over didx
  %y: f32[2, 3] = allocate
  if %r == 0 { copy %x -> %y }
  if %r == 1 { relu %x -> %y }"""


@pytest.mark.parametrize(
    ("body", "inputs", "outputs", "message"),
    [
        (DEADLOCK, "%x: f32[4@didx, 3]", "%x", "deadlock: ranks wait for each other"),
        (OTHERS, "%x: f32[2, 3]", "%y", "copies of a tensor f32[2, 3] differ: ranks 1 from rank 0"),
    ],
    ids=["deadlock", "copies"],
)
def test_a_program_without_a_unique_result_on_simulated_ranks_cannot_be_compared(
    body: str, inputs: str, outputs: str, message: str
) -> None:
    p = program(body, inputs, outputs)
    refusal = said(lambda: rehearsed(p, random_inputs(p, {})))
    assert f"@p has no result on simulated ranks to compare with: {message}" in refusal
    assert "hint: leave out --compare" in refusal


def test_a_wrong_number_of_inputs_is_refused() -> None:
    text = lowered("fused")
    assert "error: @ag_matmul was given 0 inputs" in said(lambda: rehearsed(text, []))


# Runs on real processes -------------------------------------------------------------------------------------------
# Keys are a fault, or the parameters: the pattern (if it is not `ag_matmul`), strategy, ranks, kernels (if not aten).
ON_RANKS = {
    "row_parallel_scattered: push, 4, triton": (4, "push", "triton"),
    "mlp: fused, 4, triton": (4, "fused", "triton"),
    "fused, 2, triton": (2, "fused", "triton"),
    "fused, 4": (4, "fused", "aten"),
    "ring, 2, triton": (2, "ring", "triton"),
    "ring, 4": (4, "ring", "aten"),
    "wrong kernel": (2, "fused", "aten"),
    "lost copies": (2, "ring", "aten"),
}


def of_pattern(name: str) -> str:
    pattern, colon, _ = name.partition(":")
    return pattern if colon else "ag_matmul"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Return the results of all cases of ON_RANKS; one job runs all cases of one number of ranks."""
    results: dict[str, Ended] = {}
    for size in (2, 4):
        folder, commands = tmp_path_factory.mktemp("job"), {}
        for name, (ranks, strategy, kernels) in ON_RANKS.items():
            if ranks == size:
                pattern = getattr(patterns, of_pattern(name), None)
                text = folder / f"{of_pattern(name)}-{strategy}.hir"
                small = pattern and pattern(ranks, S=2, M=16 * ranks, K=16 * ranks, dtype="bf16")
                text.write_text(str(hi.lower(small, strategy) if small else lowered(strategy, ranks)))
                options = ["--compare", "--kernels", kernels, "--repeat", "2", "--device", "cpu"]
                commands[name] = ["run", str(text), *options]
        results |= on_ranks(size, commands, folder, TRITON_INTERPRET="1")
    return results


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(180)
@pytest.mark.xdist_group("rehearsal on ranks")
@pytest.mark.parametrize("name", ON_RANKS)
def test_each_real_rank_compares_its_own_parts(name: str, ended: dict[str, Ended]) -> None:
    ran, (ranks, _, kernels) = ended[name], ON_RANKS[name]
    assert f"@{of_pattern(name)}: ran on {ranks} ranks on cpu, kernels {kernels}, 2 times" in ran.stdout, ran.stderr
    assert (ran.returncode == 0) == (name not in FAULTS), ran.stderr
    if name in FAULTS:
        assert "MISMATCH" in ran.stderr
    else:
        assert f"from {REFERENCE}" in ran.stdout
