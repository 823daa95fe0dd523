"""Let the ranks of an executor agree on a call before they run it.

There are two ways to compare the call. At a meeting, all ranks wait for each other. Through the store, a rank compares
its call with a text that another rank has written there, and does not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError, error
from hostir.job.calls import Call, Calls, describe, in_backward
from hostir.job.groups import ANEW, Groups
from hostir.job.links import ALIKE, PAGE, headline
from hostir.plan.unroll import teams_of


class SessionRanks(Protocol):
    """The part of a `Session` that agreements use."""

    rank: int
    size: int
    store: Any
    calls: Calls
    groups: Groups
    meetings: Meetings

    def asking(self, where: str) -> AbstractContextManager[None]:
        """Return a context manager. Inside it, a failure of the store raises a HostIRError that names `where`."""

    def wait(self, arrived: Callable[[Sequence[int]], bool], where: str, *, note: Callable[[int], str] = ...) -> None:
        """Poll until all ranks have arrived. Raise a HostIRError that names the ranks that do not arrive in time.

        Args:
            arrived: returns True if all the given ranks have arrived.
            where: a description of the place where this rank waits, for messages.
            note: returns a note for the message about a rank that has not arrived; empty for no note.
        """


class RefusedError(HostIRError):
    """The error of a rank that does not run a call, because another rank has refused it."""


READ = "read "  # the prefix of a refusal that another rank has read


class Meetings:
    """The meetings of the ranks of a session, seen from one rank.

    The ranks meet before the first call of an executor with each kind of sizes (see `hostir.job.symmetric`). At a
    meeting, each rank writes its call to its slot in the store, and waits until all other ranks have written their
    calls.

    A rank that refuses a call writes the refusal to its slot. It may replace the refusal by another call until a rank
    that makes the refused call reads the refusal. Once such a rank has read the refusal, the meeting has failed for all
    ranks. A rank ignores a refusal of an earlier call that it has already run.

    If all calls are compared, there is a meeting for each call, and the meeting has the number of the call. Then a
    refusal cannot be replaced.

    Fields:
        number: the number of the next meeting.
        refusal: the refusal that this rank has written for the next meeting, or an empty string.
    """

    def __init__(self, session: SessionRanks) -> None:
        self.session = session
        self.number = 0
        self.refusal = ""

    def restart(self, number: int) -> None:
        """Continue with meeting `number`. All ranks call this with the same number."""
        self.number, self.refusal = number, ""

    def meet(self, call: Call, where: str, concerns: Callable[[Call], bool], numbered: bool) -> list[Call]:
        """Meet all ranks for a call; return the call that each rank makes, or its refusal.

        Raise a HostIRError that names the ranks that do not arrive.

        Args:
            call: the call of this rank.
            where: a description of the call, for messages.
            concerns: returns True if a refusal is a refusal of this call.
            numbered: True if all calls are compared. Then each call has a meeting with the number of the call.
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
        """Write the refusal of a call to the store, for the ranks that make the call."""
        with contextlib.suppress(dist.DistError):  # this rank's caller gets the refusal in any case
            self._post(call, numbered)

    def _post(self, call: Call, numbered: bool) -> str:
        """Write a call or a refusal to this rank's slot of the next meeting; return the key prefix of all slots."""
        store, rank, text = self.session.store, self.session.rank, str(call)
        if numbered:
            store.set(f"meeting of call {call.made}/{rank}", text)
            return f"meeting of call {call.made}"
        while store.compare_set(f"meeting {self.number}/{rank}", self.refusal, text).decode() != text:
            self.number += 1  # another rank has read the refusal there
            self.refusal = ""
        self.refusal = text if call.refusal else ""
        return f"meeting {self.number}"


