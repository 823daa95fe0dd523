"""Trials on real gloo processes. The ranks run tests/choice/trial_cases.py, and a test clock gives the times."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.launch import environment, launch

SCRIPT = Path(__file__).with_name("trial_cases.py")
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
ON_FOUR = [
    "the_fastest_of_the_tried_candidates_runs_after_the_trial",
    "the_slowest_rank_of_a_call_counts",
    "an_interrupt_of_one_rank_in_a_trial_is_an_error_on_all_ranks",
    "ranks_meet_once_for_the_candidate_that_captures_run",
    "a_trial_runs_with_inputs_in_the_places_that_the_first_candidate_gave",
]
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(240)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, ON_FOUR)], ids=["2", "4"])
def test_ranks_try_candidates_and_agree(ranks: int, cases: list[str], tmp_path: Path) -> None:
    done = launch(ranks, str(SCRIPT), *cases, env=environment(HOSTIR_CACHE=str(tmp_path)), timeout=200)
    assert done.returncode == 0, done.stderr
    passed = set(re.findall(r"PASS (\w+) (\d)", done.stdout))
    assert passed == {(name, str(rank)) for name in cases for rank in range(ranks)}


def test_a_rank_that_dies_in_a_trial_ends_the_others(tmp_path: Path) -> None:
    begun = time.monotonic()
    env = environment(HOSTIR_CACHE=str(tmp_path), HOSTIR_TIMEOUT="10")
    done = launch(2, str(SCRIPT), "--die", env=env, timeout=100)
    assert done.returncode != 0
    assert time.monotonic() - begun < 60
    assert re.search(r"error: rank 0 is ended .*rank 1 died", done.stderr), done.stderr


def test_a_cache_that_cannot_be_written_gives_one_warning(tmp_path: Path) -> None:
    (tmp_path / "tuning").write_text("")
    env = environment(HOSTIR_CACHE=str(tmp_path), PYTHONWARNINGS="default")
    done = launch(2, str(SCRIPT), "the_slowest_rank_of_a_call_counts", env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("The times of @slowest are not kept: cannot write the tuning cache") == 1
