"""The report: which operators ran on this rank, how often, by which strategy, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hostir.call.executor import Executor
from hostir.choice import Choice
from hostir.choice.overlaps import overlap_clauses
from hostir.ir.source import amount, counted


@dataclass(frozen=True)
class Ran:
    """Calls of one operator on one group that ran alike.

    Fields:
        operator: its name, such as `symm_mem::fused_all_gather_matmul`.
        group: the name of the process group.
        strategy: the strategy of the program that ran, with its streams and kernels; `torch` if torch's function ran.
        calls: the number of calls.
        why: the overlaps of the program, why this program was chosen, and why the others were not.
    """

    operator: str
    group: str
    strategy: str
    calls: int
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.operator} on group '{self.group}': {self.strategy}, {counted(self.calls, 'call')}"
        return "\n".join([head, *(f"  {clause}" for clause in self.why)])


class Report(tuple[Ran, ...]):
    """The operators that ran on this rank, how and why; `print` shows a paragraph for each.

    Fields:
        symmetric_bytes: the symmetric memory that the programs of each group hold on this rank, by the group's name.
    """

    symmetric_bytes: Mapping[str, int] = MappingProxyType({})

    def __str__(self) -> str:
        held = (
            f"group '{name}' holds {amount(n)} of symmetric memory" for name, n in self.symmetric_bytes.items() if n
        )
        return "\n".join([*map(str, self), *held]) or "no operator has been called"


@dataclass
class Ledger:
    """The calls of this process, counted by operator, by the name of the group, and by what ran or why torch did.

    The last part of a key of `by_hostir` is True for calls that were started beside the operator's next computations.
    """

    by_hostir: Counter[tuple[str, str, Executor, Executor, bool]] = field(default_factory=Counter)
    by_torch: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    cleared: Counter[tuple[str, str]] = field(default_factory=Counter)  # hostir's calls before the last `clear`

    def ran(self, operator: str, group: str, executor: Executor, started: bool = False) -> None:
        """Record a call that an executor has just run, or has `started` beside the next computations."""
        self.by_hostir[operator, group, executor, getattr(executor, "current", executor), started] += 1

    def left(self, operator: str, group: str, why: str) -> None:
        """Record a call that was left to torch."""
        self.by_torch[operator, group, why] += 1

    def calls(self) -> Counter[tuple[str, str]]:
        """Return the number of calls that hostir has run in this process, by operator and group; `clear` keeps it."""
        counts = Counter(self.cleared)
        for (operator, group, *_), n in list(self.by_hostir.items()):
            counts[operator, group] += n
        return counts

    def clear(self) -> None:
        """Start a new report."""
        self.cleared = self.calls()
        self.by_hostir.clear()
        self.by_torch.clear()

    def report(self) -> Report:
        """Return the report; calls that ran alike share one row."""
        counts: Counter[tuple[str, str, str]] = Counter()
        reasons: dict[tuple[str, str, str], dict[str, None]] = {}
        rows = [
            ((op, group, *explained(executor, ran, started)), n)
            for (op, group, executor, ran, started), n in self.by_hostir.items()
        ]
        rows += [((op, group, "torch", (why,)), n) for (op, group, why), n in self.by_torch.items()]
        for (operator, group, strategy, why), count in rows:
            counts[operator, group, strategy] += count
            reasons.setdefault((operator, group, strategy), {}).update(dict.fromkeys(why))
        result = Report(Ran(*name, count, tuple(reasons[name])) for name, count in counts.items())
        sessions = {group: executor.session for _, group, executor, *_ in self.by_hostir}
        result.symmetric_bytes = {group: it.symmetric_bytes for group, it in sessions.items() if it is not None}
        return result


LEDGER = Ledger()


def report(*, clear: bool = False) -> Report:
    """Return the operators that ran on this rank, how often, by which strategy, and why; also calls left to torch.

    A tuple with a row for each operator, group and strategy (fields `operator`, `group`, `strategy`, `calls`, `why`);
    `print` shows it as text. Its `symmetric_bytes` are the bytes that each group holds, by name. `clear` starts anew.
    """
    result = LEDGER.report()
    if clear:
        LEDGER.clear()
    return result


def explained(executor: Executor, ran: Executor, started: bool) -> tuple[str, tuple[str, ...]]:
    """Return the strategy of the program that ran, and the reasons for it and against the others."""
    choice, call = executor.choice, ran.latest
    overlapping = () if call is None else overlap_clauses(call.plan.unrolled)
    if started and ran.machine == "cuda":  # on other machines a call has ended when `start` returns
        overlapping = (*overlapping, "it was started beside the computations that its operator issued next")
    if isinstance(choice, Choice):
        return str(choice.taken), (f"{choice.source} on {choice.machine}", *overlapping, *choice.notes)
    taken = next(candidate for candidate, each in executor.executors.items() if each is ran)  # type: ignore[attr-defined]
    choices = [c for c in choice.choices.values() if c.taken == taken] or list(choice.choices.values())
    why = [clause for c in choices for clause in (f"{c.source} on {c.machine}", *overlapping, *c.notes)]
    why += [f"not {it.candidate}: {it.reason}" for c in choices for it in c.impossible]
    why += [
        f"not {it.candidate}: estimated or measured slower"
        for c in choices
        for it in c.timings
        if it.candidate != taken
    ]
    return str(taken), tuple(dict.fromkeys(why))
