"""Executors of process groups, on real processes: other ranks may do anything, and a lost one ends no process.

The ranks run tests/job/group_cases.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hostir as hi
from hostir.job.groups import Groups
from tests.call.test_torchrun import environment, passed
from tests.launch import begin, launch

SCRIPT = Path(__file__).with_name("group_cases.py")
HEALTHY = [
    "replicas_have_other_token_counts",
    "stages_have_other_programs",
    "a_rank_never_calls",
    "groups_interleave_in_other_orders",
    "threads_own_groups_of_the_same_ranks",
    "groups_that_wait_for_each_other_in_a_circle_are_refused",
    "calls_of_ready_groups_in_a_circle_end_with_an_error",
    "a_group_is_given_as_torch_knows_it",
    "a_guest_leaves_the_process_as_it_was",
    "layers_share_workspaces",
    "workspaces_are_bounded",
    "the_first_rank_of_each_group_warns",
    "a_forked_child_is_no_rank",
    "destroyed_groups_leave_no_files_or_threads",
    "a_call_that_fails_on_one_rank_ends_nothing",
    "calls_of_a_group_go_on_after_one_that_ended_midway",
]
LOST = [
    "a_peer_dies_in_a_collective",
    "a_peer_dies_while_others_wait_for_flags",
    "a_peer_dies_before_the_first_call",
]
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]


def test_only_the_members_of_a_group_take_part() -> None:
    job = launch(4, str(SCRIPT), *HEALTHY, env=environment(), timeout=150)
    assert job.returncode == 0, job.stderr
    assert passed(job.stdout) == {(name, rank) for name in HEALTHY for rank in range(4)}


def test_a_rank_that_is_not_there_is_named_once_and_nothing_is_tried_again() -> None:
    groups = Groups(0, torch.device("cpu"), store=dist.HashStore(), timeout=timedelta(seconds=1))
    groups.prepare([(1, 2)])  # not its own
    assert groups.made == {}
    with pytest.raises(hi.HostIRError, match="rank 0 did not reach rank 1, 3 within 1 s"):
        groups.prepare([(0, 1, 3)])
    with pytest.raises(hi.HostIRError, match="rank 0 cannot connect: it did not reach rank 1, 3"):
        groups.prepare([(0, 1, 3)])


def test_a_lost_peer_is_an_exception_and_the_others_live_on() -> None:
    with ExitStack() as ended:  # side by side: they mostly wait
        jobs = {name: begin(str(SCRIPT), name, ranks=4, env=environment()) for name in LOST}
        for job in jobs.values():
            ended.callback(job.communicate)
            ended.callback(job.kill)
        for name, job in jobs.items():
            printed, said = job.communicate(timeout=100)
            assert passed(printed) == {(name, rank) for rank in range(3)}, said
            assert "ended" not in said
