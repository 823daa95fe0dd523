"""Ranks fork, are busy or stopped, handle signals, fail and try again. They run tests/call/process_cases.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.call.test_torchrun import environment, passed
from tests.job.test_sessions import without_a_store
from tests.launch import Job, begin, launch

SCRIPT = Path(__file__).with_name("process_cases.py")
HEALTHY = [
    "threads_make_their_first_executors_at_once",  # must be the first case
    "pools_come_and_go",
    "a_child_is_ended_by_sigterm",
    "children_are_ended_by_sigterm_at_once",
    "a_child_exits_normally",
    "executors_are_refused_in_a_child",
    "all_ranks_catch_a_failure_and_try_again",
    "process_groups_are_refused_after_the_first_executor",
    "a_user_handler_has_time_to_finish",
]
SLOW = [  # two jobs, side by side
    [
        "a_child_exits_normally",  # rank 0 is the process with the store
        "a_rank_holds_the_gil",
        "a_rank_is_stopped",
    ],
    [
        "a_rank_is_stopped_for_longer_than_the_timeout_while_nobody_waits",
        "a_rank_is_busy_after_rank_0_has_ended",
    ],
]
NO_FURTHER_CALL = "a_rank_catches_its_failure_and_makes_no_further_call"
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]


@pytest.mark.slow
def test_ranks_fork_fail_together_and_handle_signals() -> None:
    job = launch(2, str(SCRIPT), *HEALTHY, env=environment(HOSTIR_TIMEOUT="8"), timeout=150, finalize=True)
    assert job.returncode == 0, job.stderr
    assert passed(job.stdout) == {(name, rank) for name in HEALTHY for rank in range(2)}


def test_an_interrupted_call_raises_on_its_peers_and_later_calls_are_right() -> None:
    name = "an_interrupt_before_a_call_has_begun_ends_it_on_all_ranks"
    job = launch(2, str(SCRIPT), name, env=environment(HOSTIR_TIMEOUT="8"), timeout=60)
    assert passed(job.stdout) == {(name, rank) for rank in range(2)}, job.stderr


@pytest.fixture(scope="module")
def failed_job() -> Iterator[Job]:
    """A job that mostly waits, so it runs beside other jobs."""
    job = begin(str(SCRIPT), NO_FURTHER_CALL, ranks=2, env=environment(HOSTIR_TIMEOUT="3"))
    yield job
    job.kill()
    job.communicate()


@pytest.mark.alone
def test_busy_and_stopped_ranks_do_not_count_as_dead_even_the_rank_with_the_store(failed_job: Job) -> None:
    with ExitStack() as jobs:
        slow = [(names, jobs.enter_context(without_a_store(str(SCRIPT), *names, timeout=4))) for names in SLOW]
        for names, ranks in slow:
            for number, rank in enumerate(ranks):
                stdout, stderr = rank.communicate(timeout=120)
                assert rank.returncode == 0, stderr
                assert passed(stdout) == {(name, number) for name in names}


@pytest.mark.alone
def test_a_timeout_of_a_second_does_not_end_a_job_whose_ranks_are_busy_between_calls() -> None:
    case = "a_rank_is_busy_for_longer_than_the_timeout_while_nobody_waits"
    job = launch(2, str(SCRIPT), case, env=environment(HOSTIR_TIMEOUT="1"), timeout=90)
    assert job.returncode == 0, job.stderr


def test_a_user_handler_may_call_the_previous_handler_which_ends_the_rank() -> None:
    case = "a_user_handler_calls_the_previous_one"
    job = launch(2, str(SCRIPT), case, env=environment(), timeout=90)
    assert job.returncode in (1, 143)
    assert "saved" in job.stdout
    assert re.search(r"error: rank \d is ended between runs: SIGTERM", job.stderr), job.stderr


def test_a_user_handler_stays_installed_after_the_session() -> None:
    case = "a_user_handler_stays_installed_after_the_session"
    job = launch(2, str(SCRIPT), case, env=environment(), timeout=90, finalize=True)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("the user's handler") == 2


@pytest.mark.alone
def test_a_rank_that_makes_no_call_after_its_failure_ends_all_ranks_with_its_message(failed_job: Job) -> None:
    _, stderr = failed_job.communicate(timeout=90)
    assert failed_job.returncode == 1
    first = r"rank 1, 'matmul %g, %b -> %c': RuntimeError: the floating point unit is on strike"
    late = r"rank 0 waited 3 s for rank 1 at the first call after one that ended midway"
    assert re.search(rf"error: {late} \(.*{first}", stderr), stderr
    assert re.search(rf"error: {first}", stderr), stderr
