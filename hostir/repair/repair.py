"""Repair host programs: insert as little synchronisation as possible until the checker has no findings.

This module also reports redundant synchronisation.

The repair is a best-first search. Each finding about a program suggests edits, and each edited program is a candidate.
An insertion can only lengthen the chains of work in a program. So a candidate that already costs more than a repaired
program is dropped (branch and bound). At the end, each insertion that is not needed is removed.

If two events of one rank are not ordered, the repair orders them as the rank issues them.
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
MAX_MORE_CANDIDATES = 12  # the most programs that one repair checks after it has found a program without findings
UNSOUND = 1_000_000  # the weight of a finding about structure: the checker then reports no other findings
UNMET = 10_000  # the weight of a finding about waits and signals: it may hide findings about memory

Cost = tuple[int, int, int]


@dataclass(frozen=True)
class RepairCandidate:
    """A program that was checked during a repair.

    Fields:
        program: the program.
        findings: the findings about the program.
        order: the order of the program's events; None if the structure of the program is unsound, or if the program
            could not be traced.
        cost: the result of the function `cost`; zeros if `order` is None.
        added: the statements that the repair has inserted so far, one block for each insertion.
    """

    program: Program
    findings: list[Diagnostic]
    order: Order | None = None
    cost: Cost = (0, 0, 0)
    added: tuple[Block, ...] = field(default=(), compare=False)

    @property
    def severity(self) -> int:
        """The sum of the weights of all findings. A repaired program has severity 0."""
        return sum(_weight(f) for f in self.findings)


@dataclass(frozen=True)
class Repairer:
    """Checks candidates, and searches for the best candidate.

    Fields:
        sizes: the values of symbols with which candidates are checked.
        calls: the number of consecutive calls with which candidates are checked.
    """

    sizes: Mapping[str, int] | None
    calls: int | None

    def checked(self, program: Program, added: tuple[Block, ...] = ()) -> RepairCandidate:
        """Check a program, and return it as a candidate. `added` holds the statements that the repair has inserted."""
        if unsound := check_structure(program):
            return RepairCandidate(program, unsound, added=added)
        analysis = analyse(program, self.sizes, self.calls)
        if analysis.order is None:
            return RepairCandidate(program, analysis.findings, added=added)
        return RepairCandidate(program, analysis.findings, analysis.order, cost(program, analysis.order), added)

    def without_leaks(self, program: Program, added: tuple[Block, ...]) -> RepairCandidate:
        """Check a program, and return it as a candidate. If buffers leak, insert frees, and check the new program."""
        after = self.checked(program, added)
        if leaks := {f.buffer for f in after.findings if isinstance(f, Finding) and f.category == "leak"}:
            frees = for_leaks(Outline(program), leaks)
            after = self.checked(edited(program, frees), (*added, *(edit.new for edit in frees)))
        return after

    def search(self, start: RepairCandidate) -> RepairCandidate | None:
        """Search for repairs of `start`; return the candidate without findings that has the lowest cost.

        Return None if no candidate without findings is found.
        """
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
        """Remove the statements that a repaired program does not need; return the result as a candidate.

        First, insertions that are not needed are removed. Then statements of the original program that the repair has
        made redundant are removed.

        Args:
            candidate: the repaired program.
            before: the program before the repair.
        """
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
        """Replace `join`, a wait for all pool streams, by a wait for one pool stream if that wait is enough.

        Return the candidate with the replacement, or the unchanged candidate.
        """
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
        """Remove the statements of `piece` from a candidate, check the program, and return it as a new candidate."""
        return self.checked(candidate.program.with_body(without(candidate.program.body, piece)))


def repair(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Program:
    """Insert the synchronisation and the frees that a program lacks; return a program in which `check` finds nothing.

    The best of several repairs has the shortest chain of work over all ranks and calls. Each computation, communication
    and copy counts as one piece of work. If several repairs have equally long chains, the best repair has the fewest
    waits. If they also have equally many waits, it has the fewest statements.

    A wait, free or synchronize at a wrong place is moved. If a wait for a flag has no signal, or a signal has no wait,
    the repair inserts the missing statement, if a single statement is enough. Otherwise it removes the wait, or
    replaces the wait by a barrier.

    Args:
        program: a host program.
        sizes: values of symbols, as for `check`.
        calls: the number of consecutive calls to check, as for `check`.

    Raises:
        HostIRError: with the findings that no edit repairs, and what to do about them.
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
    """Return a unified diff of the texts of two programs. It names the file of the first program on both sides."""
    spans = [s.span for s in before.walk() if s.span is not None]
    name = spans[0].file if spans else f"{before.name}.hir"
    old, new = str(before).splitlines(keepends=True), str(after).splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, name, name))


