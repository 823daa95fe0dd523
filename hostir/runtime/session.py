"""Sessions: this process as one rank of a job, agreement between ranks, and the order of their calls."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from hostir.ir.program import Program
from hostir.ir.source import HostIRError, check_known, error, logger
from hostir.knobs import KEEPALIVE, TIMEOUT
from hostir.runtime.groups import ANEW, Groups, world
from hostir.runtime.threads import ThreadPairs, common_name, is_foreign, running
from hostir.runtime.unroll import teams_of
from hostir.runtime.watchdog import ALIKE, PAGE, MisalignedError, Watchdog, headline

# Calls ----------------------------------------------------------------------------------------------------------------
# The calls of executors by a team of ranks: one at a time on each rank, and the same in the same order on all.
#
# Executors share their team's process groups, which match operations of ranks by their order alone. So the rank that
# gets first to the team's n-th call posts it in the team's store, and every other compares its own call with that.
# Nobody waits: ranks may be calls apart.
#
# A thread may call after another thread's call has ended. Calls that overlap have no order, and are refused. Two
# threads that lock each other out never overlap, but may take turns in another order on another rank. So if calls are
# compared, the threads that make them are compared, too, by names that are the same on all ranks.

SLOTS = 512  # of the store: no rank is as many calls ahead of another
SHOWING = 1.0  # seconds that a thread has to make a call that its namesake on another rank has made


@dataclass(frozen=True)
class Call:
    """The data of a call that ranks compare.

    Fields:
        executor: the number of its executor's first call; None before that.
        made: where ranks meet for it: how many calls came before it.
        tries: where ranks meet for it: how often this rank has refused it before, or has heard that another does.
        refusal: why this rank does not make it; empty if it does.
        operator: the name of the operator of hostir.torch that makes it; empty for a caller of the executor itself.
        backward: whether autograd makes it, in a backward pass.
        thread: the common name of the thread that makes it; empty where calls are not compared.
    """

    program: str
    digest: str
    executor: int | None
    sizes: tuple[tuple[str, int], ...]
    kernels: str
    places: bool = False
    made: int = 0
    tries: int = 0
    refusal: str = ""
    operator: str = ""
    backward: bool = False
    thread: str = ""

    @staticmethod
    def of(text: str) -> Call:
        fields = json.loads(text)
        return Call(**{**fields, "sizes": tuple(map(tuple, fields["sizes"]))})

    def is_by(self, other: Call) -> bool:
        """Whether the other is a call of the same executor, made or refused."""
        return (self.digest, self.executor) == (other.digest, other.executor)

    @lru_cache(maxsize=1024)  # noqa: B019  # the same few, again and again
    def __str__(self) -> str:
        return json.dumps(vars(self))


def describe(by_rank: Mapping[int, Call]) -> str:
    """Describe ranks' different calls in the user's terms, equal ones together."""
    groups: dict[str, list[int]] = {}
    for rank, call in by_rank.items():
        groups.setdefault(str(call), []).append(rank)
    calls = [Call.of(text) for text in groups]

    def differ(name: str) -> bool:
        return any(getattr(call, name) != getattr(calls[0], name) for call in calls)

    parts: list[str] = []
    for call, ranks in zip(calls, groups.values(), strict=True):
        what = f"@{call.program}" if not parts or differ("program") or not call.sizes else ""
        if differ("places"):
            what = f"the places of {what}" if call.places else what
        bound = ", ".join(f"{name}={size}" for name, size in call.sizes)
        words = [what, f"with {bound}" if bound else ""]
        words += [f"(its text has digest {call.digest})"] if differ("digest") and not differ("program") else []
        words += [f"with kernels {call.kernels}"] if differ("kernels") else []
        words += [f"after {call.made} calls of its executor"] if differ("made") else []
        words += [f"for {call.operator or 'its own caller'}"] if differ("operator") else []
        words += [f"in a {'backward' if call.backward else 'forward'} pass"] if differ("backward") else []
        if differ("executor") and not differ("digest"):
            known = call.executor is not None
            words.append(f"by the executor first called in call {call.executor}" if known else "by a new executor")
        words += [f"in thread '{call.thread}'"] if differ("thread") else []
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        verb = "" if parts else "calls " if len(ranks) == 1 else "call "
        parts.append(f"{who} {verb}{' '.join(filter(None, words))}")
    return ", ".join(parts)


@lru_cache(maxsize=1024)
def _number(name: str) -> int:
    """Return a number of a name, the same on all ranks."""
    return crc32(name.encode())


_graph_task = torch._C._current_graph_task_id


def _in_backward() -> bool:
    """Return whether autograd runs this thread."""
    return _graph_task() != -1


_teams: weakref.WeakSet[Calls] = weakref.WeakSet()  # of this process
_joining = threading.Lock()  # held while there is another


class Calls:
    """The calls of one team, as seen by one of its ranks.

    Args:
        store: a store that the ranks share; None for a rank alone.
        rank, ranks: this rank, and all of the team.
        timeout: seconds to wait for what another rank must do first.
        check: raises, while this rank waits at a place, if another is lost.
        report: tells all ranks why one may run a call that another does not make; returns the first such report.

    Fields:
        lock: held by the thread whose call runs.
        inside: the thread whose call runs; None if none does.
        agreed: whether the ranks have agreed on that call.
        entered, latest: how many calls have begun, and the thread that made the latest.
        caller, name: the thread to which the latest call belongs, and its common name. What autograd's own threads call
            belongs to the thread that waits for them.
        callers: all threads that have called.
        operator: the name of the operator of hostir.torch that is calling an executor; empty if none is.
        number: of the next call.
        made, trail: how many calls that are not compared were made, and a number that follows from which these were.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        timeout: float = 0.0,
        check: Callable[[str], None] = lambda where: None,
        report: Callable[[str], str] = lambda why: why,
    ) -> None:
        self.store = store
        self.rank = rank
        self.others = [other for other in ranks if other != rank]
        self.timeout = timeout
        self.check = check
        self.report = report
        self.unlock()
        self.agreed = False
        self.entered = 0
        self.latest: threading.Thread | None = None
        self.caller: threading.Thread | None = None
        self.name = ""
        self.callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.threads = ThreadPairs()
        self.paired: tuple[int, str, str] | None = None  # the latest pair: a rank, its thread, the thread here
        with _joining:
            _teams.add(self)
        self.operator = ""
        self.number = 0
        self.broken = ""  # why this rank's calls are not those of the others any more
        self.slots = [""] * SLOTS
        self.made = self.trail = 0
        self.asked = 0  # since the latest of these: a call that fails may be followed by one of other sizes
        self.posted = deque[str]()  # by this rank, for `compare_new`

    def unlock(self) -> None:
        """Create a new lock, held by no thread: in a forked child, one of the parent's may have held the old one."""
        self.lock = threading.RLock()
        self.inside: threading.Thread | None = None

    def restart(self, store: Any, number: int) -> None:
        """Count calls from `number` on in another store, as all ranks do."""
        self.store, self.number = store, number
        self.slots = [""] * SLOTS
        self.made = self.trail = self.asked = 0
        self.posted.clear()
        self.store.set(f"turn/{self.rank}", str(number // (SLOTS // 2)))

    @contextlib.contextmanager
    def turn(self, program: str) -> Iterator[None]:
        """Make a call of a program in this thread, whatever it is that counts as one."""
        thread, entered = threading.current_thread(), self.entered
        if (other := self.inside) is not None:
            self.refuse_overlap(program, other)
        with self.lock:
            self.enter(thread, entered, program)
            try:
                yield
            finally:
                self.inside = None

    def enter(self, thread: threading.Thread, entered: int, program: str) -> None:
        """Begin a call of a program in a thread that holds the lock; `entered` of them had begun when it asked for it.

        Raises MisalignedError on every rank if another thread has begun one since.
        """
        if thread is not self.latest or entered != self.entered:
            if entered != self.entered and self.latest is not None and self.latest is not thread:
                self.refuse_overlap(program, self.latest)
            if thread is not self.caller:
                self._take_over(thread)
            self.latest = thread
        self.inside, self.agreed, self.entered = thread, False, self.entered + 1

    def refuse_overlap(self, program: str, other: threading.Thread) -> None:
        """Raise if a call would overlap the call of another thread, on every rank, or if it is within one of its own.

        A rank alone lets its threads wait for each other: nobody else has to know their order.
        """
        mine = threading.current_thread()
        if other is mine:
            hint = (
                "in a signal handler, only record what to do, and make the call after the interrupted one has returned"
            )
            what = f"@{program} is called while this thread runs another call"
            raise error(what, expected="one call after another", hint=hint)
        if self.others:
            first = (
                f"on rank {self.rank}, thread '{mine.name}' calls @{program} while thread '{other.name}' is in a call"
            )
            hint = f"give each thread a process group of its own, or let one of them make all calls; {PAGE}"
            raise self._misaligned(f"{first} of the same ranks", hint)

    def _take_over(self, thread: threading.Thread) -> None:
        """Count calls as those of this thread from now on, unless it is one of autograd's own."""
        if is_foreign(thread) and _in_backward():
            return
        self.caller = thread
        self.callers.add(thread)
        if self.others:
            self.name = common_name(thread)
            self.threads.callers.add(self.name)

    def begin(self, call: Call, *, planned: bool) -> None:
        """Return if every rank that has reached this call makes the same one; the caller holds the lock.

        Raises HostIRError, naming both calls, if they differ. If the rank that got there first had `planned`, it may
        already run its call: then every rank raises MisalignedError.
        """
        if not self.others:
            return
        self.check_order()
        mine = str(call)
        first, running, text = self._post(mine, planned)
        theirs = call if text == mine else Call.of(text)
        same = theirs is call or replace(theirs, thread=call.thread) == call
        self.agreed = same and self._same_thread(first, theirs.thread)
        self._move()
        if self.agreed:
            return
        if theirs.refusal and call.is_by(theirs):
            what = f"rank {self.rank} does not run @{call.program}, because rank {first} does not"
            raise error(f"{what}: {theirs.refusal}")
        said = describe({first: theirs, self.rank: call})
        if theirs is call:
            said = f"rank {first} calls @{call.program} in thread '{call.thread}', which was another thread here before"
        said = f"the calls of the ranks do not line up: {said}"
        raise self._misaligned(said) if running else error(said, expected=ALIKE, hint=PAGE)

    def refuse(self, call: Call) -> None:
        """Report that this rank does not make a call; the caller holds the lock.

        A rank that may already run it raises what the refusal says.
        """
        if not self.others:
            return
        self.check_order()
        _, running, _ = self._post(str(call), planned=False)
        self._move()
        if running:
            self._misaligned(f"rank {self.rank} does not run @{call.program}: {call.refusal}")

    def went(self, kind: int) -> None:
        """Count a call that was not compared; `kind` is a number of its program and sizes."""
        self.made, self.asked = self.made + 1, 0
        self.trail = hash((self.trail, kind, _number(self.operator), _in_backward()))

    def compare_new(self, call: Call) -> None:
        """Compare a call with sizes that are new on this rank, where not all calls are compared; nobody waits.

        Raises MisalignedError if another rank got here first with another one that is new there, or after other calls.
        """
        if not self.others:
            return
        self.check_order()
        key, mine = f"new/{self.made}/{self.asked}", f"{self.rank} {self.trail} {call}"
        self.asked += 1
        try:
            first, trail, text = self.store.compare_set(key, "", mine).decode().split(" ", 2)
            if int(first) == self.rank:
                self.posted.append(key)
            if len(self.posted) > SLOTS:
                self.store.delete_key(self.posted.popleft())
        except dist.DistError as problem:
            raise error(f"rank {self.rank} cannot reach the other ranks: {problem}") from problem
        if (trail, text) == (str(self.trail), str(call)):
            return
        said = describe({int(first): Call.of(text), self.rank: call})
        if text == str(call):
            said = f"ranks {first} and {self.rank} have made other calls before their call {self.made}"
        hint = f"{PAGE}; HOSTIR_COMPARE_CALLS=1 compares each before it runs"
        raise self._misaligned(f"the calls of the ranks do not line up: {said}", hint)

    def check_order(self) -> None:
        """Raise once a rank may run a call that another does not make: all later calls would be off by one."""
        if self.broken:
            raise MisalignedError(self.broken, f"rank {self.rank} makes no call any more")

    def _misaligned(self, why: str, hint: str = PAGE) -> MisalignedError:
        """Make no call any more, and let no other rank make one; return the error that all of them raise."""
        self.broken = why
        self.broken = self.report(why)
        return MisalignedError(self.broken, hint=hint)

    def _post(self, mine: str, planned: bool) -> tuple[int, bool, str]:
        """Post this rank's next call unless another rank was first. Return the first rank, `planned`, and its call."""
        slot = self.number % SLOTS
        try:
            if self.number % (SLOTS // 2) == 0:
                self._keep_up()
            word = f"{self.number} {self.rank} {int(planned)} {mine}"
            said = self.store.compare_set(f"call/{slot}", self.slots[slot], word).decode()
        except dist.DistError as problem:
            raise error(f"rank {self.rank} cannot reach the other ranks: {problem}") from problem
        _, first, running, text = said.split(" ", 3)
        self.said = said
        return int(first), running == "1", text

    def _move(self) -> None:
        """Go on to the next call."""
        self.slots[self.number % SLOTS] = self.said
        self.number += 1

    def _same_thread(self, rank: int, theirs: str) -> bool:
        """Return whether the thread that makes this call on another rank, of this common name, can be this one here.

        It is not if a thread of that name calls this team here as well. One that has not yet done so gets some time;
        then it has to have called another team.
        """
        if rank == self.rank or self.paired == (rank, theirs, self.name):
            return True
        if self.threads.known(rank, theirs, self.name):
            self.paired = rank, theirs, self.name
            return True
        deadline = time.monotonic() + SHOWING
        while theirs != self.name and (other := running(theirs)) is not None:
            self.check_order()
            if other in self.callers:
                return False
            if time.monotonic() > deadline:
                with _joining:
                    teams = [*_teams]
                if not any(other in team.callers for team in teams):
                    return False
                break
            time.sleep(0.005)
        self.check_order()  # it may have called, been refused and ended
        return self.threads.add(rank, theirs, self.name)

    def _keep_up(self) -> None:
        """Wait until every rank has read the slots that are used next, half of all."""
        turn = self.number // (SLOTS // 2)
        self.store.set(f"turn/{self.rank}", str(turn))
        deadline = time.monotonic() + self.timeout
        for other in self.others if turn > 1 else ():
            while not self.store.check([f"turn/{other}"]) or int(self.store.get(f"turn/{other}")) < turn - 1:
                if time.monotonic() > deadline:
                    late = f"rank {self.rank} is {SLOTS // 2} calls ahead of rank {other}, which does not follow"
                    raise error(late, expected=ALIKE, hint=PAGE)
                self.check("the calls of the others")
                time.sleep(0.005)


# Sessions -------------------------------------------------------------------------------------------------------------
# This process as one rank of a torchrun job: its device, its process groups, its watchdog.
#
#     with hi.session():      # or nothing: the first executor opens one until the process ends
#         outputs = Executor(program)(a_local, b)
#
# A process group that the program has initialised itself is used and left as it is.

# NVLink multicast stays off, in NCCL and in symmetric memory; each library reads its variable when it starts.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
LOG = logger(__name__)
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
MIN_PAUSE, MAX_PAUSE = 5e-5, 5e-3  # seconds between two polls of what the other ranks gave: mostly they arrive together

_current: Session | None = None
_parents: Session | None = None  # of the rank that this process was forked from
_sessions = itertools.count()
_opening = threading.RLock()  # threads may make their first executors at once
_forking = threading.local()  # the signal mask of a thread that forks
begun = False  # whether this process has tried to meet others: errors from then on may be its own
# Addresses of job stores that the launcher does not provide, by the address where ranks meet; rank 0 has the server.
_servers: dict[tuple[str, str, str], tuple[str, int, Any]] = {}


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


class Member(Protocol):
    """An executor as its session knows it."""

    def _leave(self, reason: str) -> None:
        """Let go of what the ranks share, and refuse further calls."""

    def _drop_stale(self) -> None:
        """Drop the plans whose symmetric memory was released."""

    def _renew(self) -> None:
        """Drop all plans, and agree anew on the next call of each kind."""


class Session:
    """This process as one of the ranks that run programs together: what `with hi.session() as job` gives.

    They are those of the job, or of a process group (`hostir.runtime.guest`).

    Fields:
        rank: of this process, from 0.
        size: the number of ranks.
        device: of this rank, a `torch.device`: `cpu`, or the GPU numbered by LOCAL_RANK.
        timeout: seconds that a rank waits for others before the job ends.
    """

    rank: int
    size: int
    store: Any
    watchdog: Watchdog
    limit = Watchdog.limit

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.device = device
        self.timeout = timeout
        self.exchanges: Counter[str] = Counter()
        self.owner = not dist.is_initialized()
        os.environ.update(NO_MULTICAST)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the launcher holds the store, from the start
        number = next(_sessions)
        if self.owner:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            host, port = _launchers_place() if agent else _met(self.rank, self.size, timeout, number)
            self.store = _part(_connection(host, port, timeout), "ranks", number)
            self.exchange("the start", "")  # a rank that never arrives would keep the groups waiting for half an hour
            groups = _part(_connection(host, port, default_pg_timeout.total_seconds()), "groups", number)
            bound = device if device.type == "cuda" else None  # a bound device connects its ranks at once
            # torch numbers groups from 0 again once all were destroyed, and would take addresses that are left for
            # theirs: so each session has a part of the store.
            dist.init_process_group(
                BACKENDS[device.type], store=groups, rank=self.rank, world_size=self.size, device_id=bound
            )
            _say_who_initialises(_too_late)
        else:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.store = _connect(timeout, number)
        self._share(Watchdog, default_pg_timeout)
        whose = "hostir's own" if self.owner else "the program's"
        LOG.info("joined a job of %d ranks on %s, in %s process group", self.size, device, whose)

    def _share(self, watchdog: type[Watchdog], patience: timedelta, whole: Callable[[], Any] = world) -> None:
        """Set up what the ranks share, once this one knows which it is and their store.

        Args:
            watchdog: what to do if a rank is lost.
            patience: the timeout of the process groups.
            whole: returns the registered process group of all ranks.
        """
        teams = PrefixStore("teams", self.store.clone())  # another connection: joining a group blocks one
        teams.set_timeout(patience)
        self.groups = Groups(self.rank, self.device, self.exchange, teams, patience, whole)
        report = lambda why: self.watchdog.misalign(why)  # noqa: E731  # there is no watchdog yet
        self.calls = Calls(self.store, self.rank, range(self.size), self.timeout, self.check, report)
        self.meetings = Meetings(self)
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()  # the executors that live
        self.first_store = self.store
        self.watchdog = watchdog(self.store, self.rank, self.size, self.timeout, KEEPALIVE.get())

    def exchange(self, key: str, mine: str, timeout: float | None = None, where: str = "") -> list[str]:
        """Return what every rank gave for this key, by rank. Using a key again starts another exchange.

        Raises HostIRError naming the ranks that do not arrive, and `where`: at the key, unless given.
        """
        self.exchanges[key] += 1
        keys = [f"{key}/{self.exchanges[key]}/{rank}" for rank in range(self.size)]
        with self.asking(where or key):
            self.store.set(keys[self.rank], mine)
            self.wait(lambda ranks: self.store.check([keys[rank] for rank in ranks]), where or key, timeout)
            return [self.store.get(k).decode() for k in keys]

    @contextlib.contextmanager
    def asking(self, where: str) -> Iterator[None]:
        """Raise HostIRError if the store of the job cannot be reached."""
        try:
            yield
        except dist.DistError as problem:
            raise error(
                f"rank {self.rank} cannot ask the others at {where}: the store of the job is gone ({problem})",
                expected="rank 0, or the launcher that has the store, to live as long as the ranks",
            ) from problem

    def wait(
        self,
        arrived: Callable[[Sequence[int]], bool],
        where: str,
        timeout: float | None = None,
        note: Callable[[int], str] = lambda rank: "",
    ) -> None:
        """Poll until all ranks have arrived; raise HostIRError naming those that have not, each with its note.

        Raises the error for a call that another rank has abandoned, too: that rank does not arrive.
        """
        everyone, pause = range(self.size), MIN_PAUSE
        deadline = time.monotonic() + (timeout or self.timeout)
        while not arrived(everyone):
            if self.has_lost_call and not arrived(everyone):  # it may have arrived before it abandoned a call
                raise self.lost_call()
            self.check(where)
            if time.monotonic() > deadline:
                late = [rank for rank in everyone if not arrived([rank])]
                raise error(
                    f"rank {self.rank} waited {timeout or self.timeout:.0f} s for {_ranks(late)} at {where}",
                    expected=ALIKE,
                    hint=f"{PAGE}; {self.limit} sets how long one may wait for the others",
                    notes=(*((None, text) for rank in late if (text := note(rank))), *self.crossing()),
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    @property
    def symmetric_bytes(self) -> int:
        """The bytes of this rank's symmetric memory, which the executors of all programs share."""
        return self.groups.memory.bytes if self.groups.memory is not None else 0

    def check(self, where: str) -> None:
        """Raise if a rank for which this one waits is lost, or runs another call. The watchdog ends a job's ranks."""
        if not hasattr(self, "watchdog") or self.rank in self.watchdog.done:  # while the job begins, or ends
            return
        if self.watchdog.misaligned:
            raise MisalignedError(self.watchdog.misaligned, f"rank {self.rank} was at {where}")

    # Calls that end midway --------------------------------------------------------------------------------------------
    # After a rank has abandoned a call, all ranks raise once. At their next calls they renew their shared state.
    #
    # A call is abandoned if it fails on a rank after peers may have noticed its beginning. The peers may wait for the
    # rest. Flags, process groups and counts of calls then disagree between ranks. So every rank raises an error to its
    # caller: the failing rank in that call, and the others in the call under way or in their next. At the first call
    # after the error, the ranks meet. By then every caller knows that results may be lost, so waits can be released.
    # When all devices are idle, symmetric memory and all counts get their first values again.

    @property
    def has_lost_call(self) -> bool:
        """Whether another rank has abandoned a call, and this rank's caller does not know yet."""
        watchdog = vars(self).get("watchdog")  # it is missing while the session begins
        return watchdog is not None and watchdog.abandoned is not None and not self.groups.abandoned

    def lost_call(self) -> HostIRError:
        """Return the error that tells this rank's caller that another rank has abandoned a call; to be raised."""
        event = self.watchdog.abandoned
        assert event is not None
        self.groups.abandoned = event.words
        return self.watchdog.blame(self.watchdog.lost_call(event), abandoned=True)

    def renew(self) -> None:
        """Meet all ranks, and give what they share its first state again; each has raised because of the same call.

        Raises HostIRError if they do not come or a device does not end; then this rank makes no more calls.
        """
        if broken := self.groups.broken:
            raise error(f"rank {self.rank} makes no more calls: {broken}", hint=ANEW)
        where, memory = f"the first call after one that ended midway ({self.groups.abandoned})", self.groups.memory
        mine = self.calls.number, self.meetings.number, memory.meetings if memory is not None else 0
        try:
            texts = self.exchange("renewal", json.dumps(mine), where=where)
            numbers = [max(each) for each in zip(*map(json.loads, texts), strict=True)]
            self.store = PrefixStore(f"renewal {self.watchdog.renewals}", self.first_store)
            self.exchanges.clear()
            self.calls.restart(self.store, numbers[0])
            self.meetings.restart(numbers[1])
            if memory is not None:
                memory.meetings = numbers[2]
            self.watchdog.renewed()  # first: from then on, a thread that looks sees no lost call
            self.groups.renew(min(self.timeout, TIMEOUT.get()))
        except HostIRError as problem:
            self.groups.broken = self.groups.broken or headline(problem)
            raise
        for member in list(self.members):
            member._renew()
        LOG.info("renewed what the ranks share, after a call that ended midway")

    def crossing(self) -> tuple[tuple[None, str], ...]:
        """Return a note for an error of waiting too long, if calls of other groups may wait for this rank's."""
        return ()

    def first(self, what: str) -> bool:
        """Whether no rank has asked this before, for messages that one rank prints for all."""
        with contextlib.suppress(RuntimeError):  # the store may have gone
            return bool(self.first_store.add(f"said/{what}", 1) == 1)
        return True

    def close(self, done: bool, timeout: float | None = None) -> None:
        """Leave the job. A rank that is `done` waits for the others; one that failed does not."""
        global _current
        if _current is not self:
            return
        _current = None
        self.part(done, timeout)
        if self.owner:
            _say_who_initialises(_torchs_own)
        LOG.info("left the job, %s", "done" if done else "after a failure")

    def part(self, done: bool, timeout: float | None, wait: bool = True) -> None:
        """Part from the other ranks; `wait` for them if this one is `done`."""
        for member in list(self.members):  # their graphs go before the groups and the memory that they launch work on
            member._leave("its session has ended")
        if done and self.groups.memory is not None:
            self.groups.memory.sharing.synchronize()  # peers may still use this rank's
        if done:
            self.watchdog.leave()
        if done and wait:
            with contextlib.suppress(Exception):  # rank 0 may be gone already, and the store with it
                self.exchange("the end", "", timeout)
        self.watchdog.close(done)
        self.groups.end(done and not self.watchdog.misaligned, default=self.owner)  # peers may be within a call
        # Closes the connections: executors may outlive the session.
        self.store = self.first_store = self.calls.store = None


_torchs_own = dist.init_process_group


def _too_late(*arguments: Any, **options: Any) -> None:
    """Refuse `init_process_group`, which this replaces once hostir has initialised torch's groups itself."""
    raise error(
        "hostir has initialised torch's process group itself, when the session began with the first executor",
        expected="dist.init_process_group before the first executor or session: hostir uses that group",
        hint="or leave it out: torch.distributed works, with all ranks in the default group",
    )


def _say_who_initialises(function: Any) -> None:
    for module in (dist, dist.distributed_c10d):
        vars(module)["init_process_group"] = function


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def session(
    device: str | None = None, timeout: float | None = None
) -> contextlib.AbstractContextManager[Session | None]:
    """Joins the job that torchrun started, and leaves it at the end of the `with`: docs/sessions.md.

    Gives the `hi.Session`; None outside torchrun, where executors simulate their ranks. Inside another session, gives
    that one. Leaving waits for the other ranks, unless an exception ends the block. Raises HostIRError where ranks do
    not come, there is no such device, and in a process that was forked from a rank.

    Args:
        device: `cpu` or `cuda`; CUDA where there is any, unless given.
        timeout: seconds that a rank waits for others; see the knob HOSTIR_TIMEOUT.
    """
    return _session(_known_device(device), TIMEOUT.get(timeout))


@contextlib.contextmanager
def _session(device: str, timeout: float) -> Iterator[Session | None]:
    if _current is not None or not launched():
        yield _current
        return
    refuse_in_child()
    opened = _open(device, timeout)
    try:
        yield opened
    except BaseException:
        opened.close(done=False)
        raise
    opened.close(done=True)


def joined(device: str | None = None) -> Session:
    """Return this process's session; if there is none, open one until the process ends."""
    with _opening:
        if _current is None:
            refuse_in_child()
            _open(_known_device(device), TIMEOUT.get())
            atexit.register(_leave)
        here = _current
    assert here is not None
    if device is not None and here.device.type != device:
        raise error(f"this process has joined the job with its {here.device}", expected=f"one session, on {device}")
    return here


def _leave() -> None:
    if _current is not None:
        _current.close(done=not hasattr(sys, "last_type"), timeout=5.0)


def _forks() -> None:
    """Block SIGTERM during a fork until the child is ready for it: Python's handlers would miss an earlier one."""
    if _current is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _has_forked() -> None:
    if (mask := vars(_forking).pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forked() -> None:
    """Detach a forked child from the rank: it does not act for the rank."""
    global _current, _opening
    _opening = threading.RLock()  # a thread of the parent may have held the old one
    if _current is not None:
        detach(_current)
        _current = None
    atexit.unregister(_leave)
    _has_forked()


os.register_at_fork(before=_forks, after_in_parent=_has_forked, after_in_child=_forked)


def detach(left: Session) -> None:
    """Release, in a process forked from a rank, what belongs to the rank; it can begin no session."""
    global _parents
    left.watchdog.forget()
    for kept in (left, dist.group.WORLD):  # never destroyed: gloo would join threads that are not here
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _parents = left


def refuse_in_child() -> None:
    """Raise in a process that was forked from a rank."""
    if _parents is not None:
        raise forked_from(_parents.rank)


def forked_from(rank: int) -> HostIRError:
    """Return the error for using in a forked child what only the rank itself can use."""
    return error(
        f"this process was forked from rank {rank} after that had made its first executor, and is no rank",
        expected="calls from the rank's own process: its threads, connections and GPU do not come along",
        hint="start workers before the first executor, or by multiprocessing's 'spawn'; "
        "here, machine='local' runs on simulated ranks",
    )


def _known_device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_known("device", device, BACKENDS)
    return device


def _open(kind: str, timeout: float) -> Session:
    global _current, begun
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if kind == "cuda" and not torch.cuda.is_available():
        raise error(
            "there is no CUDA GPU here",
            hint="run on CPUs, with gloo: machine='gloo' in Python, --device cpu on the command line",
        )
    begun = True
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise error(
            f"rank {os.environ['RANK']} is number {local_rank} on its host, which has {torch.cuda.device_count()} GPUs",
            hint="start one process a GPU",
        )
    where = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    _current = Session(where, timeout)
    return _current


def _launchers_place() -> tuple[str, int]:
    """Return the host and port at which the launcher lets ranks meet. Raises HostIRError if they are not set."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise error("this rank does not know where to meet the others", expected="MASTER_ADDR and MASTER_PORT")
    return host, int(port)


def _met(rank: int, size: int, timeout: float, number: int) -> tuple[str, int]:
    """Return the address of rank 0's store for all sessions of this process, as the launcher has none.

    The ranks meet at the launcher's address, rank 0 posts the address of its own store, and the first address is free
    again: others of the program may use it, and ranks that are early for a later session do not meet a closing store.
    """
    host, port = _launchers_place()
    key = host, str(port), os.environ["WORLD_SIZE"]
    if key not in _servers:
        patience = timedelta(seconds=timeout)
        try:
            place = TCPStore(
                host, port, is_master=rank == 0, wait_for_workers=False, timeout=patience, multi_tenant=True
            )
            meeting = _part(place, "meeting", number)
            if rank == 0:
                server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
                meeting.set("port", str(server.port))
                meeting.wait([f"read/{other}" for other in range(1, size)], patience)
                _servers[key] = host, server.port, server
            else:
                _servers[key] = host, int(meeting.get("port")), None
                meeting.set(f"read/{rank}", "")
        except dist.DistError as problem:
            raise error(
                f"rank {rank} did not meet all {size} ranks within {timeout:.0f} s: {problem}",
                expected=f"all of them at {host}:{port}",
                hint="HOSTIR_TIMEOUT sets how long a rank may wait for the others",
            ) from problem
    return _servers[key][:2]


def _connection(host: str, port: int, seconds: float) -> Any:
    """Connect to a store of the job, with a timeout for keys."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _connect(timeout: float, number: int) -> Any:
    """Connect to the store of groups that the program has made, over an own connection if its address is known."""
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        store = _connection(*_launchers_place(), timeout)
    else:
        store = dist.distributed_c10d._get_default_store()
    return _part(store, "ranks", number)


def _part(store: Any, what: str, number: int) -> Any:
    """Return this session's part of a store: a launcher keeps its store when it restarts failed ranks."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "job"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"hostir/{'/'.join(job)}/{what}/{number}", store)


# Agreements -----------------------------------------------------------------------------------------------------------
# Ranks of an executor compare what they are about to run before they run it.


READ = "read "  # before a refusal that another rank has read


class Meetings:
    """The meetings of a job's ranks, one before each call with sizes of a kind that is new to an executor.

    Every rank posts its call in a slot of its own, and waits for the others'. A rank that refuses a call posts the
    refusal instead, and may replace that by a call until another rank, in the call that was refused, has read it: from
    then on the meeting has failed for all. Nobody reads a refusal of an earlier call, which the others have run.

    Where all calls are compared, and so have numbers, each has a meeting of its own: a refusal stays.

    Fields:
        number: of the next meeting.
        refusal: this rank's in that meeting; empty if it has refused nothing.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.number = 0
        self.refusal = ""

    def restart(self, number: int) -> None:
        """Count meetings from `number` on, as all ranks do."""
        self.number, self.refusal = number, ""

    def meet(self, call: Call, where: str, concerns: Callable[[Call], bool], numbered: bool) -> list[Call]:
        """Return every rank's call, or its refusal; `concerns` tells whether a refusal is one of this call.

        Raises HostIRError for ranks that do not arrive.
        """
        store, met, stale = self.session.store, dict[int, Call](), dict[int, str]()

        def read(rank: int) -> None:
            text = store.get(f"{slots}/{rank}").decode()
            while not text.startswith(READ):
                theirs = Call.of(text)
                if theirs.refusal and not concerns(theirs):
                    stale[rank] = f"rank {rank} has refused an earlier call: {theirs.refusal}"
                    return
                if not theirs.refusal:
                    break
                text = store.compare_set(f"{slots}/{rank}", text, READ + text).decode()
            met[rank] = Call.of(text.removeprefix(READ))

        def arrived(ranks: Sequence[int]) -> bool:
            missing = [rank for rank in ranks if rank not in met]
            if missing and store.check([f"{slots}/{rank}" for rank in missing]):
                for rank in missing:
                    read(rank)
            return met.keys() >= set(ranks)

        with self.session.asking(where):
            slots = self._post(call, numbered)
            self.session.wait(arrived, where, note=lambda rank: stale.get(rank, ""))
        self.number += not numbered
        return [met[rank] for rank in range(self.session.size)]

    def refuse(self, call: Call, numbered: bool) -> None:
        """Post a refusal for ranks that make this call."""
        with contextlib.suppress(dist.DistError):  # the caller gets the refusal itself
            self._post(call, numbered)

    def _post(self, call: Call, numbered: bool) -> str:
        """Write a call or its refusal to this rank's slot of the meeting for it; return the prefix of the slots."""
        store, rank, text = self.session.store, self.session.rank, str(call)
        if numbered:
            store.set(f"meeting of call {call.made}/{rank}", text)
            return f"meeting of call {call.made}"
        while store.compare_set(f"meeting {self.number}/{rank}", self.refusal, text).decode() != text:
            self.number += 1  # the refusal there was read
            self.refusal = ""
        self.refusal = text if call.refusal else ""
        return f"meeting {self.number}"


class Agreement:
    """The agreement of all ranks on what an executor runs: before its first run at sizes of a kind they compare it.

    With `compare`, also each call. Without a session there is nobody to agree with.

    Fields:
        made: the executor's calls so far, where calls are not compared.
    """

    def __init__(self, session: Session | None, program: Program, kernels: str, compare: bool) -> None:
        self.session = session
        self.calls = session.calls if session is not None else Calls()
        self.compare = compare and session is not None and session.size > 1
        self.call = Call(program.name, program.digest if session is not None else "", None, (), kernels)
        self.program = program
        self.agreed: set[Hashable] = set()  # kinds of sizes
        self.made = 0
        self.failed = 0, 0  # the latest call that failed, as a number of calls made before it, and how often

    def restart(self) -> None:
        """Agree anew on calls of every kind, as all ranks do."""
        self.agreed.clear()
        self.made, self.failed = 0, (0, 0)

    def begin(self, sizes: Mapping[str, int], *, planned: bool, places: bool = False) -> None:
        """Raise if ranks that have reached this call make another one; the caller holds the lock of the calls.

        `planned`: this one then runs without meeting them.
        """
        if not self.compare:
            return
        try:
            self.calls.begin(self.of(sizes, places), planned=planned)
        except HostIRError as refused:
            self._announce(refused)
            raise

    def refuse(self, refusal: HostIRError) -> None:
        """Report to ranks that run a call, or are about to compare it, that this one does not run it."""
        if self.compare:
            self.calls.refuse(replace(self.call, refusal=headline(refusal)))
        self._announce(refusal)

    def reach(self, sizes: Mapping[str, int], kind: Hashable) -> None:
        """Raise on every rank if one refuses, or if programs, sizes or kernels differ; once for each kind of sizes.

        Other sizes that are new are compared with what the ranks have told that were earlier.
        """
        if self.session is None:
            return
        if kind in self.agreed:
            return self.calls.compare_new(self.of(sizes)) if not self.compare else None
        bound = tuple(sorted(sizes.items()))
        if broken := self.session.groups.broken:
            raise error(f"@{self.program.name} cannot run: {broken}", hint=ANEW)
        where = f"the call of @{self.program.name}" + "".join(f", {name}={size}" for name, size in bound)
        meetings, what = self.session.meetings, f"rank {self.session.rank} does not run @{self.program.name}"
        call, self.failed = self._counted(self.of(sizes)), (self._made(), self._tries() + 1)
        while True:
            given = meetings.meet(call, where, partial(self._concerns, call), self.compare)
            most = max(it.tries for it in given)
            calls = [replace(it, tries=0, thread="") for it in given]
            if (refused := next((rank for rank, it in enumerate(given) if it.refusal), None)) is not None:
                raise error(f"{what}, because rank {refused} does not: {given[refused].refusal}")
            if all(it == calls[0] for it in calls):
                break
            if len({it.made for it in given}) > 1 or all(it.tries == most for it in given):
                said = describe(dict(enumerate(calls)))
                raise error(f"{what}: {said}", expected=ALIKE, hint=PAGE)
            if call.tries < most:
                first = next(rank for rank, it in enumerate(given) if it.tries == most)
                raise error(f"{what}, because rank {first} does not: it has refused that call, and makes another")
            # else the others were in a call that this rank has refused: it meets them in their next
        if self.call.executor is None:
            self.call = replace(self.call, executor=self._made() if self.compare else meetings.number)
        self.session.groups.prepare(teams_of(self.program))
        self.agreed.add(kind)

    def of(self, sizes: Mapping[str, int], places: bool = False) -> Call:
        """Return a call of the executor with these sizes."""
        bound, calls = tuple(sorted(sizes.items())), self.calls
        thread = calls.name if self.compare else ""
        call = replace(self.call, sizes=bound, places=places, thread=thread)
        return replace(call, operator=calls.operator, backward=_in_backward())

    def _announce(self, refusal: HostIRError) -> None:
        if self.session is not None:
            self.session.meetings.refuse(self._counted(replace(self.call, refusal=headline(refusal))), self.compare)
            self.failed = self._made(), self._tries() + 1

    def _concerns(self, mine: Call, refusal: Call) -> bool:
        """Whether another rank refuses the call that this rank makes, and not one that has failed here as well."""
        same = refusal.made == mine.made and (self.compare or refusal.is_by(mine))
        return same and refusal.tries >= mine.tries

    def _counted(self, call: Call) -> Call:
        return replace(call, made=self._made(), tries=self._tries())

    def _tries(self) -> int:
        """Return how often the executor's call has failed that is next."""
        number, times = self.failed
        return times if number == self._made() else 0

    def _made(self) -> int:
        """Return how many calls of the job came before this one, or where they are not compared, of the executor."""
        return self.calls.number - 1 if self.compare else self.made
