"""The plans of an executor, and what the device says of those that are not the latest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hostir.ir.source import Diagnostic, HostIRError
from hostir.runtime.cuda import CudaPlan
from hostir.runtime.gloo import GlooPlan
from hostir.runtime.graphs import is_stale

Plan = CudaPlan | GlooPlan
KEPT = 128  # plans: where shapes never repeat, they must not pile up


class Plans(dict[tuple[Any, ...], Plan]):
    """Plans by how their inputs look, the latest used last.

    A kernel that waits for a peer may give up long after its call was made, when other plans run, or when its own has
    gone. So each call asks its own plan and one of all, in turn. All are asked when another plan is made, which takes
    longer than that, and one that made room stays at hand until the device is done with it and another is made.

    Fields:
        captured: those that graphs of the caller's use: they stay, since their tables must.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: set[CudaPlan] = set()
        self.leaving: list[tuple[CudaPlan, torch.cuda.Event]] = []  # made room; each with what comes behind its calls
        self.unsaid: list[Diagnostic] = []  # reported, and not raised so far
        self.turns: Iterator[CudaPlan] = iter(())

    def keep(self, key: tuple[Any, ...], plan: Plan) -> None:
        """Adds the plan that runs next; what was not used longest leaves where there are too many."""
        self[key] = plan
        if len(self) > KEPT:
            oldest = self.pop(next(iter(self)))
            if isinstance(oldest, CudaPlan) and oldest.reports:
                self.leaving.append((oldest, oldest.behind()))

    def sweep(self) -> None:
        """After another was made, or refused: asks all, and drops those that the device is done with.

        Those are leaving ones, and all whose symmetric memory has gone, for which the device was waited for. Asks for
        events, so it must not be called in a capture.
        """
        stay = [(plan, behind) for plan, behind in self.leaving if not (behind.query() or is_stale(plan))]
        heard = _diagnostics(plan.problem() for plan in self.everyone())
        self.unsaid = [*dict.fromkeys([*self.unsaid, *heard])]
        for key in [key for key, plan in self.items() if is_stale(plan)]:
            del self[key]
        self.leaving, self.turns = stay, iter(())

    def look(self, plan: CudaPlan) -> HostIRError | None:
        """What is reported of the plan that runs next, of the one whose turn it is, and was of all that have gone."""
        said = plan.problem()
        other = next(self.turns, None)
        if other is None:
            if len(self) > 1 or self.captured or self.leaving:
                self.turns = iter(self.everyone())
        elif said is None:
            said = other.problem()
        return None if said is None and not self.unsaid else self.said([said])

    def problem(self) -> HostIRError | None:
        """What the device has reported by now of any of them."""
        return self.said(plan.problem() for plan in self.everyone())

    def said(self, problems: Iterable[HostIRError | None]) -> HostIRError | None:
        """These, and what is unsaid, as one."""
        found, self.unsaid = dict.fromkeys([*self.unsaid, *_diagnostics(problems)]), []
        return HostIRError(*found) if found else None  # a broken machine says the same of all plans

    def everyone(self) -> list[CudaPlan]:
        """Each plan that the device may report something of."""
        plans = [*self.values(), *self.captured, *(plan for plan, _ in self.leaving)]
        return list(dict.fromkeys(plan for plan in plans if isinstance(plan, CudaPlan)))


def _diagnostics(problems: Iterable[HostIRError | None]) -> list[Diagnostic]:
    return [each for problem in problems if problem is not None for each in problem.diagnostics]
