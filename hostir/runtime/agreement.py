"""What the ranks of an executor tell each other before they run something."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.runtime.calls import ALIKE, PAGE, Call, Calls, told
from hostir.runtime.plan import teams_of
from hostir.runtime.session import Session
from hostir.runtime.watchdog import headline

_turns = itertools.count()


class Agreement:
    """Ranks go on together or not at all: they compare what they are about to run for the first time.

    With `compare`, also each call. Without a session there is nobody to agree with.
    """

    def __init__(self, session: Session | None, program: Program, kernels: str, compare: bool) -> None:
        self.session = session
        self.calls = session.calls if session is not None else Calls()
        self.compare = compare and session is not None
        self.call = Call(program.name, program.digest if session is not None else "", None, (), kernels)
        self.calls.made(self.call.digest)
        self.program = program
        self.agreed: set[tuple[tuple[str, int], ...]] = set()  # sizes

    def begin(self, sizes: Mapping[str, int], *, planned: bool, places: bool = False) -> None:
        """Raises where ranks that have got to this call make another; the caller has the lock of the calls."""
        if not self.compare:
            return
        try:
            self.calls.begin(lambda: self.of(sizes, places), planned=planned)
        except HostIRError as refused:
            self._tell(refused, self.calls.number - 1)
            raise

    def refuse(self, refusal: HostIRError) -> bool:
        """Lets ranks that are about to compare what they run know that this one does not.

        Returns whether one is known to be in the midst of it.
        """
        running = self.compare and self.calls.refuse(lambda: replace(self.call, refusal=headline(refusal)))
        self._tell(refusal, self.calls.number - 1)
        return running

    def reach(self, sizes: Mapping[str, int]) -> None:
        """Raises on every rank where one refuses, or where programs, sizes or kernels differ."""
        bound = tuple(sorted(sizes.items()))
        if self.session is None or bound in self.agreed:
            return
        where = f"the call of @{self.program.name}" + "".join(f", {name}={size}" for name, size in bound)
        number, key = self._meeting(self.calls.number - 1)
        given = [Call.of(text) for text in self.session.exchange(key, str(self.of(sizes)), where=where)]
        what = f"rank {self.session.rank} does not run @{self.program.name}"
        if (refused := next((rank for rank, it in enumerate(given) if it.refusal), None)) is not None:
            raise error(f"{what}, because rank {refused} does not: {given[refused].refusal}")
        if any(it != given[0] for it in given):
            said = told(dict(enumerate(given)))
            raise error(f"{what}: {said}", expected=ALIKE, hint=PAGE)
        if self.call.executor is None:
            self.call = replace(self.call, executor=number)
        self.agreed.add(bound)
        self.session.groups.prepare(teams_of(self.program))

    def exchange(self, what: str, mine: str) -> list[str]:
        """What every rank gives of something else that they agree on."""
        if self.session is None:
            return [mine]
        key = f"executor {self.call.executor} of {self.call.digest}, {what}"
        return self.session.exchange(key, mine, where=f"@{self.program.name}, {what}")

    def of(self, sizes: Mapping[str, int], places: bool = False) -> Call:
        """A call of the executor with these sizes."""
        return replace(self.call, sizes=tuple(sorted(sizes.items())), places=places)

    def _tell(self, refusal: HostIRError, number: int) -> None:
        if self.session is not None:
            self.session.tell(self._meeting(number)[1], str(replace(self.call, refusal=headline(refusal))))

    def _meeting(self, number: int) -> tuple[int, str]:
        """Where ranks meet at a call: by its number, or where calls are not counted by how often they have met."""
        if self.compare:
            return number, f"call {number}"
        number = next(_turns)
        return number, f"agreement {number}"
