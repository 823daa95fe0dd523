"""What the ranks of an executor tell each other before they run something for the first time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.runtime.plan import teams_of
from hostir.runtime.session import Session
from hostir.runtime.watchdog import headline


class Agreement:
    """Ranks go on together or not at all: they compare what they are about to run for the first time.

    `number` is that of the executor, the same on every rank. Without a session there is nobody to agree with.
    """

    def __init__(self, session: Session | None, number: int, program: Program, kernels: str) -> None:
        self.session = session
        self.number = number
        self.program = program
        self.kernels = kernels
        self.agreed: set[tuple[tuple[str, int], ...]] = set()  # sizes
        self.turns = itertools.count()

    def refuse(self, refusal: HostIRError) -> None:
        """Lets ranks that are about to compare what they run know that this one does not."""
        if self.session is not None:
            self.session.tell(self._next(), json.dumps({"refusal": headline(refusal)}))

    def reach(self, sizes: Mapping[str, int]) -> None:
        """Raises on every rank where one refuses, or where programs, sizes or kernels differ."""
        bound = tuple(sorted(sizes.items()))
        if self.session is None or bound in self.agreed:
            return
        mine = {"digest": self.program.digest, "sizes": dict(sizes), "kernels": self.kernels}
        theirs = [json.loads(text) for text in self.session.exchange(self._next(), json.dumps(mine))]
        what = f"rank {self.session.rank} does not run @{self.program.name}"
        if (refused := next((rank for rank, it in enumerate(theirs) if "refusal" in it), None)) is not None:
            raise error(f"{what}, because rank {refused} does not: {theirs[refused]['refusal']}")
        if any(it != theirs[0] for it in theirs):
            raise error(
                f"{what}: the ranks run different programs",
                expected="one program, with the same sizes and kernels, on every rank",
                notes=tuple((None, _group(theirs, it)) for i, it in enumerate(theirs) if it not in theirs[:i]),
            )
        self.agreed.add(bound)
        self.session.groups.prepare(teams_of(self.program))

    def exchange(self, what: str, mine: str) -> list[str]:
        """What every rank gives of something else that they agree on."""
        return [mine] if self.session is None else self.session.exchange(f"executor {self.number}, {what}", mine)

    def _next(self) -> str:
        return f"executor {self.number}, agreement {next(self.turns)}"


def _group(all: Sequence[dict[str, Any]], one: dict[str, Any]) -> str:
    ranks = ", ".join(str(rank) for rank, it in enumerate(all) if it == one)
    sizes = "".join(f", {name}={size}" for name, size in sorted(one["sizes"].items()))
    return f"rank {ranks}: digest {one['digest']}, kernels {one['kernels']}{sizes}"
