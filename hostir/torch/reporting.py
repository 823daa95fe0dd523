"""Record the calls of operators on this rank, and report them.

The report says how often each operator was called, which strategies ran, and why these strategies were chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hostir.call.executor import Executor
from hostir.choice import Candidate, Choice
from hostir.choice.overlaps import overlap_clauses
from hostir.ir.source import amount, counted


@dataclass(frozen=True)
class Ran:
    """A row of the report: the calls of one operator on one group by one strategy.

    Fields:
        operator: the name of the operator, such as `symm_mem::fused_all_gather_matmul`.
        group: the name of the process group.
        strategy: the strategy of the program that ran, with its streams and kernels. `torch` if torch's function ran.
        calls: the number of calls.
        why: clauses that explain the strategy: what the program overlaps, why it was chosen, and why other candidates
            were not chosen. If torch's function ran, the reason why hostir could not run the call.
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
    """A report: a tuple of its rows, which are `Ran`. `print` shows a paragraph for each row.

    Fields:
        symmetric_bytes: the bytes of symmetric memory that hostir's programs hold on this rank, by the group's name.
    """

    symmetric_bytes: Mapping[str, int] = MappingProxyType({})

    def __str__(self) -> str:
        held = (
            f"group '{name}' holds {amount(n)} of symmetric memory on this rank"
            for name, n in self.symmetric_bytes.items()
            if n
        )
        return "\n".join([*map(str, self), *held]) or "no operator has been called"


@dataclass
class Ledger:
    """Counters of the calls of operators in this process since the last `clear`.

    Fields:
        by_hostir: calls that hostir ran. A key has the operator, the group's name, the executor that was called, the
            executor of the candidate for plain calls, and a bool that is True if the call was started asynchronously.
        by_torch: calls that were left to torch. A key has the operator, the group's name, and the reason.
        cleared: the number of hostir's calls before the last `clear`, by operator and group.
    """

    by_hostir: Counter[tuple[str, str, Executor, Executor, bool]] = field(default_factory=Counter)
    by_torch: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    cleared: Counter[tuple[str, str]] = field(default_factory=Counter)

    def ran(self, operator: str, group: str, executor: Executor, started: bool = False) -> None:
        """Count a call that `executor` has just run, or has started asynchronously if `started`."""
        self.by_hostir[operator, group, executor, getattr(executor, "current", executor), started] += 1

    def left(self, operator: str, group: str, why: str) -> None:
        """Count a call that was left to torch. `why` is the reason."""
        self.by_torch[operator, group, why] += 1

    def calls(self) -> Counter[tuple[str, str]]:
        """Return the number of calls that hostir has run in this process, by operator and group.

        The numbers include calls before the last `clear`.
        """
        counts = Counter(self.cleared)
        for (operator, group, *_), n in list(self.by_hostir.items()):
            counts[operator, group] += n
        return counts

    def clear(self) -> None:
        """Start a new report: drop the recorded calls."""
        self.cleared = self.calls()
        self.by_hostir.clear()
        self.by_torch.clear()

    def report(self) -> Report:
        """Return the report. Calls with the same operator, group and strategy share one row."""
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
        operators = list(dict.fromkeys((op, group) for op, group, _ in counts))
        order = sorted(counts, key=lambda row: operators.index(row[:2]))
        result = Report(Ran(*name, counts[name], tuple(reasons[name])) for name in order)
        sessions = {group: executor.session for _, group, executor, *_ in self.by_hostir}
        result.symmetric_bytes = {group: it.symmetric_bytes for group, it in sessions.items() if it is not None}
        return result


LEDGER = Ledger()


def report(*, clear: bool = False) -> Report:
    """Return a report of the calls of operators on this rank, which includes the calls that were left to torch.

    The report is a tuple with a row for each operator, group and strategy. A row has the fields `operator`, `group`,
    `strategy`, `calls` (the number of calls) and `why` (the reasons for the strategy). `print` shows the report as
    text. The report's field `symmetric_bytes` is the number of bytes of symmetric memory that each group holds, by the
    group's name.

    Args:
        clear: True to start a new report after this one.
    """
    result = LEDGER.report()
    if clear:
        LEDGER.clear()
    return result


def explained(executor: Executor, ran: Executor, started: bool) -> tuple[str, tuple[str, ...]]:
    """Return the strategy of the program that ran, and clauses that explain the choice.

    Args:
        executor: the executor that was called; it chooses among candidates.
        ran: the executor of the candidate that ran.
        started: True if the call was started asynchronously.
    """
    call = ran.latest
    overlapping = () if call is None else overlap_clauses(call.plan.unrolled)
    if started and ran.machine == "cuda":  # on other machines a call has ended when `start` returns
        overlapping = (*overlapping, "it was started beside the computations that its operator issued next")
    choices: Sequence[Choice] = getattr(executor, "called", None) or [executor.choice]
    executors: Mapping[Candidate, Executor] = getattr(executor, "executors", {})
    candidate = next((c for c, each in executors.items() if each is ran), choices[0].taken)
    reasons = [c for c in choices if c.taken == candidate] or [choices[0]]
    why = [clause for c in reasons for clause in (f"{c.source} on {c.machine}{_times(c)}", *overlapping, *c.notes)]
    why += [f"left out: '{it.candidate}': {it.reason}" for c in reasons for it in c.impossible]
    return str(candidate), tuple(dict.fromkeys(why))


def _times(choice: Choice) -> str:
    """Return the times of the candidates of a choice, the fastest first, or an empty text."""
    times = ", ".join(f"'{timing.candidate}' {timing.us:.0f} us" for timing in choice.timings)
    return f"{', the fastest first' * (len(choice.timings) > 1)}: {times}" if times else ""
