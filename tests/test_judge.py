"""Programs on real CPU processes with one slow rank: what the checker accepts is right there, what it must not is not.

`benchmarks/judge.py` runs thousands of random ones; these are a few dozen, the same every time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hostir as hi
from tests.promises import PROMISES, of
from tests.random_programs import accepted, counts, loosened
from tests.real_ranks import Case, Verdict, judged

COUNTEREXAMPLES = sorted((Path(__file__).parent / "cases" / "counterexamples").glob("*.hir"))
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # a fork would leave the others behind


def told(verdicts: list[Verdict]) -> dict[str, str]:
    """What is wrong, by program."""
    return {v.case.program.name: str(v) for v in verdicts if v.wrong}


@pytest.mark.parametrize(("ranks", "seeds"), [(2, 24), (3, 12), (4, 6)])
def test_random_programs_that_the_checker_accepts_are_right(ranks: int, seeds: int) -> None:
    programs = [program for seed in range(seeds) if (program := loosened(seed, ranks))]
    assert len(programs) >= seeds / 2
    assert all(counts(program) for program in programs)
    assert not told(judged([Case(program, seed, 4) for seed, program in enumerate(programs)]))


def test_counterexamples_that_are_right_are_accepted_and_right() -> None:
    programs = [hi.parse(path.read_text(), path.name) for path in COUNTEREXAMPLES if path.name.startswith("innocent")]
    assert all(accepted(program) for program in programs)
    assert not told(judged([Case(program, 1, 10) for program in programs]))


def test_the_checker_refuses_what_each_promise_would_let_pass() -> None:
    for name, promise in PROMISES.items():
        assert not accepted(of(name)), name
        assert promise.accepts(of(name)), name


def test_real_ranks_show_each_promise_to_be_false() -> None:
    with PROMISES["a_queue_for_each_order"].believed():  # by the simulated ranks, too, which refuse that program
        wrong = told(judged([Case(of(name), 1, 24) for name in PROMISES]))
    assert wrong.keys() == PROMISES.keys()
