"""A rank that leaves a call midway, for whatever reason, keeps no other rank waiting.

The ranks run tests/job/midway_cases.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.call.test_torchrun import passed
from tests.launch import environment, launch

SCRIPT = Path(__file__).with_name("midway_cases.py")
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(120)]


def run(case: str, *arguments: str) -> None:
    job = launch(2, str(SCRIPT), case, *arguments, env=environment(HOSTIR_TIMEOUT="20"), timeout=100)
    assert passed(job.stdout) == {(case, rank) for rank in range(2)}, job.stderr
    assert not job.returncode, job.stderr


@pytest.mark.parametrize("program", ["ag", "put"])
@pytest.mark.parametrize(
    "case",
    [
        "interrupted_where_it_waits_for_its_threads",
        "interrupted_in_a_step",
        "interrupted_where_ranks_meet",
        "interrupted_once_ranks_have_met",
    ],
)
def test_peers_hear_at_once_of_an_interrupted_call(case: str, program: str) -> None:
    run(case, program)


@pytest.mark.parametrize(
    ("where", "why"),
    [("exchange", "KeyboardInterrupt"), ("prepare", "RuntimeError: out of memory"), ("_renew", "KeyboardInterrupt")],
)
def test_no_rank_makes_more_calls_once_one_has_not_renewed_what_they_share(where: str, why: str) -> None:
    run("renewals_that_fail", "put", where, why)


@pytest.mark.parametrize("program", ["ag", "put"])
@pytest.mark.parametrize("why", ["HostIRError", "RuntimeError"])
def test_peers_hear_at_once_of_a_plan_that_fails(why: str, program: str) -> None:
    run("plans_that_fail", program, why)


def test_process_groups_of_before_a_renewal_leave_no_connections_or_threads() -> None:
    run("renewals_leave_nothing_behind", "ag")


def test_a_rank_that_waits_for_others_to_follow_hears_of_a_failed_call() -> None:
    run("a_rank_that_is_far_ahead_hears_of_a_call_that_ended_midway", "put")
