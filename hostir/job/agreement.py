"""Agreements: the ranks of an executor compare a call before they run it, at a meeting or through the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.job.calls import Call, Calls, describe, in_backward
from hostir.job.groups import ANEW, Groups
from hostir.job.links import ALIKE, PAGE, headline
from hostir.plan.unroll import teams_of


class SessionRanks(Protocol):
    """The ranks of a session, as their agreements see them."""

    rank: int
    size: int
    store: Any
    calls: Calls
    groups: Groups
    meetings: Meetings

    def asking(self, where: str) -> AbstractContextManager[None]:
        """Name the statement to peers while this rank asks the store."""

    def wait(self, arrived: Callable[[Sequence[int]], bool], where: str, *, note: Callable[[int], str] = ...) -> None:
        """Wait until `arrived` holds for all ranks; raise HostIRError for ranks that do not come."""


READ = "read "  # before a refusal that another rank has read


class Meetings:
    """The meetings of a job's ranks: they meet before each call with a kind of sizes that is new to an executor.

    Each rank posts its call in its slot, and waits for the calls of the others. A rank that refuses a call posts the
    refusal instead. It may replace the refusal by a call until another rank that makes the refused call has read it.
    From then on the meeting has failed for all ranks. Refusals of earlier calls, which the others have run, are not
    read.

    If all calls are compared, calls have numbers, and each call has its own meeting. A refusal is then final.

    Fields:
        number: the number of the next meeting.
        refusal: this rank's refusal in the next meeting; empty if it has refused nothing.
    """

    def __init__(self, session: SessionRanks) -> None:
        self.session = session
        self.number = 0
        self.refusal = ""

    def restart(self, number: int) -> None:
        """Count meetings from `number` on, as all ranks do."""
        self.number, self.refusal = number, ""

    def meet(self, call: Call, where: str, concerns: Callable[[Call], bool], numbered: bool) -> list[Call]:
        """Return every rank's call, or its refusal; `concerns` returns True for a refusal of this call.

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
    """The agreement of all ranks on an executor's calls: they compare the first call with each kind of sizes.

    With `compare` they compare every call. Without a session there are no other ranks, and nothing is compared.

    Fields:
        made: the number of the executor's calls so far, if calls are not compared.
    """

    def __init__(self, session: SessionRanks | None, program: Program, kernels: str, compare: bool) -> None:
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
        self.call = replace(self.call, executor=None)  # some ranks may have ended its first call, and others not
        self.made, self.failed = 0, (0, 0)

    def begin(self, sizes: Mapping[str, int], *, planned: bool, places: bool = False) -> None:
        """Raise if another rank that has reached this call makes a different one; the caller holds the calls' lock.

        `planned`: True if the call has a plan, so that this rank runs it next without a meeting.
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
        """Meet the other ranks; raise on every rank if one refuses, or if programs, sizes or kernels differ.

        Ranks meet once for each kind of sizes. Sizes new to this rank, but not to the group, are compared with the
        calls that earlier ranks posted.
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
                raise error(f"{what}, because rank {refused} does not: {posted[refused].refusal}")
            if all(it == calls[0] for it in calls):
                break
            if len({it.made for it in posted}) > 1 or all(it.tries == most for it in posted):
                difference = describe(dict(enumerate(calls)))
                raise error(f"{what}: {difference}", expected=ALIKE, hint=PAGE)
            if call.tries < most:
                first = next(rank for rank, it in enumerate(posted) if it.tries == most)
                raise error(f"{what}, because rank {first} does not: it has refused that call, and makes another")
            # the others were in a call that this rank has refused: it meets them again in their next call
        if self.call.executor is None:
            self.call = replace(self.call, executor=self._made() if self.compare else meetings.number)
        self.session.groups.prepare(teams_of(self.program))
        self.agreed.add(kind)

    def of(self, sizes: Mapping[str, int], places: bool = False) -> Call:
        """Return a call of the executor with these sizes."""
        bound, calls = tuple(sorted(sizes.items())), self.calls
        thread = calls.name if self.compare else ""
        call = replace(self.call, sizes=bound, places=places, thread=thread)
        return replace(call, operator=calls.operator, backward=in_backward())

    def _announce(self, refusal: HostIRError) -> None:
        if self.session is not None:
            self.session.meetings.refuse(self._counted(replace(self.call, refusal=headline(refusal))), self.compare)
            self.failed = self._made(), self._tries() + 1

    def _concerns(self, mine: Call, refusal: Call) -> bool:
        """Return True if a refusal is of the call that this rank makes, not of one that has failed here as well."""
        same = refusal.made == mine.made and (self.compare or refusal.is_by(mine))
        return same and refusal.tries >= mine.tries

    def _counted(self, call: Call) -> Call:
        return replace(call, made=self._made(), tries=self._tries())

    def _tries(self) -> int:
        """Return the number of failed attempts at the executor's next call."""
        number, times = self.failed
        return times if number == self._made() else 0

    def _made(self) -> int:
        """Return the number of earlier calls: of the job if calls are compared, else of the executor."""
        return self.calls.number - 1 if self.compare else self.made
