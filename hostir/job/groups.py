"""The process groups of a session, one for each team of its ranks, and the symmetric memory of all."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo
from torch.distributed.constants import default_pg_timeout

from hostir.ir.source import HostIRError, error
from hostir.job.offers import ExchangeTexts
from hostir.job.symmetric import Sharing, SymmetricMemory

PARTING = 10.0  # seconds that destroying the process groups may take
NO_TAG = 77  # of no message
ANEW = "start all ranks anew, or make another group of them"
_numbers = itertools.count()
_abandoned: list[Any] = []  # groups of sessions that failed


def _alone(key: str, mine: str) -> list[str]:
    """Exchange a text with no other rank."""
    return [mine]


def world() -> Any:
    """Return the process group of the job."""
    return dist.group.WORLD


@dataclass
class Groups:
    """A session's process groups, one for each team of its ranks, and what belongs to them.

    torch's registry does not know them. So only the ranks of a team make its group, and no rank outside the session
    takes part.

    Fields:
        rank: this one, among those of the session.
        exchange: gives a text under a key, and gets those of all ranks.
        store: where the ranks of a team find each other; None for a rank alone.
        timeout: how long they wait for each other, and how long a communication may take.
        whole: returns the registered group of all ranks, which torch's symmetric memory asks for.
        made: the groups by their teams.
        memory: the symmetric memory; None before the first machine.
        streams, timeouts: worker streams of programs with symmetric memory, and what their kernels report, by digest:
            executors that share memory share both.
        broken: why this rank runs nothing more: it could not connect, or on CPU, a call was interrupted here, and what
            peers within it still send and wait for would go to the next call, of any program. Empty if it may.
        abandoned: the failure of a call that ended midway on some rank, once this rank's caller has got an error of
            it. The ranks renew their shared state before their next calls. Empty if no such call ended.
    """

    rank: int
    device: torch.device
    exchange: ExchangeTexts = _alone
    store: Any = None
    timeout: timedelta = default_pg_timeout
    whole: Callable[[], Any] = world
    made: dict[tuple[int, ...], Any] = field(default_factory=dict)
    memory: SymmetricMemory | None = None
    streams: dict[str, Any] = field(default_factory=dict)
    timeouts: dict[str, Any] = field(default_factory=dict)
    broken: str = ""
    abandoned: str = ""
    lock: Any = field(default_factory=threading.RLock)
    _messages: Groups | None = None

    def symmetric(self, sharing: Callable[[], Sharing]) -> SymmetricMemory:
        """Return the symmetric memory of these ranks, which `sharing` lets them see."""
        with self.lock:
            if self.memory is None:
                self.memory = SymmetricMemory(self.rank, self.exchange, sharing())
            return self.memory

    @property
    def messages(self) -> Groups:
        """The groups for a rank's own messages, which are not ordered with collectives."""
        with self.lock:
            if self._messages is None:
                store = None if self.store is None else PrefixStore("messages", self.store)
                self._messages = Groups(self.rank, self.device, store=store, timeout=self.timeout, whole=self.whole)
            return self._messages

    def renew(self, seconds: float) -> None:
        """Release what waits for peers, and give what the ranks share its first state again; all of them call it.

        The process groups are made anew when they are needed: their ranks have not begun the same communications.

        Args:
            seconds: how long the other ranks wait for this one.
        """
        each = (self,) if self._messages is None else (self, self._messages)

        def abort() -> None:
            for group in (group for its in each for group in its.made.values()):
                _abort(group, self.device)
                if self.device.type == "cuda":  # gloo's end with the plans: their communications have just failed
                    _abandoned.append(group)

        assert self.memory is not None
        self.memory.renew(abort, seconds)
        for its in each:
            its.made.clear()
            its.store = None if its.store is None else PrefixStore("renewed", its.store)
        for timeouts in self.timeouts.values():
            timeouts.problem()  # of kernels that gave up since: their calls are lost, and the callers know
        self.abandoned = ""

    def end(self, done: bool, default: bool = False) -> None:
        """Drop the memory and all groups, and with `default` torch's default one: the session ends.

        Where it failed, the groups end with the process: destroying them might wait for lost ranks.
        """
        each = (self,) if self._messages is None else (self, self._messages)
        groups = [group for its in each for group in its.made.values()]
        for its in each:  # executors may outlive the session, and refer to both
            its.made.clear()
            its.store = None
        self.streams.clear()
        self.timeouts.clear()
        if self.memory is not None:
            self.memory.end()
        self.memory = None
        self._messages = None
        if not done:
            _abandoned.extend(groups)
            for group in groups if self.device.type == "cpu" else ():  # gloo's destructor waits for its collectives
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        elif groups or default:
            _destroy(groups, default)

    def prepare(self, teams: Sequence[tuple[int, ...]]) -> None:
        """Make the groups of this rank that are missing; on CUDA connect them, which a graph capture could not do."""
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
        """Return a new process group of a team; its ranks wait for each other.

        Raises HostIRError if they do not come, and from then on: what is left in the store is of the failed attempt.
        """
        if self.broken:
            raise error(f"rank {self.rank} cannot connect: {self.broken}", hint=ANEW)
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
        """Note that a team could not connect, for whoever tries again; return the error."""
        self.made.pop(team, None)
        others = ", ".join(str(other) for other in team if other != self.rank)
        within = f"within {self.timeout.total_seconds():g} s"
        self.broken = f"it did not reach rank {others} {within}"
        return error(f"rank {self.rank} did not reach rank {others} {within}: {problem}", hint=ANEW)

    def _backend(self, store: Any, team: tuple[int, ...]) -> Any:
        """Return the backend of a group. NCCL's kernels get priority when blocks of two kernels wait for an SM."""
        rank, size = team.index(self.rank), len(team)
        if self.device.type == "cpu":
            return ProcessGroupGloo(store, rank, size, timeout=self.timeout)
        everyone = dist.get_process_group_ranks(self.whole())
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self.timeout
        options.global_ranks_in_group = [everyone[member] for member in team]  # for torch's messages, as the name
        options.group_name = f"hostir {'-'.join(map(str, options.global_ranks_in_group))} {next(_numbers)}"
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def of(self, team: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        """Return a team's group, and its ranks in the order in which the group numbers them."""
        members = tuple(sorted(team))
        return self.made[members], members


def _abort(group: Any, device: torch.device) -> None:
    """End the communications of a group that are under way; none can follow."""
    if device.type == "cuda":
        group.abort()
    elif group.size() > 1:
        with contextlib.suppress(RuntimeError):  # gloo closes all connections of a group in which a receive times out
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), NO_TAG).wait(timedelta(milliseconds=1))


def _destroy(groups: list[Any], default: bool) -> None:
    """Destroy process groups, and torch's default one. With NCCL that hangs while a CUDA graph of its kernels is alive.

    The order is the same on all ranks.
    """

    def destroy() -> None:
        while groups:
            groups.pop().shutdown()
        if default:
            dist.destroy_process_group()

    over = threading.Thread(target=destroy, daemon=True)
    over.start()
    over.join(PARTING)
    if over.is_alive():
        print(
            "warning: The process groups could not be destroyed, probably because a CUDA graph is still alive.\n"
            "  hint: delete the graphs before the session ends",
            file=sys.stderr,
            flush=True,
        )
