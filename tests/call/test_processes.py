"""What ranks may do beside their calls: fork, be busy or stopped, handle signals, fail and try again.

The ranks run tests/call/process_cases.py.
"""

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
    "threads_make_their_first_executors_at_once",  # which must come first
    "pools_come_and_go",
    "a_child_ends_by_sigterm",
    "children_end_by_sigterm_before_they_have_begun",
    "a_child_ends_as_a_program_does",
    "executors_are_refused_in_a_child",
    "a_failure_on_all_ranks_is_caught_and_tried_again",
    "groups_after_the_first_executor",
    "a_handler_of_the_users_has_its_time",
]
LATE = [  # two jobs, side by side
    [
        "a_child_ends_as_a_program_does",  # on rank 0 one that was forked from the process with the store
        "a_rank_holds_the_gil",
        "a_rank_is_stopped",
    ],
    [
        "a_rank_is_stopped_for_longer_than_the_timeout_where_nobody_waits",
        "a_rank_is_busy_when_rank_0_has_gone",
    ],
]
STAYS_AWAY = "a_failure_on_one_rank_is_caught_and_it_stays_away"
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]


def test_ranks_fork_fail_alike_and_handle_signals() -> None:
    job = launch(2, str(SCRIPT), *HEALTHY, env=environment(HOSTIR_TIMEOUT="8"), timeout=150)
    assert job.returncode == 0, job.stderr
    assert passed(job.stdout) == {(name, rank) for name in HEALTHY for rank in range(2)}


def test_a_rank_that_has_left_a_call_sends_nothing_that_others_in_it_take() -> None:
    name = "an_interrupt_before_a_call_has_begun_ends_it_on_all_ranks"
    job = launch(2, str(SCRIPT), name, env=environment(HOSTIR_TIMEOUT="8"), timeout=60)
    assert passed(job.stdout) == {(name, rank) for rank in range(2)}, job.stderr


@pytest.fixture(scope="module")
def stays_away() -> Iterator[Job]:
    """A job of ranks that mostly wait, beside another such."""
    job = begin(str(SCRIPT), STAYS_AWAY, ranks=2, env=environment(HOSTIR_TIMEOUT="3"))
    yield job
    job.kill()
    job.communicate()


@pytest.mark.alone
def test_busy_and_stopped_ranks_are_no_dead_ones_even_where_one_has_the_store(stays_away: Job) -> None:
    with ExitStack() as jobs:
        late = [(names, jobs.enter_context(without_a_store(str(SCRIPT), *names, timeout=4))) for names in LATE]
        for names, ranks in late:
            for number, rank in enumerate(ranks):
                printed, said = rank.communicate(timeout=120)
                assert rank.returncode == 0, said
                assert passed(printed) == {(name, number) for name in names}


@pytest.mark.alone
def test_a_timeout_of_a_second_ends_no_job_that_keeps_it() -> None:
    case = "a_rank_is_busy_for_longer_than_the_timeout_where_nobody_waits"
    job = launch(2, str(SCRIPT), case, env=environment(HOSTIR_TIMEOUT="1"), timeout=90)
    assert job.returncode == 0, job.stderr


def test_a_handler_of_the_users_may_leave_the_end_to_the_one_before() -> None:
    case = "a_handler_of_the_users_calls_the_one_before"
    job = launch(2, str(SCRIPT), case, env=environment(), timeout=90)
    assert job.returncode in (1, 143)
    assert "saved" in job.stdout
    assert re.search(r"error: rank \d is ended between runs: SIGTERM", job.stderr), job.stderr


def test_a_handler_of_the_users_stays_when_the_session_ends() -> None:
    case = "the_users_handler_is_left_when_the_session_ends"
    job = launch(2, str(SCRIPT), case, env=environment(), timeout=90)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("the user's handler") == 2


@pytest.mark.alone
def test_a_failure_after_which_a_rank_stays_away_ends_all_with_its_message(stays_away: Job) -> None:
    _, said = stays_away.communicate(timeout=90)
    assert stays_away.returncode == 1
    first = r"rank 1, 'matmul %g, %b -> %c': RuntimeError: the floating point unit is on strike"
    late = r"rank 0 waited 3 s for rank 1 at the first call after one that ended midway"
    assert re.search(rf"error: {late} \(.*{first}", said), said
    assert re.search(rf"error: {first}", said), said
