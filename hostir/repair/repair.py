"""Repair host programs: insert the least synchronisation that leaves no findings; report redundant synchronisation.

The repair is a best-first search over edits that findings suggest. An insertion can only lengthen the chains of work
of a program, never shorten them. So a program that already costs more than a repaired one is dropped (branch and
bound). At the end, each insertion that turns out not to be needed is removed. Two events on one rank get the order in
which they are issued, as in a repair by hand.
"""

from __future__ import annotations

import difflib
import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from hostir.check.findings import Finding
from hostir.check.ordering.order import Order
from hostir.check.proof import analyse
from hostir.check.structure import check_structure
from hostir.check.tracing.events import Event
from hostir.check.tracing.memory import Buffer
from hostir.ir.host_ops import Synchronize
from hostir.ir.op import Codec, Lit, Phase, Statement, Sync
from hostir.ir.program import Program, format_statement
from hostir.ir.regions import Region
from hostir.ir.source import Diagnostic, HostIRError, error
from hostir.repair.insertions import for_finding, for_handles, for_leaks, repairable
from hostir.repair.places import Block, Edit, Edits, Outline, edited, names_stream, without
from hostir.repair.streams import resets, with_callers_stream

MAX_CANDIDATES = 250  # the most programs that one repair checks
MAX_MORE_CANDIDATES = 12  # the most programs checked after the first one without findings
UNSOUND = 1_000_000  # the weight of a finding about structure, which hides all others
UNMET = 10_000  # the weight of a finding about waits and signals, which hides findings about memory

Cost = tuple[int, int, int]


@dataclass(frozen=True)
class RepairCandidate:
    """A program that was checked during a repair, with its findings and its cost.

    Fields:
        cost: the result of `cost`; zeros if unknown.
        added: the insertions so far, edit by edit.
    """

    program: Program
    findings: list[Diagnostic]
    order: Order | None = None
    cost: Cost = (0, 0, 0)
    added: tuple[Block, ...] = field(default=(), compare=False)

    @property
    def severity(self) -> int:
        """The sum of the weights of all findings."""
        return sum(_weight(f) for f in self.findings)


@dataclass(frozen=True)
class Repairer:
    """Checks and searches the candidates of one repair; holds the sizes and calls that they share."""

    sizes: Mapping[str, int] | None
    calls: int | None

    def checked(self, program: Program, added: tuple[Block, ...] = ()) -> RepairCandidate:
        """Check a program, and return it with its findings and its cost."""
        if unsound := check_structure(program):
            return RepairCandidate(program, unsound, added=added)
        analysis = analyse(program, self.sizes, self.calls)
        if analysis.order is None:
            return RepairCandidate(program, analysis.findings, added=added)
        return RepairCandidate(program, analysis.findings, analysis.order, cost(program, analysis.order), added)

    def without_leaks(self, program: Program, added: tuple[Block, ...]) -> RepairCandidate:
        """Check a program. If buffers leak in it, insert frees and check again."""
        after = self.checked(program, added)
        if leaks := {f.buffer for f in after.findings if isinstance(f, Finding) and f.category == "leak"}:
            frees = for_leaks(Outline(program), leaks)
            after = self.checked(edited(program, frees), (*added, *(edit.new for edit in frees)))
        return after

    def search(self, start: RepairCandidate) -> RepairCandidate | None:
        """Return the cheapest candidate without findings, or None."""
        best, turn, budget = None, count(), MAX_CANDIDATES
        todo = [(start.severity, start.cost, next(turn), start)]
        seen = {start.program}
        while todo and budget > 0:
            candidate = heapq.heappop(todo)[-1]
            if best is not None and (candidate.cost >= best.cost or candidate.severity == start.severity):
                continue
            for edits in suggestions(candidate):
                program = edited(candidate.program, edits)
                if program in seen:
                    continue
                seen.add(program)
                budget -= 1
                after = self.without_leaks(program, (*candidate.added, *(edit.new for edit in edits if edit.new)))
                if best is not None and after.cost >= best.cost:
                    continue
                if after.order is not None and not after.findings and not loses(after.order):
                    best, budget = after, min(budget, MAX_MORE_CANDIDATES)
                elif after.findings and after.severity <= candidate.severity:
                    heapq.heappush(todo, (after.severity, after.cost, next(turn), after))
        return best

    def trimmed(self, candidate: RepairCandidate, before: RepairCandidate) -> RepairCandidate:
        """Remove inserted statements that are not needed, then statements that the repair has made redundant."""
        known = {f.message for f in before.findings}
        for piece in candidate.added:
            shorter = self.removed(candidate, piece)
            if not shorter.findings and shorter.cost <= candidate.cost:
                candidate = shorter
        for join in [s for piece in candidate.added for s in piece if s.bodies]:
            candidate = self.narrowed(candidate, join)
        for unit in _units(before.program):
            if unit[0].flag_operands or (shorter := self.removed(candidate, unit)).findings:
                continue
            if shorter.program == candidate.program or not _same_streams(candidate.program, unit):
                continue
            if any(f.message not in known for f in self.removed(before, unit).findings):
                candidate = shorter
        return candidate

    def narrowed(self, candidate: RepairCandidate, join: Statement) -> RepairCandidate:
        """Replace a wait for all pool streams by a wait for one of them, if that is enough."""
        waits = all(s.orders is Sync.STREAMS for body in join.bodies for s in body)
        if not waits or all(s is not join for s in candidate.program.walk()):
            return candidate
        place = Outline(candidate.program).place(join)
        for stream in range(candidate.program.streams):
            edit = Edit(place, (Synchronize(stream=Lit(stream)),), drop=1)
            narrower = self.checked(edited(candidate.program, (edit,)))
            if not narrower.findings and narrower.cost < candidate.cost:
                return narrower
        return candidate

    def removed(self, candidate: RepairCandidate, piece: Block) -> RepairCandidate:
        """Check a candidate's program without the statements of `piece`."""
        return self.checked(candidate.program.with_body(without(candidate.program.body, piece)))


