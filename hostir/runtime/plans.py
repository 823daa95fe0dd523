"""The plans of an executor, and what the device says of those that no longer run."""

from __future__ import annotations

from collections import deque
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
    gone. Whatever it reports is raised: each call asks its own plan and one other, in turn, and a plan that goes is
    asked once the device is done with it.

    Fields:
        captured: those that graphs of the caller's use: they stay, since their tables must.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: set[CudaPlan] = set()
        self.leaving: deque[tuple[CudaPlan, torch.cuda.Event]] = deque()  # each with what comes behind its last call
        self.unsaid: list[Diagnostic] = []  # what was reported of plans that have gone
        self.turns: Iterator[Plan] = iter(())

    def keep(self, key: tuple[Any, ...], plan: Plan) -> None:
        """Adds the plan that runs next; what was not used longest leaves where there are too many."""
        self[key] = plan
        if len(self) > KEPT:
            oldest = self.pop(next(iter(self)))
            self.turns = iter(())
            if isinstance(oldest, CudaPlan) and oldest.reports:
                self.leaving.append((oldest, oldest.behind()))

    def drop_stale(self) -> None:
        """Drops those whose symmetric memory has gone, for which the device was waited for."""
        stale = [self.pop(key) for key in [key for key, plan in self.items() if is_stale(plan)]]
        stale += [plan for plan, _ in self.leaving if is_stale(plan)]
        self.leaving = deque(each for each in self.leaving if not is_stale(each[0]))
        self.turns = iter(())
        self.unsaid += _reported(stale)

    def problem(self) -> HostIRError | None:
        """What the device has reported by now of any of them."""
        return self.reported_of(self.everyone())

    def look(self, plan: CudaPlan, capturing: bool) -> HostIRError | None:
        """What it has reported of the plan that runs next, and of one other, unless a capture forbids to ask for it."""
        other = None if capturing else next(self.turns, None)
        if other is None and not capturing and (len(self) > 1 or self.leaving):
            self.turns = iter(self.everyone())
            while self.leaving and self.leaving[0][1].query():
                self.leaving.popleft()  # which has its turn once more
        return self.reported_of((plan,) if other is None else (plan, other))

    def everyone(self) -> list[Plan]:
        return list(dict.fromkeys([*self.values(), *self.captured, *(plan for plan, _ in self.leaving)]))

    def reported_of(self, plans: Iterable[Plan]) -> HostIRError | None:
        """What is reported of some plans, and of those that have gone: once."""
        found, self.unsaid = [*self.unsaid, *_reported(plans)], []
        return HostIRError(*found) if found else None


def _reported(plans: Iterable[Plan]) -> list[Diagnostic]:
    problems = (plan.problem() for plan in plans if isinstance(plan, CudaPlan))
    found = [each for problem in problems if problem is not None for each in problem.diagnostics]
    return list(dict.fromkeys(found))  # of a machine that is broken all plans say the same
