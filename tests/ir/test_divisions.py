"""Sizes that must be divisible: every entry point checks them by one rule, with one message, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.__main__ import main
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.check import check, prove
from hostir.lower import STRATEGIES
from tests.call.whole import run_whole

CUT = """hostir 1
mesh @mesh [didx] = 0 1
program @cut(%x: f32[M@didx, 8]) -> (%y) {
  %y: f32[M@didx, 8] = allocate
  for %i in 0..2 {
    %x_i = chunk %x[%i of 2]
    %y_i = chunk %y[%i of 2]
    relu %x_i -> %y_i
  }
}
"""
MESSAGE = (
    "M=5 does not fit @cut: M must be a multiple of 4, because %x is sharded over 2 ranks and cut in 2 pieces (chunk)"
)


def test_the_error_names_the_multiple_its_reason_and_its_line() -> None:
    (finding,) = check(hi.parse(CUT), sizes={"M": 5})
    assert finding.message == MESSAGE
    assert finding.span is not None
    assert finding.span.line == 6
    assert finding.expected == "such as M=4 or M=8"


def test_every_entry_point_raises_the_same_message() -> None:
    program = hi.parse(CUT)
    x = torch.ones(5, 8)
    entry_points = [
        lambda: program.check_sizes({"M": 5}),
        lambda: prove(program, {"M": 5}),
        lambda: hi.Executor(program, sizes={"M": 5}),
        lambda: hi.Executor(program)(x),
        lambda: hi.Executor(program, check=False)(x),
        lambda: run_whole(program, [x]),
        lambda: reference(program, [x]),
    ]
    for enter in entry_points:
        with pytest.raises(hi.HostIRError) as refused:
            enter()
        assert [diagnostic.message for diagnostic in refused.value.diagnostics] == [MESSAGE]


def test_shards_that_cannot_be_cut_evenly_are_refused() -> None:
    with pytest.raises(hi.HostIRError, match=r"M=6 does not fit @cut: M must be a multiple of 4, because %x is"):
        hi.Executor(hi.parse(CUT))([torch.ones(3, 8), torch.ones(3, 8)])


def test_rows_must_be_a_multiple_of_the_blocks_that_a_kernel_waits_for() -> None:
    program = hi.parse("""hostir 1
mesh @mesh [didx] = 0
program @p(%a: f32[M, 4], %b: f32[4, 4]) -> (%c) {
  %f: flag[3] = allocate_symmetric
  %c: f32[M, 4] = allocate
  for %i in 0..3 { signal %f[%i] = 1 at 0 over didx }
  matmul %a, %b -> %c ready %f >= 1 from 0
}
""")
    with pytest.raises(hi.HostIRError, match="M must be a multiple of 3, because the rows of %a are 3 equal blocks"):
        hi.Executor(program)([torch.ones(4, 4)], [torch.ones(4, 4)])


def test_the_error_names_every_reason_for_the_multiple() -> None:
    program = hi.parse("""hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[M], %y: f32[M@didx]) -> (%a, %b) {
  %a: f32[M] = allocate
  %b: f32[M@didx] = allocate
  for %i in 0..3 {
    %x_i = chunk %x[%i of 3]
    %a_i = chunk %a[%i of 3]
    relu %x_i -> %a_i
  }
  relu %y -> %b
}
""")
    with pytest.raises(hi.HostIRError) as refused:
        program.check_sizes({"M": 8})
    reasons = "because %y is sharded over 2 ranks and %x is cut in 3 pieces (chunk)"
    assert f"M must be a multiple of 6, {reasons}" in str(refused.value)


def test_the_error_prints_products_and_quotients_of_symbols() -> None:
    program = hi.parse("""hostir 1
mesh @mesh [didx] = 0
program @p(%x: f32[M, K]) -> (%y) {
  %v: f32[4, M*K/4] = reshape %x
  %w: f32[N, M/N, K] = reshape %x
  %y: f32[4, M*K/4] = allocate
  relu %v -> %y
}
""")
    with pytest.raises(hi.HostIRError) as refused:
        program.check_sizes({"M": 5, "K": 3, "N": 2})
    first, second = (diagnostic.message for diagnostic in refused.value.diagnostics)
    assert first == "K=3, M=5 does not fit @p: K*M must be a multiple of 4, because %v has an axis of K*M/4"
    assert second == "M=5, N=2 does not fit @p: M must be a multiple of N = 2, because %w has an axis of M/N"


def test_an_executor_compiled_for_some_sizes_checks_other_sizes() -> None:
    executor = hi.compile(patterns.row_parallel(S=2, ranks=2, M="M"), "pipeline", sizes={"M": 8})
    executor(torch.ones(4, 64), torch.ones(64, 48))
    with pytest.raises(hi.HostIRError, match="M=7 does not fit @row_parallel: M must be a multiple of 2, because %a"):
        executor(torch.ones(7, 64), torch.ones(64, 48))


def test_the_error_for_an_nvfuser_dump_uses_the_names_of_the_dump(capfd: pytest.CaptureFixture[str]) -> None:
    file = "tests/cases/nvfuser/two_matmuls_ceil_div.txt"
    assert main(["check", file, "--from", "nvfuser", "--set", "i0=10"]) == 1
    assert "i0 must be a multiple of 3, because %T0 is cut in 3 pieces (chunk)" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [*patterns.PATTERNS, *patterns.EXPERTS], ids=lambda pattern: pattern.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_number_of_rows_is_computed_or_refused(pattern: Callable[..., hi.Fusion], strategy: str) -> None:
    parameters = inspect.signature(pattern).parameters
    mesh = [{"ranks": 1}, {"ranks": 2}, {"ranks": 4}] if "ranks" in parameters else [{"dp": 2, "tp": 2}]
    for ranks in mesh:
        small = {name: n for name, n in (("S", 2), ("K", 8), ("N", 8), ("H", 8)) if name in parameters}
        fusion = pattern(M="M", **ranks, **small)
        try:
            program = hi.lower(fusion, strategy)
        except hi.HostIRError:
            return  # the strategy overlaps nothing in this pattern
        computed = []
        for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16):
            source, sizes = fusion.program(), {"M": rows}
            try:
                source.check_sizes(sizes)
                inputs = random_inputs(source, sizes)
                outputs = run_whole(program, inputs, sizes)
            except hi.HostIRError as refused:
                (diagnostic,) = refused.diagnostics
                assert diagnostic.message.startswith(f"M={rows} does not fit @{program.name}: M must be a multiple of ")
                continue
            computed.append(rows)
            for got, expected in zip(outputs, reference(source, inputs, sizes), strict=True):
                torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
        assert 16 in computed
