"""Executors of process groups, on real processes: ranks outside a group need not call, and a dead rank ends no process.

The ranks run tests/job/group_cases.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hostir as hi
from hostir.job.groups import Destroyer, Groups
from tests.call.test_torchrun import environment, passed
from tests.launch import begin, launch

SCRIPT = Path(__file__).with_name("group_cases.py")
HEALTHY = [
    "replicas_have_different_token_counts",
    "stages_run_different_programs",
    "a_rank_outside_the_group_never_calls",
    "ranks_call_groups_in_different_orders",
    "a_group_may_be_a_process_group_its_name_or_a_mesh",
    "a_group_changes_nothing_else_in_the_process",
    "layers_share_symmetric_memory",
    "symmetric_memory_is_bounded",
    "the_first_rank_of_each_group_warns",
    "a_forked_child_cannot_call",
    "destroyed_groups_leave_no_files_or_threads",
    "calls_of_a_group_work_after_a_call_that_failed_midway",
    "threads_own_groups_of_the_same_ranks",
]
WAITING = [  # for timeouts, while the cases above run
    "a_call_that_fails_on_one_rank_ends_no_process",
    "groups_that_wait_for_each_other_in_a_cycle_are_refused",
    "calls_of_ready_groups_in_a_cycle_end_with_an_error",
]
LOST = [
    "a_peer_dies_in_a_collective",
    "a_peer_dies_while_others_wait_for_flags",
    "a_peer_dies_before_the_first_call",
]
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]


def test_groups_are_destroyed_by_a_thread_that_exists_and_one_that_fails_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Group:
        def shutdown(self) -> None:
            destroyed.append(self)
            if len(destroyed) == 1:
                raise RuntimeError("its peers are gone")

    destroyed, problems, destroyer = list[Group](), list[threading.ExceptHookArgs](), Destroyer()
    destroyer.start()
    destroyer.start()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 does

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(threading, "excepthook", problems.append)
    groups = [Group(), Group(), Group()]
    destroyer.destroy([*groups], False)
    assert destroyed == groups[::-1]
    assert [str(problem.exc_value) for problem in problems] == ["its peers are gone"]
    assert not destroyer.thread.is_alive()


FAILED = """
import atexit, time, weakref
from types import SimpleNamespace
import torch
atexit.register(time.sleep, {seconds})  # as CUDA waits for kernels; it runs after the handler of hostir
from hostir.job import groups
groups.EXITING = 1
of_rank = groups.Groups(3, torch.device("cuda"))
began = time.monotonic()
def query():
    {query}
class Memory: pass
memory = Memory()
alive = weakref.ref(memory)
of_rank.memory = SimpleNamespace(end=lambda done: None, working=lambda: query, met=dict(program=memory))
of_rank.end(done={done})
del memory
assert (alive() is None) is {done}, "after a failure, kernels may still use the memory"
print("ended")
"""
FORGOTTEN = """
import torch
from hostir.job import groups
groups._failed += [groups.Failed(rank, lambda rank=rank: rank == 1, None) for rank in range(3)]
groups.Groups(0, torch.device("cpu"))
assert [each.rank for each in groups._failed] == [1]
groups._failed.clear()
"""


def test_a_new_session_frees_what_a_failed_one_used_once_its_gpu_is_idle() -> None:
    subprocess.run([sys.executable, "-c", FORGOTTEN], timeout=50, check=True)


@pytest.mark.parametrize(
    ("done", "query", "seconds", "ends"),
    [
        (False, "return True", 60, True),
        (False, "return False", 2, False),
        (False, "return time.monotonic() < began + 0.5", 2, False),
        (False, "raise RuntimeError('CUDA error')", 2, False),
        (True, "return True", 2, False),
    ],
)
def test_a_process_exits_after_a_failed_session_although_a_kernel_never_ends(
    done: bool, query: str, seconds: int, ends: bool
) -> None:
    text = FAILED.format(done=done, query=query, seconds=seconds)
    exited = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=False)
    assert exited.returncode == (-signal.SIGALRM if ends else 0), exited.stderr
    assert exited.stdout == "ended\n"
    assert ("error: rank 3: its GPU has not ended its work" in exited.stderr) is ends
    assert ("this process ends within 1 s" in exited.stderr) is ends


@pytest.mark.slow
def test_only_the_members_of_a_group_take_part() -> None:
    with ExitStack() as ended:
        waiting = begin(str(SCRIPT), *WAITING, ranks=4, env=environment())
        ended.callback(waiting.communicate)
        ended.callback(waiting.kill)
        done = launch(4, str(SCRIPT), *HEALTHY, env=environment(), timeout=150, finalize=True)
        stdout, stderr = waiting.communicate(timeout=150)
    for names, code, printed, problem in (
        (HEALTHY, done.returncode, done.stdout, done.stderr),
        (WAITING, waiting.returncode, stdout, stderr),
    ):
        assert code == 0, problem
        assert passed(printed) == {(name, rank) for name in names for rank in range(4)}


def test_absent_ranks_are_named_and_the_next_attempt_fails_at_once() -> None:
    groups = Groups(0, torch.device("cpu"), store=dist.HashStore(), timeout=timedelta(seconds=1))
    groups.prepare([(1, 2)])  # rank 0 is not a member
    assert groups.made == {}
    with pytest.raises(hi.HostIRError, match="rank 0 did not reach rank 1, 3 within 1 s"):
        groups.prepare([(0, 1, 3)])
    with pytest.raises(hi.HostIRError, match="rank 0 cannot connect: it did not reach rank 1, 3"):
        groups.prepare([(0, 1, 3)])


@pytest.mark.slow
def test_a_dead_peer_raises_an_exception_and_the_other_ranks_stay_alive() -> None:
    with ExitStack() as ended:  # side by side: they mostly wait
        jobs = {name: begin(str(SCRIPT), name, ranks=4, env=environment()) for name in LOST}
        for job in jobs.values():
            ended.callback(job.communicate)
            ended.callback(job.kill)
        for name, job in jobs.items():
            stdout, stderr = job.communicate(timeout=100)
            assert passed(stdout) == {(name, rank) for rank in range(3)}, stderr
            assert "ended" not in stderr