def repair(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Program:
    """Insert into a program the least synchronisation, and the frees, with which `check` finds nothing.

    The best repair has the shortest chain of work (computations, communications and copies, each counted as one) over
    all ranks and calls; then the fewest waits; then the fewest statements. A wait, a free or a synchronize that comes
    too late is moved. A wait for a flag without a signal, or a signal without a wait, gets its counterpart if one
    statement is enough. Otherwise the wait becomes a barrier, or is removed.

    Args:
        program: a host program.
        sizes: values of symbols, as for `check`.
        calls: how many successive calls to check; by default enough to show the errors of any number of calls.

    Raises:
        HostIRError: with the findings that no insertion repairs, and what to do about them.
    """
    repairer = Repairer(sizes, calls)
    _check_phase(program)
    if not (first := repairer.checked(program)).findings:
        return program
    if refused := [f for f in first.findings if not _may_be_repaired(f, first)]:
        raise HostIRError(*(_unrepaired("no insertion repairs this", f) for f in refused))
    start = repairer.without_leaks(with_callers_stream(program), ())
    best = start if not start.findings else repairer.search(start)
    if best is None:
        raise HostIRError(*(_unrepaired("no repair was found for this", f) for f in first.findings))
    return _without_unused(repairer.trimmed(best, start).program, program)


def difference(before: Program, after: Program) -> str:
    """Return a unified diff of two programs' texts. Both file names are the name of the first program's file."""
    spans = [s.span for s in before.walk() if s.span is not None]
    name = spans[0].file if spans else f"{before.name}.hir"
    old, new = str(before).splitlines(keepends=True), str(after).splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, name, name))


def redundant(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> list[Diagnostic]:
    """Return warnings about synchronisation that can all be removed together without any new finding.

    Candidates are synchronises, waits, barriers, signals, and loops that contain nothing else. They are tried in
    program order, outer before inner.
    """
    repairer = Repairer(sizes, calls)
    _check_phase(program)
    known = {f.message for f in repairer.checked(program).findings}
    warnings: list[Diagnostic] = []
    for unit in _units(program):
        body = without(program.body, unit)
        if body == program.body or not _same_streams(program, unit):
            continue
        if all(f.message in known for f in repairer.checked(program.with_body(body)).findings):
            warnings.append(_redundant(unit, program))
            program = program.with_body(body)
    return warnings


def cost(program: Program, order: Order) -> Cost:
    """Return the events in the longest chain of work, the number of waits over all ranks, and of statements."""
    statements = list(program.walk())
    waits = {id(s): s.waits for s in statements}
    return longest_chain(order), sum(waits.get(id(event.statement), 0) for event in order.events), len(statements)


def longest_chain(order: Order) -> int:
    """Return the length of the longest chain of computations, communications and copies, over all ranks and calls."""
    chain: dict[Event, int] = {}
    for event in _in_order(order):
        chain[event] = max((chain[before] for before in event.after), default=0) + _work(event)
    return max(chain.values(), default=0)


def loses(order: Order) -> bool:
    """Return True if a part of a symmetric buffer is overwritten before its earlier value is read.

    A part that nothing ever reads does not count. Between ranks, a repair has to choose which access comes first. It
    might choose an order that has no race, but loses values. On one rank the order of issue decides.
    """
    fresh: dict[Buffer, set[Region]] = {buffer: set() for rank in order.ranks for buffer in rank.kept.values()}
    read: dict[Buffer, set[Region]] = {buffer: set() for buffer in fresh}
    lost: dict[Buffer, set[Region]] = {buffer: set() for buffer in fresh}
    for event in _in_order(order):
        for access in event.accesses:
            peers = order.ranks[access.rank].kept if access.rank >= 0 else {}
            buffer = peers.get(access.buffer.name, access.buffer)
            if buffer not in fresh:
                continue
            if access.does == "undefines":
                continue
            if not access.writes:
                read[buffer].add(access.region)
                fresh[buffer] = {region for region in fresh[buffer] if not region.meets(access.region)}
                continue
            if access.region in fresh[buffer]:
                lost[buffer].add(access.region)
            fresh[buffer].add(access.region)
    return any(region.meets(other) for buffer in lost for region in lost[buffer] for other in read[buffer])


def _in_order(order: Order) -> Iterator[Event]:
    """Yield all events in an order that follows the edges, except those in cycles."""
    missing = {event: len(event.after) + len(event.held) for event in order.events}
    followers = order.followers()
    ready = deque(event for event, n in missing.items() if not n)
    while ready:
        event = ready.popleft()
        yield event
        for follower in followers.get(event, ()):
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)


