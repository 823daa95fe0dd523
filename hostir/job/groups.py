"""Manage the process groups of a session, one for each team of its ranks, and the symmetric memory of all ranks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo
from torch.distributed.constants import default_pg_timeout

from hostir.ir.source import Diagnostic, HostIRError, error
from hostir.job.offers import ExchangeTexts
from hostir.job.symmetric import Sharing, SymmetricMemory
from hostir.job.watchdog import say

PARTING = 10.0  # seconds that destroying the process groups may take
EXITING = 5  # seconds after a failed session for the GPU to end its work, and then for this process to exit
PAUSE = 0.01  # seconds between two looks at the GPU
NO_TAG = 77  # no message has this tag
ANEW = "start all ranks anew, or make another group of them"
_numbers = itertools.count()
_abandoned: list[Any] = []  # process groups of sessions that failed, which must not be destroyed


class Failed(NamedTuple):
    """A session that failed on a GPU: the rank, a function that says if the GPU still works, and what it may use."""

    rank: int
    working: Callable[[], bool]
    used: object


_failed: list[Failed] = []


@atexit.register
def _exit_in_time() -> None:
    """Make sure that this process exits after a session that failed, even if a kernel waits for a lost rank for ever.

    While a process exits, CUDA waits for the kernels that run. So if they do not end within EXITING seconds, the
    operating system ends the process by SIGALRM after as many seconds.
    """
    deadline = time.monotonic() + EXITING
    for each in _failed:
        with contextlib.suppress(RuntimeError):  # after an error of CUDA, a process can exit
            while (works := each.working()) and time.monotonic() < deadline:
                time.sleep(PAUSE)
            if works:
                hint = f"it may wait for a lost rank; this process ends within {EXITING} s"
                say(Diagnostic(f"rank {each.rank}: its GPU has not ended its work", hint=hint))
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(EXITING)


os.register_at_fork(after_in_child=lambda: atexit.unregister(_exit_in_time))


def _forget_idle() -> None:
    """Free what sessions that failed used, if the GPU has ended its work."""
    with contextlib.suppress(RuntimeError):
        _failed[:] = [each for each in _failed if each.working()]


def _alone(key: str, mine: str) -> list[str]:
    """Return a list that holds only `mine`. It replaces `Groups.exchange` for a rank that is alone."""
    return [mine]


def world() -> Any:
    """Return the process group of the job."""
    return dist.group.WORLD


class Destroyer:
    """Destroys process groups on a thread of its own, so that the caller can stop waiting.

    With NCCL, destroying a group hangs if a CUDA graph with NCCL kernels still exists. The thread starts with the
    session if the session owns torch's default group, and else with the first group. It cannot start when it is needed:
    since Python 3.12, a process that exits starts no threads.
    """

    def __init__(self) -> None:
        self.jobs = SimpleQueue[tuple[list[Any], bool]]()
        self.thread = threading.Thread(target=self._run, name="hostir destroys groups", daemon=True)
        self.starting = threading.Lock()

    def start(self) -> None:
        with self.starting:
            if self.thread.ident is None:
                self.thread.start()

    def _run(self) -> None:
        groups, default = self.jobs.get()
        ends = [*(group.shutdown for group in reversed(groups)), *([dist.destroy_process_group] if default else [])]
        groups.clear()
        problems = list[Exception]()
        while ends:
            try:
                ends.pop(0)()
            except Exception as problem:  # the other groups are destroyed nevertheless
                problems.append(problem)
        if problems:
            raise problems[0]

    def destroy(self, groups: list[Any], default: bool) -> None:
        """Destroy process groups in the same order on all ranks. If `default`, destroy torch's default group, too.

        If this takes longer than PARTING, print a warning and return. Then the thread ends with the process.
        """
        self.jobs.put((groups, default))
        if self.thread.ident is None:  # there is no group
            return
        self.thread.join(PARTING)
        if self.thread.is_alive():
            print(
                "warning: The process groups could not be destroyed, probably because a CUDA graph is still alive.\n"
                "  hint: delete the graphs before the session ends",
                file=sys.stderr,
                flush=True,
            )


@dataclass
class Groups:
    """The process groups of a session, one for each team of its ranks, and the state that belongs to them.

    The groups are not in torch's registry. So only the ranks of a team create its group, and no rank outside the
    session takes part.

    Fields:
        rank: the number of this rank in the session.
        device: the device of this rank.
        exchange: posts a text under a key, and returns the texts of all ranks.
        store: the store in which the ranks of a team find each other; None for a rank alone.
        timeout: how long ranks wait for each other, and how long a communication may take.
        all_ranks: returns the registered group of all ranks, which torch's symmetric memory needs.
        made: the group of each team.
        memory: the symmetric memory; None until a machine asks for it.
        streams: the worker streams of each program with symmetric memory, by the digest of the program. Executors that
            share memory share the streams.
        timeouts: for each program with symmetric memory, by its digest, the timeouts that its kernels report.
        native: the collectives that native code issues; None if native code issues no collectives. The watchdog calls
            its method `late`.
        broken: the reason why this rank runs no more calls; empty if it may run calls. Either this rank could not
            connect to another rank, or a call was interrupted on this rank with gloo. In the second case, data that
            peers still send for this call would be received in the next call.
        abandoned: the failure of a call that ended midway on some rank; empty if there is no such call. It is set when
            this rank's caller has received an error about the call. Before their next calls, the ranks renew their
            shared state.
        destroyer: destroys the groups at the end of the session.
    """

    rank: int
    device: torch.device
    exchange: ExchangeTexts = _alone
    store: Any = None
    timeout: timedelta = default_pg_timeout
    all_ranks: Callable[[], Any] = world
    made: dict[tuple[int, ...], Any] = field(default_factory=dict)
    memory: SymmetricMemory | None = None
    streams: dict[str, Any] = field(default_factory=dict)
    timeouts: dict[str, Any] = field(default_factory=dict)
    native: Any = None
    broken: str = ""
    abandoned: str = ""
    destroyer: Destroyer = field(default_factory=Destroyer)
    lock: Any = field(default_factory=threading.RLock)
    _messages: Groups | None = None

    def __post_init__(self) -> None:
        _forget_idle()

    def symmetric(self, sharing: Callable[[], Sharing]) -> SymmetricMemory:
        """Return the symmetric memory of the ranks of the session; create it on first use.

        `sharing` returns the mechanism by which the ranks access each other's memory.
        """
        with self.lock:
            if self.memory is None:
                self.memory = SymmetricMemory(self.rank, self.exchange, sharing())
            return self.memory

    @property
    def messages(self) -> Groups:
        """Separate process groups for messages, because messages and collectives must not wait for each other."""
        with self.lock:
            if self._messages is None:
                store = None if self.store is None else PrefixStore("messages", self.store)
                self._messages = Groups(
                    *(self.rank, self.device),
                    store=store,
                    timeout=self.timeout,
                    all_ranks=self.all_ranks,
                    destroyer=self.destroyer,
                )
            return self._messages

    def late(self) -> str:
        """Return a text about collectives of native code that have not ended in time; empty if all end in time.

        Only the watchdog's thread calls this. It reads only memory, and calls nothing of CUDA.
        """
        return self.native.late() if self.native is not None else ""

    def renew(self, seconds: float) -> None:
        """Reset the state that the ranks share, after a call that ended midway. All ranks call this.

        Communications and kernels that wait for peers are ended. Symmetric memory is reset to its initial contents. The
        process groups are dropped and created again when needed, because their ranks have begun different
        communications.

        Args:
            seconds: the time that the other ranks wait for this rank.
        """
        each = (self,) if self._messages is None else (self, self._messages)

        def abort() -> None:
            for group in (group for its in each for group in its.made.values()):
                _abort(group, self.device)
                if self.device.type == "cuda":  # gloo's groups end with the plans
                    _abandoned.append(group)

        assert self.memory is not None
        self.memory.renew(abort, seconds)
        for its in each:
            its.made.clear()
            its.store = None if its.store is None else PrefixStore("renewed", its.store)
        for timeouts in self.timeouts.values():
            timeouts.problem()  # drops reports of kernels that gave up: the callers know that these calls are lost
        self.abandoned = ""

    def end(self, done: bool, default: bool = False) -> None:
        """End the session: release the symmetric memory, and destroy all process groups.

        Args:
            done: True if the session ended without a failure. After a failure, the groups are not destroyed, because
                their destruction may wait for lost ranks. Then the groups end with the process.
            default: True to destroy torch's default group, too.
        """
        each = (self,) if self._messages is None else (self, self._messages)
        groups = [group for its in each for group in its.made.values()]
        for its in each:  # executors may outlive the session, and refer to both
            its.made.clear()
            its.store = None
        self.streams.clear()
        if self.memory is not None:
            if not done and self.device.type == "cuda":
                # To free the memory now, CUDA would wait for kernels, which may wait for a lost rank.
                used = [*self.memory.met.values()], [*self.timeouts.values()]
                _failed.append(Failed(self.rank, self.memory.working(), used))
            self.memory.end(done)
        self.memory = None
        self.timeouts.clear()
        self._messages = None
        if self.native is not None:
            self.native.failed = not done
        if not done:
            _abandoned.extend(groups)
            for group in groups if self.device.type == "cpu" else ():  # gloo's destructor waits for its collectives
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.destroyer.destroy(groups if done else [], done and default)

    def prepare(self, teams: Sequence[tuple[int, ...]]) -> None:
        """Create the process group of each team in `teams` that contains this rank and has no group yet.

        On CUDA the ranks of a group also connect to each other now, because they cannot connect during a graph capture.
        """
        new = [team for team in teams if team not in self.made and self.rank in team]
        for team in new:
            self.made[team] = self._join(team)
        if self.device.type != "cuda":
            return
        for team in new:
            try:
                self.made[team].allreduce([torch.zeros(1, device=self.device)]).wait()
                torch.cuda.synchronize(self.device)
            except RuntimeError as problem:
                raise self._unreached(team, problem) from problem

    def _join(self, team: tuple[int, ...]) -> Any:
        """Return a new process group of a team. The ranks of the team wait for each other.

        Raise a HostIRError if a rank does not come. After that every attempt raises, because the store still holds
        keys of the failed attempt.
        """
        if self.broken:
            raise error(f"rank {self.rank} cannot connect: {self.broken}", hint=ANEW)
        self.destroyer.start()
        store, rank = PrefixStore("-".join(map(str, team)), self.store), team.index(self.rank)
        group = ProcessGroup(store, rank, len(team))
        kind = ProcessGroup.BackendType.GLOO if self.device.type == "cpu" else ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        try:
            backend = self._backend(store, team)
        except RuntimeError as problem:
            raise self._unreached(team, problem) from problem
        group._register_backend(torch.device(self.device.type), kind, backend)
        return group

    def _unreached(self, team: tuple[int, ...], problem: RuntimeError) -> HostIRError:
        """Record that the ranks of a team could not connect, so that later attempts fail; return the error."""
        self.made.pop(team, None)
        others = ", ".join(str(other) for other in team if other != self.rank)
        within = f"within {self.timeout.total_seconds():g} s"
        self.broken = f"it did not reach rank {others} {within}"
        return error(f"rank {self.rank} did not reach rank {others} {within}: {problem}", hint=ANEW)

    def _backend(self, store: Any, team: tuple[int, ...]) -> Any:
        """Return the backend of a team's group: gloo on CPUs, NCCL on CUDA.

        NCCL's stream has high priority, so that its kernels get SMs before other kernels.
        """
        rank, size = team.index(self.rank), len(team)
        if self.device.type == "cpu":
            return ProcessGroupGloo(store, rank, size, timeout=self.timeout)
        everyone = dist.get_process_group_ranks(self.all_ranks())
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self.timeout
        options.global_ranks_in_group = [everyone[member] for member in team]  # torch's messages show them
        options.group_name = f"hostir {'-'.join(map(str, options.global_ranks_in_group))} {next(_numbers)}"
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def of(self, team: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        """Return the process group of a team, and the team's ranks in the order in which the group numbers them."""
        members = tuple(sorted(team))
        return self.made[members], members


def _abort(group: Any, device: torch.device) -> None:
    """End the communications of a process group that are under way. The group cannot be used any more."""
    if device.type == "cuda":
        group.abort()
    elif group.size() > 1:
        with contextlib.suppress(RuntimeError):  # if a receive times out, gloo closes all connections of the group
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), NO_TAG).wait(timedelta(milliseconds=1))
