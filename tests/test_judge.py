"""Programs on real CPU processes with one slow rank: what the checker accepts is right there, what it must not is not.

`benchmarks/judge.py` runs thousands of random ones; these are a few, the same every time. Ranks are forked, so another
process does it, without the threads of this one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hostir as hi
from tests import real_ranks
from tests.launch import launch
from tests.mutants import Mutant
from tests.pages import environment
from tests.promises import PROMISES, of
from tests.random_programs import accepted, counts, loosened
from tests.real_ranks import Case, judged

COUNTEREXAMPLES = Path(__file__).parent / "cases" / "counterexamples"
HANGS = """hostir 1
mesh @mesh [didx] = 0 1
program @hangs(%x: f32[2@didx, 8]) -> (%y) {
  %f: flag[1] = allocate_symmetric
  %y: f32[2@didx, 8] = allocate
  wait_signal %f[0] >= 1
  copy %x -> %y
}
"""
Wrong = dict[str, str]
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]


def fresh(function: Callable[..., Any], *args: int) -> Any:
    """What a function here gives in a process that has no other threads; it prints as Python reads it."""
    call = f"test_judge.{function.__name__}{args}"
    code = f"import torch\nfrom tests import test_judge\ntorch.set_num_threads(1)\nprint(repr({call}))"
    done = launch(0, "-c", code, env=environment(), timeout=170)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


def wrong(cases: list[Case], patience: float = real_ranks.PATIENCE) -> Wrong:
    """What goes wrong, by program."""
    return {v.case.program.name: str(v) for v in judged(cases, patience) if v.wrong}


# In a fresh process -----------------------------------------------------------------------------------------------
def random_programs(ranks: int, seeds: int) -> tuple[int, Wrong]:
    programs = [program for seed in range(seeds) if (program := loosened(seed, ranks))]
    assert all(counts(program) for program in programs)
    return len(programs), wrong([Case(program, seed, 4) for seed, program in enumerate(programs)])


def innocents() -> tuple[list[str], list[str], Wrong]:
    """What the checker accepts, what it refuses, and what goes wrong; with one that would hang, and one of no use."""
    from benchmarks.judge import of_mutants  # half a second that no other process here needs

    texts = {path.stem: path.read_text() for path in sorted(COUNTEREXAMPLES.glob("innocent*.hir"))}
    some = [Mutant("", name, "", text) for name, text in {**texts, "hangs": HANGS, "cut": HANGS[:-3]}.items()]
    found = [(mutant.of, verdict) for mutant, verdict in of_mutants(some, 4, real_ranks.PATIENCE) if verdict]
    let_pass = [name for name, verdict in found if not verdict.findings]
    refused = [name for name, verdict in found if verdict.findings]
    return let_pass, refused, {name: verdict.guilt for name, verdict in found if verdict.guilt}


def promised() -> Wrong:
    found: Wrong = {}
    with PROMISES["a_queue_for_each_order"].believed():  # by the simulated ranks, too, which refuse that program
        for seed in range(1, 25):  # which calls go wrong is a matter of time
            found |= wrong([Case(of(name), seed, 8) for name in PROMISES if name not in found])
    return found


def one_that_hangs() -> Wrong:
    real_ranks.expected = lambda case: [[]]  # simulated ranks would say so at once
    right = of("one_call")
    return wrong([Case(right, 1, 0), Case(hi.parse(HANGS), 1, 1), Case(right, 2, 0)], patience=2.0)


# Tests ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "seeds"), [(2, 8), (3, 4), (4, 3)])
def test_random_programs_that_the_checker_accepts_are_right(ranks: int, seeds: int) -> None:
    run, odd = fresh(random_programs, ranks, seeds)
    assert not odd
    assert run >= seeds / 2


def test_counterexamples_that_are_right_are_accepted_and_right() -> None:
    let_pass, refused, odd = fresh(innocents)
    assert not odd
    assert len(let_pass) == 5
    assert refused == ["hangs"]


@pytest.mark.parametrize("path", sorted(COUNTEREXAMPLES.glob("[!i]*.hir")), ids=lambda path: path.stem)
def test_counterexamples_that_are_wrong_are_refused(path: Path) -> None:
    found = hi.check(hi.parse(path.read_text(), path.name), sizes={"N": 10} if path.stem == "five_rounds" else None)
    assert [each for each in found if each.level == "error"]


def test_the_checker_refuses_what_each_promise_would_let_pass() -> None:
    for name, promise in PROMISES.items():
        assert not accepted(of(name)), name
        assert promise.accepts(of(name)), name


def test_real_ranks_show_each_promise_to_be_false() -> None:
    assert fresh(promised).keys() == PROMISES.keys()


def test_a_program_that_hangs_is_named_and_those_behind_it_run() -> None:
    (said,) = fresh(one_that_hangs).values()
    assert "hangs: " in said
    assert "wait_signal %f[0] >= 1" in said
