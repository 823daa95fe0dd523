"""The calls of executors by a team of ranks: one at a time on each rank, and the same in the same order on all.

Executors share their team's process groups, which match what comes from each rank by its order alone. So the rank that
gets first to the team's n-th call says in the team's store what it is, and every other holds its own against that. It
waits for nobody: ranks may be calls apart. Threads of a rank take turns, in the order of the ranks that came first.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from hostir.ir.source import HostIRError, error

SLOTS = 512  # of the store: no rank is as many calls ahead of another
ALIKE = "the same calls, in the same order, on every rank"
PAGE = "docs/calls.md says what the ranks of a job must do alike"


@dataclass(frozen=True)
class Call:
    """What ranks compare of a call; `executor` is the number of its executor's first call, None before that."""

    program: str
    digest: str
    executor: int | None
    sizes: tuple[tuple[str, int], ...]
    kernels: str
    places: bool = False
    refusal: str = ""

    @staticmethod
    def of(text: str) -> Call:
        fields = json.loads(text)
        return Call(**{**fields, "sizes": tuple(map(tuple, fields["sizes"]))})

    def is_by(self, other: Call) -> bool:
        """Whether the other is a call of the same executor, made or refused."""
        return (self.digest, self.executor) == (other.digest, other.executor)

    @lru_cache(maxsize=1024)  # noqa: B019  # the same few, again and again
    def __str__(self) -> str:
        return json.dumps(asdict(self))


def told(by_rank: Mapping[int, Call]) -> str:
    """Calls of several ranks that differ, in the words of who made them: equal ones together."""
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
        if differ("executor") and not differ("digest"):
            known = call.executor is not None
            words.append(f"by the executor first called in call {call.executor}" if known else "by a new executor")
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        verb = "" if parts else "calls " if len(ranks) == 1 else "call "
        parts.append(f"{who} {verb}{' '.join(filter(None, words))}")
    return ", ".join(parts)


class Calls:
    """The calls of one team, as one of its ranks makes them.

    Args:
        store: a store that the ranks share; None for a rank alone.
        rank, ranks: this rank, and all of the team.
        timeout: seconds to wait for what another rank or thread must do first.

    Fields:
        lock: held by the thread whose call runs.
        number: of the next call.
    """

    def __init__(self, store: Any = None, rank: int = 0, ranks: Sequence[int] = (0,), timeout: float = 0.0) -> None:
        self.store = store
        self.rank = rank
        self.others = [other for other in ranks if other != rank]
        self.timeout = timeout
        self.unlock()
        self.number = 0
        self.slots = [""] * SLOTS
        self.users: dict[str, weakref.WeakSet[threading.Thread]] = defaultdict(weakref.WeakSet)  # by digest

    def unlock(self) -> None:
        """Begins with locks that no thread holds: in a child of a fork, whose parent's threads may have held them."""
        self.lock = threading.RLock()
        self.moved = threading.Condition(self.lock)

    def made(self, digest: str) -> None:
        """Notes that this thread has made an executor of a program, and may call it."""
        with self.lock:
            self.users[digest].add(threading.current_thread())

    def begin(self, asked: Callable[[], Call], *, planned: bool) -> None:
        """Goes on where every rank that has got here makes the same call; the caller has the lock.

        `asked` gives the call, anew after other threads have had their turn: where one of them may be about to make the
        call that comes next, this one waits for it.

        Raises HostIRError, naming both calls, where they differ. It has the field `running` where the rank that came
        first had `planned`, and so may be in the midst of its call.
        """
        if not self.others:
            return
        deadline = time.monotonic() + self.timeout
        while True:
            call = asked()
            self.users[call.digest].add(threading.current_thread())
            mine = str(call)
            first, running, text = self._say(mine, planned)
            if text == mine:
                return self._move()
            theirs = Call.of(text)
            if theirs.refusal and call.is_by(theirs):
                self._move()
                what = f"rank {self.rank} does not run @{call.program}, because rank {first} does not"
                raise error(f"{what}: {theirs.refusal}")
            if not self._comes(theirs, deadline):
                self._move()
                said = told({first: theirs, self.rank: call})
                refused = error(f"the calls of the ranks do not line up: {said}", expected=ALIKE, hint=PAGE)
                refused.running = running  # type: ignore[attr-defined]
                raise refused

    def refuse(self, asked: Callable[[], Call]) -> bool:
        """Says that this rank does not make a call, when its turn has come; the caller has the lock.

        `asked` gives the call, as for `begin`. Returns whether another rank may be in the midst of it.
        """
        if not self.others:
            return False
        deadline = time.monotonic() + self.timeout
        while True:
            call = asked()
            _, running, text = self._say(str(call), planned=False)
            theirs = Call.of(text)
            if call.is_by(theirs) or not self._comes(theirs, deadline):
                self._move()
                return running

    def _say(self, mine: str, planned: bool) -> tuple[int, bool, str]:
        """What the first rank there has said of the next call, which rank that is, and whether it had planned it."""
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
        """The next call is another."""
        self.slots[self.number % SLOTS] = self.said
        self.number += 1
        self.moved.notify_all()

    def _comes(self, call: Call, deadline: float) -> bool:
        """Lets other threads call, where one of them may be about to make this call; whether one did call."""
        left = deadline - time.monotonic()
        return self._may_come(call) and left > 0 and self._moves(left)

    def _moves(self, seconds: float) -> bool:
        """Lets other threads call; whether one did within so many seconds."""
        number = self.number
        return self.moved.wait_for(lambda: self.number != number, seconds)

    def _may_come(self, call: Call) -> bool:
        """Whether a thread other than this one uses executors of the program, or may be about to make one."""
        users = self.users.get(call.digest) or [thread for thread in threading.enumerate() if not thread.daemon]
        return any(thread.is_alive() and thread is not threading.current_thread() for thread in users)

    def _keep_up(self) -> None:
        """Waits until every rank has read the slots that come next, half of all."""
        turn = self.number // (SLOTS // 2)
        self.store.set(f"turn/{self.rank}", str(turn))
        deadline = time.monotonic() + self.timeout
        for other in self.others if turn > 1 else ():
            while not self.store.check([f"turn/{other}"]) or int(self.store.get(f"turn/{other}")) < turn - 1:
                if time.monotonic() > deadline:
                    late = f"rank {self.rank} is {SLOTS // 2} calls ahead of rank {other}, which does not follow"
                    raise error(late, expected=ALIKE, hint=PAGE)
                time.sleep(0.005)


def is_running(refused: HostIRError) -> bool:
    """Whether a rank may be in the midst of a call that another refused."""
    return getattr(refused, "running", False)
