"""Lowering, and the proof of what comes out, take no more for each rank where there are many."""

from __future__ import annotations

import pytest

import hostir as hi
from examples import patterns
from hostir.check import forget
from tests.counting import calls_of

FEW, MANY = 40, 320


def lowering(pattern: str, strategy: str, ranks: int) -> int:
    """The functions called to lower a pattern for so many ranks, with a program that nothing is known of."""
    given = {"ranks": ranks, "M": 4 * ranks}
    if pattern == "mlp":
        given |= {"K": 2 * ranks, "H": 2 * ranks}
    fusion = getattr(patterns, pattern)(**given)
    forget()
    return calls_of(lambda: hi.lower(fusion, strategy))


@pytest.mark.parametrize(
    ("pattern", "strategy"),
    [
        ("allgather_matmul", "fused"),
        ("mlp", "ring"),
        ("gather", "pipeline"),
        ("scatter", "pipeline"),
        ("sendrecv", "pipeline"),
    ],
)
def test_eight_times_the_ranks_take_at_most_eight_times_the_work(pattern: str, strategy: str) -> None:
    lowering(pattern, strategy, ranks=2)  # loads what is loaded when it is first used
    few, many = (lowering(pattern, strategy, ranks) for ranks in (FEW, MANY))
    assert many < MANY // FEW * few