class Agreement:
    """The agreement of all ranks on the calls of one executor, seen from one rank.

    The ranks compare the first call with each kind of sizes at a meeting. If the argument `compare` is True, they
    compare all calls. Without a session there are no other ranks, and nothing is compared.

    Fields:
        call: the data that all calls of the executor have in common.
        agreed: the kinds of sizes on which the ranks have agreed.
        made: the number of the executor's calls so far. It is not counted if all calls are compared.
        failed: two numbers about the latest call that failed: the number of earlier calls, and the number of failed
            attempts at this call.
    """

    def __init__(self, session: SessionRanks | None, program: Program, kernels: str, compare: bool) -> None:
        self.session = session
        self.calls = session.calls if session is not None else Calls()
        self.compare = compare and session is not None and session.size > 1
        self.call = Call(program.name, program.digest if session is not None else "", None, (), kernels)
        self.program = program
        self.agreed: set[Hashable] = set()
        self.made = 0
        self.failed = 0, 0
        self.latest: tuple[Any, Call] = None, self.call  # the latest result of `of`, and what it was made from

    def restart(self) -> None:
        """Forget all agreements, so that the ranks meet again for each kind of sizes. All ranks call this."""
        self.agreed.clear()
        self.call = replace(self.call, executor=None)  # some ranks may have finished its first call, others may not
        self.made, self.failed = 0, (0, 0)

    def begin(self, sizes: Mapping[str, int], *, planned: bool, places: bool = False) -> None:
        """If all calls are compared, compare this call with the calls of other ranks. Raise if the calls differ.

        The calling thread holds the lock of `calls`. No rank waits for another rank.

        Args:
            sizes: the values of all symbols.
            planned: True if the call has a plan. Then this rank runs the call next, without a meeting.
            places: True if the call only asks for the places of inputs (`Executor.places`).
        """
        if not self.compare:
            return
        try:
            self.calls.begin(self.of(sizes, places), planned=planned)
        except HostIRError as refused:
            self._announce(refused)
            raise

    def refuse(self, refusal: HostIRError) -> None:
        """Report to the other ranks that this rank does not run its next call. `refusal` is the reason."""
        if self.compare:
            self.calls.refuse(replace(self.call, refusal=headline(refusal)))
        self._announce(refusal)

    def reach(self, sizes: Mapping[str, int], kind: Hashable) -> None:
        """Agree with all ranks on a call whose sizes have no plan on this rank yet.

        If the ranks have not agreed on this kind of sizes, they meet. Every rank raises a HostIRError if a rank refuses
        the call, or if the programs, sizes or kernels of the ranks differ. If the ranks have agreed on this kind of
        sizes, this rank only compares its call through the store, without waiting.

        Args:
            sizes: the values of all symbols.
            kind: a key that is the same for all sizes that need only one meeting (see `hostir.job.symmetric`).
        """
        if self.session is None:
            return
        if kind in self.agreed:
            return self.calls.compare_new(self.of(sizes)) if not self.compare else None
        bound = tuple(sorted(sizes.items()))
        if broken := self.session.groups.broken:
            raise error(f"@{self.program.name} cannot run: {broken}", hint=ANEW)
        where = f"the call of @{self.program.name}" + "".join(f", {name}={size}" for name, size in bound)
        self.calls.visible = self.session.size > 1
        meetings, what = self.session.meetings, f"rank {self.session.rank} does not run @{self.program.name}"
        call, self.failed = self._counted(self.of(sizes)), (self._made(), self._tries() + 1)
        while True:
            posted = meetings.meet(call, where, partial(self._concerns, call), self.compare)
            most = max(it.tries for it in posted)
            calls = [replace(it, tries=0, thread="") for it in posted]
            if (refused := next((rank for rank, it in enumerate(posted) if it.refusal), None)) is not None:
                raise RefusedError(Diagnostic(f"{what}, because rank {refused} does not: {posted[refused].refusal}"))
            if all(it == calls[0] for it in calls):
                break
            if len({it.made for it in posted}) > 1 or all(it.tries == most for it in posted):
                difference = describe(dict(enumerate(calls)))
                raise error(f"{what}: {difference}", expected=ALIKE, hint=PAGE)
            if call.tries < most:
                first = next(rank for rank, it in enumerate(posted) if it.tries == most)
                raise error(f"{what}, because rank {first} does not: it has refused that call, and makes another")
            # The other ranks made a call that this rank has refused. It meets them again in their next call.
        if self.call.executor is None:
            self.call = replace(self.call, executor=self._made() if self.compare else meetings.number)
        self.session.groups.prepare(teams_of(self.program))
        self.agreed.add(kind)

    def of(self, sizes: Mapping[str, int], places: bool = False) -> Call:
        """Return the data of a call of the executor with these sizes, made by the current thread."""
        calls = self.calls
        thread, operator, backward = calls.name if self.compare else "", calls.operator, in_backward()
        data = self.call, sizes, places, thread, operator, backward
        if data != self.latest[0]:
            bound, call = tuple(sorted(sizes.items())), replace(self.call, thread=thread, operator=operator)
            self.latest = data, replace(call, sizes=bound, places=places, backward=backward)
        return self.latest[1]

    def _announce(self, refusal: HostIRError) -> None:
        if self.session is not None:
            self.session.meetings.refuse(self._counted(replace(self.call, refusal=headline(refusal))), self.compare)
            self.failed = self._made(), self._tries() + 1

    def _concerns(self, mine: Call, refusal: Call) -> bool:
        """Return True if the refusal of another rank concerns the call that this rank makes.

        Return False if the refusal concerns an earlier call, or an earlier attempt that has also failed on this rank.
        """
        same = refusal.made == mine.made and (self.compare or refusal.is_by(mine))
        return same and refusal.tries >= mine.tries

    def _counted(self, call: Call) -> Call:
        return replace(call, made=self._made(), tries=self._tries())

    def _tries(self) -> int:
        """Return the number of failed attempts at the executor's next call."""
        number, times = self.failed
        return times if number == self._made() else 0

    def _made(self) -> int:
        """Return the number of earlier calls of this executor, or of all executors if all calls are compared."""
        return self.calls.number - 1 if self.compare else self.made
