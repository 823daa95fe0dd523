"""The work of lowering and proving grows at most linearly in the number of ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

import hostir as hi
from examples import patterns
from hostir.check import forget
from hostir.check.one_rank.alike import alike
from hostir.check.proof import analyse
from hostir.ir.program import with_hosts
from tests.counting import calls_of

FEW, MANY = 24, 192


def lowering(pattern: str, strategy: str, ranks: int) -> int:
    """Return the number of function calls that lower a pattern, without cached proofs."""
    sizes = {"ranks": ranks, "M": 4 * ranks}
    if pattern in ("mlp", "row_parallel_scattered"):
        sizes |= {"K": 2 * ranks, "H" if pattern == "mlp" else "N": 2 * ranks}
    fusion = getattr(patterns, pattern)(**sizes)
    forget()
    return calls_of(lambda: hi.lower(fusion, strategy))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "strategy"),
    [
        ("allgather_matmul", "fused"),
        ("mlp", "ring"),
        ("row_parallel_scattered", "ring"),
        ("row_parallel_scattered", "fused"),
        ("row_parallel_scattered", "push"),
        ("gather", "pipeline"),
        ("scatter", "pipeline"),
        ("sendrecv", "pipeline"),
    ],
)
def test_eight_times_the_ranks_need_at_most_eight_times_the_work(pattern: str, strategy: str) -> None:
    lowering(pattern, strategy, ranks=2)  # loads lazily imported modules
    few, many = (lowering(pattern, strategy, ranks) for ranks in (FEW, MANY))
    assert many < MANY // FEW * few


@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
@pytest.mark.parametrize("ranks", [64, 100])
def test_one_rank_stands_for_all_ranks_of_a_reduce_scatter(strategy: str, ranks: int) -> None:
    for slices in (1, 2):  # one block or several for each rank
        fusion = patterns.row_parallel_scattered(ranks, S=slices, M=1024 * ranks, K=ranks, N=2048)
        assert alike(hi.lower(fusion, strategy), {}, 2) is not None


@pytest.mark.parametrize("pattern", [patterns.allgather_matmul_rows, patterns.row_parallel, patterns.mlp])
def test_one_rank_stands_for_all_ranks_of_several_hosts(pattern: Callable[..., hi.Fusion]) -> None:
    fusion = with_hosts(pattern(64, S=1, M=64 * 16, K=64).program(), 8)
    assert alike(hi.lower(fusion, "hierarchical", 2), {}, 2) is not None


def test_a_proof_is_not_interrupted_to_collect_garbage() -> None:
    program = hi.lower(patterns.row_parallel(ranks=32, K=64), "pipeline")
    phases: list[str] = []

    def tell(phase: str, _: object) -> None:
        phases.append(phase)

    gc.collect()
    gc.callbacks.append(tell)
    try:
        assert not analyse(program).findings
    finally:
        gc.callbacks.remove(tell)
    assert phases.count("start") <= 1  # after the proof
    assert gc.isenabled()