def redundant(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> list[Diagnostic]:
    """Find redundant synchronisation; return a warning for each redundant statement or group of statements.

    All reported statements can be removed together without a new finding. The function tries to remove `synchronize`
    statements, barriers, signals together with their waits, and loops that contain only such statements. It tries them
    in program order, a loop before the statements inside it. The arguments are the same as for `repair`.
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
    """Return the cost of a program: the length of the longest chain of work, and the numbers of waits and statements.

    Waits are counted in all ranks and calls. Statements are counted in the text of the program.
    """
    statements = list(program.walk())
    waits = {id(s): s.waits for s in statements}
    return longest_chain(order), sum(waits.get(id(event.statement), 0) for event in order.events), len(statements)


def longest_chain(order: Order) -> int:
    """Return the length of the longest chain of work over all ranks and calls.

    A chain is a sequence of events in which each event happens before the next. Its length is the number of
    computations, communications and copies.
    """
    chain: dict[Event, int] = {}
    for event in _in_order(order):
        chain[event] = max((chain[before] for before in event.after), default=0) + _work(event)
    return max(chain.values(), default=0)


def loses(order: Order) -> bool:
    """Return True if a value in a symmetric buffer is overwritten before it is read.

    Parts of buffers that no event reads are ignored. If two ranks access a buffer, a repair has to choose which access
    comes first. The wrong choice may be free of races, but lose values. This function detects such a repair.
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
    """Yield the events in an order that agrees with happens-before.

    Events in a cycle, and events that come after an event of a cycle, are left out.
    """
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
    """Return True if an event counts as a piece of work: it is the write of a computation, communication or copy.

    For a computation that runs block by block, only the last event counts.
    """
    s = event.statement
    if s is not None and any(use.rows for use in s.flag_operands):
        return event.verb == "ends"
    return s is not None and any(a.does == "writes" for a in event.accesses)


def suggestions(candidate: RepairCandidate) -> Iterator[Edits]:
    """Yield edits that may repair one finding about a candidate.

    It is the first finding for which this package suggests edits.
    """
    outline, order = Outline(candidate.program), candidate.order
    if order is None:
        yield from for_handles(outline)
        return
    findings = [f for f in candidate.findings if isinstance(f, Finding) and f.category != "leak"]
    if first := next((f for f in findings if repairable(f, order)), None):
        yield from for_finding(first, outline, order)


def _weight(finding: Diagnostic) -> int:
    """Return the weight of a finding. A finding that may hide other findings has a higher weight."""
    if not isinstance(finding, Finding):
        return UNSOUND
    return finding.times if finding.category in ("race", "leak", "unwritten") else UNMET * finding.times


def _may_be_repaired(finding: Diagnostic, candidate: RepairCandidate) -> bool:
    """Return True if an edit may repair a finding about a candidate."""
    if not isinstance(finding, Finding):
        return any(True for _ in for_handles(Outline(candidate.program)))
    races = {f.buffer for f in candidate.findings if isinstance(f, Finding) and f.category == "race"}
    return repairable(finding, candidate.order) or (finding.category == "unwritten" and finding.buffer in races)


def _unrepaired(why: str, finding: Diagnostic) -> Diagnostic:
    hint = finding.hint or "change or move these statements: no synchronisation makes them right"
    return replace(finding, message=f"{why}: {finding.message}", hint=hint)


def _check_phase(program: Program) -> None:
    """Raise a HostIRError if the program is a fusion, because a fusion has no streams."""
    if program.phase is not Phase.HOST:
        raise error(f"@{program.name} is a fusion, which has nothing to synchronise", expected="a host program")


def _without_unused(program: Program, before: Program) -> Program:
    """Return a repaired program without the `current_stream` that the repair inserted, if nothing uses its value."""
    first = program.body[0]
    if not names_stream(first) or first in before.body:
        return program
    used = any(v == first.defines(Phase.HOST) for s in program.walk() for v in s.values(Codec.USE))
    return program if used else program.with_body(program.body[1:])


def _units(program: Program) -> Iterator[Block]:
    """Yield the groups of statements that may be redundant. A loop comes before the statements inside it.

    A group holds one statement, or all signals and waits of one row of flags. Waits for handles are left out, because
    every handle needs a wait.
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
    """Return True if a statement has no effect except that it orders other statements.

    A wait for a handle does not count, because every handle needs a wait.
    """
    return bool(s.orders) and s.awaited is None


def _same_streams(program: Program, unit: Block) -> bool:
    """Return True if all other statements keep their streams when the statements of `unit` are removed."""
    if not any(x.sets_stream for s in unit for body in s.bodies for x in body):
        return True
    outline = Outline(program)
    return all(resets(outline.block(at := outline.place(s))[at[-1] + 1 :]) for s in unit)


def _redundant(unit: Block, program: Program) -> Diagnostic:
    """Return a warning that says that the statements of `unit` are redundant."""
    text = f"'{format_statement(unit[0], program)}'"
    return Finding(
        f"nothing needs {text}: the program stays right without it, and more may overlap",
        unit[0].span,
        hint="remove it, unless it is meant to hold a stream back",
        notes=tuple((s.span, f"together with '{format_statement(s, program)}'") for s in unit[1:]),
        level="warning",
        category="redundant",
    )
