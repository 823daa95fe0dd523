"""Check that a team of ranks makes the same calls in the same order, and that each rank makes one call at a time.

All executors of a team share its process groups. A process group matches the operations of different ranks only by
their order. So the calls of the ranks are compared. The rank that reaches the team's n-th call first writes the call to
the team's store. Each other rank compares its n-th call with this text. No rank waits: one rank may be several calls
ahead of another.

A thread may make a call after the call of another thread has ended. Calls that overlap have no order, and are refused.
If two threads take a lock for their calls, the calls do not overlap. But the threads may take turns in another order on
another rank. So if calls are compared, the threads that make the calls are compared, too. For this, a thread has a name
that is the same on all ranks (see `hostir.job.threads`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from hostir.ir.source import error
from hostir.job.links import ALIKE, PAGE, MisalignedError
from hostir.job.threads import CURRENT, ThreadPairs, common_name, is_foreign, running

SLOTS = 512  # the number of calls that the store keeps; no rank gets so far ahead of another
SHOWING = 1.0  # seconds that a thread has to make a call if the thread of the same name on another rank has made one
STARTING = 5.0  # seconds that this thread has to make a call of any team, because its program may still be compiled


@dataclass(frozen=True)
class Call:
    """The data of a call that ranks compare.

    Fields:
        program: the name of the program.
        digest: the digest of the program.
        executor: the number of the executor's first call, which identifies the executor; None until that call.
        sizes: the names and values of the program's symbols.
        kernels: the kernels that the executor uses.
        places: True for a call of `Executor.places`.
        made: the number of earlier calls, if ranks meet for this call; else 0.
        tries: the number of failed attempts at this call, if ranks meet for it; else 0.
        refusal: the reason why this rank does not make the call; empty if it makes the call.
        operator: the name of the operator of hostir.torch that makes the call; empty if the user calls the executor.
        backward: True if autograd makes the call in a backward pass.
        thread: the name of the thread that makes the call, which is the same on all ranks; empty if calls are not
            compared.
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
        """Return True if both are calls of the same executor. It does not matter whether they are refused."""
        return (self.digest, self.executor) == (other.digest, other.executor)

    @lru_cache(maxsize=1024)  # noqa: B019  # the same few, again and again
    def __str__(self) -> str:
        return json.dumps(vars(self))


def describe(by_rank: Mapping[int, Call]) -> str:
    """Return a text that tells users how the calls of ranks differ. Ranks with equal calls are named together."""
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


class NameHashes(dict[str, int]):
    """The CRC-32 of names. Unlike Python's `hash`, it is the same on all ranks."""

    def __missing__(self, name: str) -> int:
        self[name] = crc32(name.encode())
        return self[name]


