"""Programs on real CPU processes with one slow rank: accepted programs give correct results, and promises fail.

`benchmarks/judge.py` runs thousands of random programs; these are a few, the same every time. Ranks are forked, so a
process without the threads of this one runs them.
"""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hostir as hi
from examples import patterns
from tests.judging import real_ranks
from tests.judging.mutants import Mutant
from tests.judging.mutation import tiny
from tests.judging.promises import PROMISES, of
from tests.judging.random_programs import accepted, is_interesting, loosened
from tests.judging.real_ranks import Case, judged
from tests.judging.simulated import errors
from tests.launch import launch
from tests.pages import environment

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
    """Return the result of a function of this module in a process without other threads; it must be a literal."""
    call = f"test_judge.{function.__name__}{args}"
    code = f"import torch\nfrom tests import test_judge\ntorch.set_num_threads(1)\nprint(repr({call}))"
    done = launch(0, "-c", code, env=environment(), timeout=170)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


def wrong(cases: list[Case], patience: float = real_ranks.PATIENCE) -> Wrong:
    """Return the failures by program."""
    return {v.case.program.name: str(v) for v in judged(cases, patience) if v.wrong}


# In a fresh process -----------------------------------------------------------------------------------------------
def random_programs(ranks: int, seeds: int) -> tuple[int, Wrong]:
    programs = [program for seed in range(seeds) if (program := loosened(seed, ranks))]
    assert all(is_interesting(program) for program in programs)
    return len(programs), wrong([Case(program, seed, 4) for seed, program in enumerate(programs)])


def innocents() -> tuple[list[str], list[str], Wrong]:
    """Return the accepted programs, the refused ones, and failures; one program hangs, and one does not parse.

    One program has integers: `moe_layer`, by `fused`.
    """
    from benchmarks.judge import of_mutants  # imported here, because it takes half a second

    texts = {path.stem: path.read_text() for path in sorted(COUNTEREXAMPLES.glob("innocent*.hir"))}
    experts = str(hi.lower(tiny(patterns.moe_layer, 2, 2), "fused"))
    texts |= {"experts": experts, "hangs": HANGS, "cut": HANGS[:-3]}
    some = [Mutant("", name, "", text) for name, text in texts.items()]
    verdicts = {mutant.name: verdict for mutant, verdict in of_mutants(some, 4, real_ranks.PATIENCE) if verdict}
    passed = [name for name, verdict in verdicts.items() if not verdict.findings]
    refused = [name for name, verdict in verdicts.items() if verdict.findings]
    return passed, refused, {name: verdict.guilt for name, verdict in verdicts.items() if verdict.guilt}


def failures_of_promises() -> Wrong:
    failures: Wrong = {}
    with PROMISES["a_queue_for_each_order"].assumed():  # without it the simulated ranks refuse the program
        for seed in range(1, 25):  # wrong calls depend on timing
            failures |= wrong([Case(of(name), seed, 8) for name in PROMISES if name not in failures])
    return failures


def one_that_hangs() -> Wrong:
    real_ranks.expected = lambda case: [[]]  # the simulated ranks would report the hang
    correct = of("one_call")
    return wrong([Case(correct, 1, 0), Case(hi.parse(HANGS), 1, 1), Case(correct, 2, 0)], patience=2.0)


# Tests ------------------------------------------------------------------------------------------------------------
SLOW = [pytest.param(ranks, seeds, marks=pytest.mark.slow) for ranks, seeds in ((3, 4), (4, 3))]


@pytest.mark.parametrize(("ranks", "seeds"), [(2, 8), *SLOW])
def test_random_programs_that_the_checker_accepts_give_correct_results(ranks: int, seeds: int) -> None:
    count, failures = fresh(random_programs, ranks, seeds)
    assert not failures
    assert count >= seeds / 2


def test_correct_counterexamples_and_experts_are_accepted_and_give_correct_results() -> None:
    accepted, refused, failures = fresh(innocents)
    assert not failures
    assert len(accepted) == 6
    assert refused == ["hangs"]


@pytest.mark.parametrize("path", sorted(COUNTEREXAMPLES.glob("[!i]*.hir")), ids=lambda path: path.stem)
def test_wrong_counterexamples_are_refused(path: Path) -> None:
    sizes = {"N": 10} if path.stem == "five_rounds" else None
    assert errors(hi.check(hi.parse(path.read_text(), path.name), sizes=sizes))


def test_each_promise_makes_the_checker_accept_a_program_that_it_refuses() -> None:
    for name, promise in PROMISES.items():
        assert not accepted(of(name)), name
        assert promise.accepts(of(name)), name


@pytest.mark.slow
def test_real_ranks_show_each_promise_to_be_false() -> None:
    assert fresh(failures_of_promises).keys() == PROMISES.keys()


def test_kept_verdicts_and_programs_are_files_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import judge
    from benchmarks.mutation import Kept

    simulated = tmp_path / "simulated.jsonl"
    Kept([simulated], seeds=4)
    with pytest.raises(SystemExit, match="judge anew"):
        judge.mutated(Namespace(verdicts=[simulated], calls=4))
    judge.keep(tmp_path, "mutant 1 of x: moved\nbehind it", HANGS)
    assert hi.parse((tmp_path / "mutant_1_of_x.hir").read_text()).name == "hangs"
    with pytest.raises(SystemExit):
        judge.main(["--mutants", "1", "--promise", "one_stream"])
    assert "--promise is for random programs alone" in capsys.readouterr().err


def test_a_program_that_hangs_is_named_and_later_programs_run() -> None:
    (failure,) = fresh(one_that_hangs).values()
    assert "hangs: " in failure
    assert "wait_signal %f[0] >= 1" in failure