def _work(event: Event) -> bool:
    """Return True if an event completes the result of its statement; for a computation by blocks, the last event."""
    s = event.statement
    if s is not None and any(use.rows for use in s.flag_operands):
        return event.verb == "ends"
    return s is not None and any(a.does == "writes" for a in event.accesses)


def suggestions(candidate: RepairCandidate) -> Iterator[Edits]:
    """Yield edits for the first repairable finding."""
    outline, order = Outline(candidate.program), candidate.order
    if order is None:
        yield from for_handles(outline)
        return
    findings = [f for f in candidate.findings if isinstance(f, Finding) and f.category != "leak"]
    if first := next((f for f in findings if repairable(f, order)), None):
        yield from for_finding(first, outline, order)


def _weight(finding: Diagnostic) -> int:
    """Return the severity of a finding: the more other findings it may hide, the higher."""
    if not isinstance(finding, Finding):
        return UNSOUND
    return finding.times if finding.category in ("race", "leak", "unwritten") else UNMET * finding.times


def _may_be_repaired(finding: Diagnostic, candidate: RepairCandidate) -> bool:
    """Return True if an insertion may repair a finding."""
    if not isinstance(finding, Finding):
        return any(True for _ in for_handles(Outline(candidate.program)))
    races = {f.buffer for f in candidate.findings if isinstance(f, Finding) and f.category == "race"}
    return repairable(finding, candidate.order) or (finding.category == "unwritten" and finding.buffer in races)


def _unrepaired(why: str, finding: Diagnostic) -> Diagnostic:
    hint = finding.hint or "change or move these statements: no synchronisation makes them right"
    return replace(finding, message=f"{why}: {finding.message}", hint=hint)


def _check_phase(program: Program) -> None:
    """Raise HostIRError if the program is a fusion, which has no streams."""
    if program.phase is not Phase.HOST:
        raise error(f"@{program.name} is a fusion, which has nothing to synchronise", expected="a host program")


def _without_unused(program: Program, before: Program) -> Program:
    """Return the program; remove the `current_stream` that the repair inserted if nothing uses it."""
    first = program.body[0]
    if not names_stream(first) or first in before.body:
        return program
    used = any(v == first.defines(Phase.HOST) for s in program.walk() for v in s.values(Codec.USE))
    return program if used else program.with_body(program.body[1:])


def _units(program: Program) -> Iterator[Block]:
    """Yield groups of statements to remove together, outer before inner: signals with their waits, or one statement.

    Never yield a `wait`, because every handle needs one.
    """
    flags: dict[str, list[Statement]] = {}
    for s in program.walk():
        if s.orders and s.flag_operands:
            flags.setdefault(s.flag_operands[0].flags.name, []).append(s)
    for s in program.walk():
        if s.orders and s.flag_operands and s.flag_operands[0].flags.name in flags:
            yield tuple(flags.pop(s.flag_operands[0].flags.name))
        loop = s.bodies and not s.conditional
        if _only_orders(s) or (loop and all(_only_orders(x) or x.sets_stream for b in s.bodies for x in b)):
            yield (s,)


def _only_orders(s: Statement) -> bool:
    """Return True if a statement only orders others. A wait for a handle does more: every handle needs one."""
    return bool(s.orders) and s.awaited is None


def _same_streams(program: Program, unit: Block) -> bool:
    """Return True if removing these statements leaves all others on their streams."""
    if not any(x.sets_stream for s in unit for body in s.bodies for x in body):
        return True
    outline = Outline(program)
    return all(resets(outline.block(at := outline.place(s))[at[-1] + 1 :]) for s in unit)


def _redundant(unit: Block, program: Program) -> Diagnostic:
    """Return the warning about a group of statements that can be removed."""
    text = f"'{format_statement(unit[0], program)}'"
    return Finding(
        f"nothing needs {text}: the program stays right without it, and more may overlap",
        unit[0].span,
        hint="remove it, unless it is meant to hold a stream back",
        notes=tuple((s.span, f"together with '{format_statement(s, program)}'") for s in unit[1:]),
        level="warning",
        category="redundant",
    )
