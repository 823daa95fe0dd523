"""Products of fp8 matrices with scales: every pattern, granularity of scales, strategy and axis is correct."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.ir import HostIRError
from hostir.ir.comm_ops import Communication
from hostir.ir.onesided_ops import Put
from hostir.ir.scaled_ops import ScaledMatmul
from hostir.lower import STRATEGIES
from hostir.torch.ops.all_gather_scaled_matmul import gather_fusion
from hostir.torch.ops.scaled_operands import ScaledProduct
from tests.judging.simulated import failure_of
from tests.lower.held import assert_correct, every_strategy, one_sided, without_each

Pattern = Callable[..., hi.Fusion]
SCALES = ("tensor", "rows", "blocks")
every_pattern = pytest.mark.parametrize("pattern", patterns.SCALED, ids=lambda p: p.__name__)


def variants(pattern: Pattern, ranks: int) -> Iterator[hi.Fusion]:
    """Yield the pattern with all granularities of scales, axes and dtypes; a third of them for 3 ranks or more."""
    names = pattern.__code__.co_varnames[: pattern.__code__.co_argcount]
    for number, scales in enumerate(SCALES):
        dtype = ("bf16", "f16", "f32")[(number + ranks) % 3]
        for axis in (0, 1) if "axis" in names else (0,):
            if ranks < 3 or (number + axis) % 3 == ranks % 3:
                yield pattern(**{"axis": axis} if "axis" in names else {}, ranks=ranks, dtype=dtype, scales=scales)


@pytest.mark.slow
@every_pattern
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_pattern_gives_the_unsharded_result_by_every_strategy(pattern: Pattern, ranks: int) -> None:
    for fusion in variants(pattern, ranks):
        for strategy in STRATEGIES:
            assert_correct(fusion.program(), hi.lower(fusion, strategy), range(2 if ranks < 4 else 1))


@every_strategy
@pytest.mark.parametrize("pattern", patterns.SCALED, ids=lambda p: p.__name__)
def test_products_overlap_with_every_communication(pattern: Pattern, strategy: str) -> None:
    for fusion in variants(pattern, 2):
        program = hi.lower(fusion, strategy)
        assert one_sided(program)
        collectives = [s for s in program.walk() if isinstance(s, Communication)]
        assert [str(s.x.tensor) for s in collectives] in ([], ["f32[48@didx, 1]"])  # to compute the scale of a tensor
        products = [s for s in program.walk() if isinstance(s, ScaledMatmul)]
        if strategy == "ring":
            assert len(products) == 2
        elif strategy == "fused" or pattern not in (patterns.scaled_row_parallel, patterns.scaled_batch_scattered):
            assert products[0].ready or products[0].done


@every_strategy
def test_the_checker_reports_scales_that_are_not_sent(strategy: str) -> None:
    program = hi.lower(patterns.scaled_allgather_matmul(ranks=2), strategy)
    assert failure_of(program, 4) == ""
    mutants = [(s, body) for s, body in without_each(program.body)]
    unnoticed = [s for s, body in mutants if not hi.check(program.with_body(body))]
    assert any(isinstance(s, Put) and s.x.tensor.dtype.name == "f32" for s, _ in mutants)
    assert not unnoticed, f"'{unnoticed[0].keyword()}' could be left out"


@every_strategy
@pytest.mark.parametrize("ranks", [2, 3])
def test_gathered_rows_that_are_wanted_with_their_scales_leave_no_collective(strategy: str, ranks: int) -> None:
    rows = f"3, {4 * ranks}"
    fusion = hi.parse(f"""hostir 1
mesh @mesh [didx] = {" ".join(map(str, range(ranks)))}
fusion @kept(%a: f8e4m3[{rows}@didx, 64], %b: f8e4m3[64, 32], %s: f32[{rows}@didx, 1], %t: f32[1, 32])
    -> (%c, %a_full, %s_full) {{
  %a_full: f8e4m3[{rows}, 64] = reshard %a
  %s_full: f32[{rows}, 1] = reshard %s
  %c: bf16[{rows}, 32] = scaled_matmul %a_full, %b scaled %s_full, %t to bf16
}}
""")
    program = hi.lower(fusion, strategy)
    assert one_sided(program)
    assert not [s for s in program.walk() if isinstance(s, Communication)]
    assert_correct(fusion, program, range(2))
    assert failure_of(program, 4) == ""
    unnoticed = [s for s, body in without_each(program.body) if not hi.check(program.with_body(body))]
    assert not unnoticed, f"'{unnoticed[0].keyword()}' could be left out"


def test_partial_sums_cross_ranks_in_the_dtype_of_the_result() -> None:
    for strategy in STRATEGIES:
        for dtype in ("bf16", "f32"):
            program = hi.lower(patterns.scaled_row_parallel(2, dtype=dtype), strategy)
            moved = {s.x.tensor.dtype.name for s in program.walk() if isinstance(s, (Communication, Put))}
            assert moved == {dtype}


def test_a_scale_for_each_rank_needs_k_to_be_sharded_over_them() -> None:
    text = """hostir 1
mesh @mesh [tp] = 0 1
fusion @f(%a: f8e4m3[8, 64], %b: f8e4m3[64, 8], %s: f32[8, 2], %t: f32[2, 8]) -> (%c) {
  %c: bf16[8, 8] auto = scaled_matmul %a, %b scaled %s, %t to bf16
}
"""
    with pytest.raises(HostIRError, match="%s has 2 scales along the 64 elements of K that a rank holds"):
        hi.lower(hi.parse(text))


def test_the_scale_of_a_tensor_is_computed_from_the_gathered_scales_of_its_rows() -> None:
    with hi.Fusion("quantized") as fusion:
        x = hi.tensor("x", [8, 256], "f32")
        q, scale = hi.quantize(x, scales="tensor")
        fusion.output(q, scale)
    mesh = hi.DeviceMesh(range(2))
    x.shard(0, mesh)
    q.shard(0, mesh)
    program = hi.lower(fusion, "sequential")
    rows = torch.randn(8, 256) * torch.arange(1, 9)[:, None]
    quantized, largest = hi.run(program, rows)
    torch.testing.assert_close(largest, (rows.abs().max() / 448).view(1, 1))
    torch.testing.assert_close(quantized.float() * largest, rows, rtol=2**-4, atol=float(largest) * 2**-9)
    gathered = [s.x.tensor for s in program.walk() if isinstance(s, Communication)]
    assert [str(t) for t in gathered] == ["f32[8@didx, 1]"]


def test_non_contiguous_scales_are_copied_before_a_kernel_waits_for_rows() -> None:
    product = ScaledProduct("f8e4m3", 16, "bf16", "", False, False)
    fusion = gather_fusion(2, "f8e4m3", 32, (product,), "replicated", extra=1, outside=1)
    assert "%s_dense = dense %s" in str(hi.lower(fusion, "fused"))
    assert "dense" not in str(hi.lower(fusion, "ring"))  # its products start after their rows have arrived