_hashes = NameHashes()
PRIME, BITS = 1000003, (1 << 60) - 1  # of the hash of a sequence of calls
_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Return True if autograd runs a backward pass in this thread."""
    return _graph_task() != -1


_teams: weakref.WeakSet[Calls] = weakref.WeakSet()  # the teams of this process
_joining = threading.Lock()  # held while `_teams` is read or changed


class Calls:
    """The calls of one team of ranks, seen from one rank.

    Args:
        store: a store that the ranks share; None for a rank alone.
        rank: this rank.
        ranks: all ranks of the team.
        timeout: seconds to wait for another rank that is too many calls behind.
        check: called while this rank waits; raises an error if another rank is lost or has abandoned a call.
        report: reports to all ranks that their calls may differ, with the reason. It returns the first reason that any
            rank has reported.

    Fields:
        lock: held by the thread whose call runs.
        inside: the thread whose call runs; None between calls.
        visible: True if other ranks may know of the running call and run it, too. Either this rank has written the call
            to the store, or it has issued work that peers may notice.
        entered: the number of calls that have begun.
        latest: the thread that made the latest call.
        caller: the thread to which the latest call belongs. A call that a thread of autograd makes belongs to the
            thread that waits for autograd.
        name: the name of `caller` that is the same on all ranks.
        callers: all threads that have made calls.
        threads: the pairs of threads on this rank and another rank that have made the same calls.
        paired: the latest pair in `threads`: the other rank, the name of the other rank's thread, and the name of this
            rank's thread.
        operator: the name of the operator of hostir.torch that is calling an executor; empty for other callers.
        number: the number of the next call.
        broken: the reason why this rank makes no more calls; empty if it may make calls. The reason is a difference
            between its calls and the calls of other ranks.
        slots: the texts that this rank last read from the slots of the store.
        made: the number of calls that were not compared.
        trail: a hash of the sequence of the calls that were not compared.
        asked: the number of calls that `compare_new` has compared since the last call that was not compared. It can
            exceed 1, because a call with other sizes may follow a call that fails.
        posted: the keys that this rank has written in `compare_new`.
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
        self.visible = False
        self.entered = 0
        self.latest: threading.Thread | None = None
        self.caller: threading.Thread | None = None
        self.name = ""
        self.callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.threads = ThreadPairs()
        self.paired: tuple[int, str, str] | None = None
        with _joining:
            _teams.add(self)
        self.operator = ""
        self.number = 0
        self.broken = ""
        self.slots = [""] * SLOTS
        self.made = self.trail = 0
        self.asked = 0
        self.posted = deque[str]()

    def unlock(self) -> None:
        """Create a new lock that no thread holds. In a forked child, a thread of the parent may hold the old lock."""
        self.lock = threading.RLock()
        self.inside: threading.Thread | None = None

    def restart(self, store: Any, number: int) -> None:
        """Continue with call `number` in another store. All ranks call this with the same number."""
        self.store, self.number = store, number
        self.slots = [""] * SLOTS
        self.made = self.trail = self.asked = 0
        self.posted.clear()
        self.store.set(f"turn/{self.rank}", str(number // (SLOTS // 2)))

    @contextlib.contextmanager
    def turn(self, program: str) -> Iterator[None]:
        """Return a context manager for one call of a program by the current thread. Raise if another call runs."""
        thread, entered = CURRENT.it, self.entered
        if (other := self.inside) is not None:
            self.refuse_overlap(program, other)
        with self.lock:
            if thread is not self.latest or entered != self.entered:
                self.hand_over(thread, entered, program)
            self.inside, self.visible, self.entered = thread, False, self.entered + 1
            try:
                yield
            finally:
                self.inside = None

    def hand_over(self, thread: threading.Thread, entered: int, program: str) -> None:
        """Record that a thread, which holds the lock, makes the next call of a program.

        Every rank raises MisalignedError if another thread has begun a call while this thread waited for the lock.

        Args:
            thread: the current thread.
            entered: the number of calls that had begun when the thread asked for the lock.
            program: the name of the program, for messages.
        """
        if entered != self.entered and self.latest is not None and self.latest is not thread:
            self.refuse_overlap(program, self.latest)
        if thread is not self.caller:
            self._take_over(thread)
        self.latest = thread

    def refuse_overlap(self, program: str, other: threading.Thread) -> None:
        """Raise an error if a call of the current thread would overlap the running call of the thread `other`.

        If `other` is another thread, all ranks raise MisalignedError. If it is the same thread, only this rank raises.
        For a rank alone, threads may wait for each other, and nothing is raised.
        """
        mine = CURRENT.it
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
        """Record that the next calls belong to this thread, unless it is a thread of autograd."""
        if is_foreign(thread) and in_backward():
            return
        self.caller = thread
        self.callers.add(thread)
        if self.others:
            self.name = common_name(thread)
            self.threads.callers.add(self.name)

    def begin(self, call: Call, *, planned: bool) -> None:
        """Compare a call with the call of the rank that reached it first. The current thread holds the lock.

        If the two calls differ, raise a HostIRError that names both calls. If the rank that came first may already run
        its call, every rank raises MisalignedError.

        Args:
            call: the call of this rank.
            planned: True if this rank has a plan for the call. Then this rank runs the call next, without a meeting.
        """
        if not self.others:
            return
        self.check_order()
        mine, self.visible = str(call), True
        first, running, text = self._post(mine, planned)
        theirs = call if text == mine else Call.of(text)
        same = theirs is call or replace(theirs, thread=call.thread) == call
        agreed = same and self._same_thread(first, theirs.thread)
        self._move()
        if agreed:
            return
        if theirs.refusal:
            what = f"rank {self.rank} does not run @{call.program}, because rank {first} "
            what += "does not" if call.is_by(theirs) else f"refuses a call of @{theirs.program}"
            raise error(f"{what}: {theirs.refusal}")
        difference = describe({first: theirs, self.rank: call})
        if theirs is call:
            difference = (
                f"rank {first} calls @{call.program} in thread '{call.thread}', which was another thread here before"
            )
        message = f"the calls of the ranks do not line up: {difference}"
        raise self._misaligned(message) if running else error(message, expected=ALIKE, hint=PAGE)

    def refuse(self, call: Call) -> None:
        """Report to the other ranks that this rank does not make a call. The current thread holds the lock.

        If another rank may already run the call, all ranks raise MisalignedError with the reason of the refusal.
        """
        if not self.others:
            return
        self.check_order()
        _, running, _ = self._post(str(call), planned=False)
        self._move()
        if running:
            self._misaligned(f"rank {self.rank} does not run @{call.program}: {call.refusal}")

    def went(self, checksum: int) -> None:
        """Count a call that ran without being compared with the calls of the other ranks.

        `checksum` is a hash of the call's program and sizes. It becomes part of `trail`.
        """
        self.made, self.asked = self.made + 1, 0
        call = checksum + _hashes[self.operator] * 2 + (_graph_task() != -1)
        self.trail = (self.trail * PRIME ^ call) & BITS

    def compare_new(self, call: Call) -> None:
        """Compare a call with sizes that are new on this rank. No rank waits.

        This method is used if the ranks do not compare all calls. The first rank that has new sizes in its n-th call
        writes this call to the store. Every other rank that has new sizes in its n-th call compares its call with this
        text. If the calls differ, or if the two ranks have made different calls before, every rank raises
        MisalignedError.
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
        difference = describe({int(first): Call.of(text), self.rank: call})
        if text == str(call):
            difference = f"ranks {first} and {self.rank} have made other calls before their call {self.made}"
        hint = f"{PAGE}; HOSTIR_COMPARE_CALLS=1 compares each before it runs"
        raise self._misaligned(f"the calls of the ranks do not line up: {difference}", hint)

    def check_order(self) -> None:
        """Raise MisalignedError if this rank must make no more calls.

        The reason is that the calls of the ranks no longer match.
        """
        if self.broken:
            raise MisalignedError(self.broken, f"rank {self.rank} makes no call any more")

    def end(self, why: str) -> None:
        """Forbid all ranks to make more calls. `why` is the reason."""
        self._misaligned(why)

    def _misaligned(self, why: str, hint: str = PAGE) -> MisalignedError:
        """Forbid all ranks to make more calls; return the error that all ranks raise. `why` is the reason."""
        self.broken = why
        self.broken = self.report(why)
        return MisalignedError(self.broken, hint=hint)

    def _post(self, mine: str, planned: bool) -> tuple[int, bool, str]:
        """Write this rank's next call to the store, unless another rank has written its call there before.

        Return the rank that wrote its call first, the value of `planned` on that rank, and the text of that rank's
        call.

        Args:
            mine: the text of this rank's call.
            planned: True if this rank runs the call next without a meeting.
        """
        slot = self.number % SLOTS
        try:
            if self.number % (SLOTS // 2) == 0:
                self._keep_up()
            word = f"{self.number} {self.rank} {int(planned)} {mine}"
            slot_text = self.store.compare_set(f"call/{slot}", self.slots[slot], word).decode()
        except dist.DistError as problem:
            raise error(f"rank {self.rank} cannot reach the other ranks: {problem}") from problem
        _, first, running, text = slot_text.split(" ", 3)
        self.slot_text = slot_text
        return int(first), running == "1", text

    def _move(self) -> None:
        """Advance to the number of the next call, and to the next slot of the store."""
        self.slots[self.number % SLOTS] = self.slot_text
        self.number += 1

    def _same_thread(self, rank: int, theirs: str) -> bool:
        """Return True if the thread that makes this call on another rank can correspond to the current thread.

        Threads with the same name correspond. If the names differ, the other rank's thread may correspond to another
        thread of this rank instead: the running thread T with the name `theirs`.

        - If T has made calls of this team, return False.
        - If T has made no call of this team, wait, because T may still make a call.
        - After SHOWING seconds, stop waiting for T if T has made a call of another team.
        - After STARTING seconds, return False if T has made no call of any team.

        Args:
            rank: the other rank.
            theirs: the name of its thread, which is the same on all ranks.
        """
        if rank == self.rank or self.paired == (rank, theirs, self.name):
            return True
        if self.threads.known(rank, theirs, self.name):
            self.paired = rank, theirs, self.name
            return True
        begun = time.monotonic()
        while theirs != self.name and (other := running(theirs)) is not None:
            self.check_order()
            if other in self.callers:
                return False
            waited = time.monotonic() - begun
            if waited > SHOWING:
                with _joining:
                    teams = [*_teams]
                if any(other in team.callers for team in teams):
                    break
                if waited > STARTING:
                    return False
            time.sleep(0.005)
        self.check_order()  # the other thread may have ended after its call was refused
        return self.threads.add(rank, theirs, self.name)

    def _keep_up(self) -> None:
        """Wait until every rank has read the half of the store's slots that this rank is going to overwrite.

        Raise a HostIRError if a rank does not come within the timeout.
        """
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
