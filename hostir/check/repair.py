"""Repair host programs: insert the least synchronisation with which `check` finds nothing, and report redundant ones.

The repair is a best-first search over edits that findings suggest. An insertion can only lengthen the chains of work
of a program, never shorten them, so a program that already costs more than a sound one is dropped (branch and bound).
In the end every insertion is removed once, to see whether it is needed. Of two events on one rank, the one that is
issued first comes first, as in a repair by hand.
"""

from __future__ import annotations

import difflib
import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from hostir.check.insertions import (
    Block,
    Edit,
    Edits,
    Outline,
    Suggestions,
    edited,
    for_handles,
    for_leaks,
    names_stream,
    repairable,
    resets,
    with_callers_stream,
    without,
)
from hostir.check.order import Order
from hostir.check.proof import Finding, analyse
from hostir.check.structure import check_structure
from hostir.check.tracer import Buffer, Event
from hostir.ir.host_ops import Synchronize
from hostir.ir.op import Codec, Lit, Phase, Statement, Sync
from hostir.ir.program import Program, format_statement
from hostir.ir.regions import Region
from hostir.ir.source import Diagnostic, HostIRError, error

MAX_CANDIDATES = 250  # programs that one repair checks
MAX_MORE_CANDIDATES = 12  # after the first without findings
UNSOUND, UNMET = 1_000_000, 10_000  # weights: a finding that hides all others, and one that hides those about memory

Cost = tuple[int, int, int]


@dataclass(frozen=True)
class RepairCandidate:
    """A program that was checked during a repair, with its findings and its cost.

    Fields:
        cost: work events in the longest chain, waits over all ranks, statements. Zeros where they are not known.
        added: the insertions so far, edit by edit.
    """

    program: Program
    found: list[Diagnostic]
    order: Order | None = None
    cost: Cost = (0, 0, 0)
    added: tuple[Block, ...] = field(default=(), compare=False)

    @property
    def left(self) -> int:
        """The number of findings left, weighted by severity."""
        return sum(_weight(f) for f in self.found)


@dataclass(frozen=True)
class Repairer:
    """Checks and searches the candidates of one repair; holds the sizes and calls that they share."""

    sizes: Mapping[str, int] | None
    calls: int | None

    def checked(self, program: Program, added: tuple[Block, ...] = ()) -> RepairCandidate:
        if unsound := check_structure(program):
            return RepairCandidate(program, unsound, added=added)
        analysis = analyse(program, self.sizes, self.calls)
        if analysis.order is None:
            return RepairCandidate(program, analysis.findings, added=added)
        return RepairCandidate(program, analysis.findings, analysis.order, cost(program, analysis.order), added)

    def tried(self, program: Program, added: tuple[Block, ...]) -> RepairCandidate:
        """Check a program, with frees inserted for buffers that leak in it."""
        after = self.checked(program, added)
        if leaks := {f.buffer for f in after.found if isinstance(f, Finding) and f.kind == "leak"}:
            frees = for_leaks(Outline(program), leaks)
            after = self.checked(edited(program, frees), (*added, *(edit.new for edit in frees)))
        return after

    def search(self, start: RepairCandidate) -> RepairCandidate | None:
        """Return the cheapest candidate without findings, or None."""
        best, turn, budget = None, count(), MAX_CANDIDATES
        todo = [(start.left, start.cost, next(turn), start)]
        seen = {start.program}
        while todo and budget > 0:
            candidate = heapq.heappop(todo)[-1]
            if best is not None and (candidate.cost >= best.cost or candidate.left == start.left):
                continue
            for edits in suggestions(candidate):
                program = edited(candidate.program, edits)
                if program in seen:
                    continue
                seen.add(program)
                budget -= 1
                after = self.tried(program, (*candidate.added, *(edit.new for edit in edits if edit.new)))
                if best is not None and after.cost >= best.cost:
                    continue
                if after.order is not None and not after.found and not loses(after.order):
                    best, budget = after, min(budget, MAX_MORE_CANDIDATES)
                elif after.found and after.left <= candidate.left:
                    heapq.heappush(todo, (after.left, after.cost, next(turn), after))
        return best

    def trimmed(self, candidate: RepairCandidate, before: RepairCandidate) -> RepairCandidate:
        """Remove inserted statements that are not needed, then statements that the repair has made redundant."""
        known = {f.message for f in before.found}
        for piece in candidate.added:
            less = self.removed(candidate, piece)
            if not less.found and less.cost <= candidate.cost:
                candidate = less
        for join in [s for piece in candidate.added for s in piece if s.bodies]:
            candidate = self.narrowed(candidate, join)
        for unit in _units(before.program):
            if unit[0].flag_operands or (less := self.removed(candidate, unit)).found:
                continue
            if less.program == candidate.program or not _same_streams(candidate.program, unit):
                continue
            if any(f.message not in known for f in self.removed(before, unit).found):
                candidate = less
        return candidate

    def narrowed(self, candidate: RepairCandidate, join: Statement) -> RepairCandidate:
        """Replace a wait for all pool streams by a wait for one of them, where that is enough."""
        waits = all(s.orders is Sync.STREAMS for body in join.bodies for s in body)
        if not waits or all(s is not join for s in candidate.program.walk()):
            return candidate
        place = Outline(candidate.program).place(join)
        for stream in range(candidate.program.streams):
            less = self.checked(edited(candidate.program, (Edit(place, (Synchronize(stream=Lit(stream)),), drop=1),)))
            if not less.found and less.cost < candidate.cost:
                return less
        return candidate

    def removed(self, candidate: RepairCandidate, piece: Block) -> RepairCandidate:
        return self.checked(candidate.program.with_body(without(candidate.program.body, piece)))


def repair(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Program:
    """Insert the least synchronisation and frees into a program with which `check` finds nothing in it.

    The best repair leaves the shortest chain of work (computations, communications and copies, each counting one) over
    all ranks and calls; then the fewest waits; then the fewest statements. A wait, a free or a synchronize that comes
    too late is moved. A wait for a flag without a signal, or a signal without a wait, gets its counterpart if one
    statement is enough; otherwise such a wait becomes a barrier, or is removed.

    Args:
        program: a host program.
        sizes: of symbols, as for `check`.
        calls: how many successive calls to check; by default enough to show the errors of any number of calls.

    Raises:
        HostIRError: with the findings that no insertion repairs, and what to do about them.
    """
    repairer = Repairer(sizes, calls)
    _host_program(program)
    if not (first := repairer.checked(program)).found:
        return program
    if refused := [f for f in first.found if not _hopeful(f, first)]:
        raise HostIRError(*(_given_up("nothing put in repairs this", f) for f in refused))
    start = repairer.tried(with_callers_stream(program), ())
    best = start if not start.found else repairer.search(start)
    if best is None:
        raise HostIRError(*(_given_up("no repair was found for this", f) for f in first.found))
    return _without_unused(repairer.trimmed(best, start).program, program)


def difference(before: Program, after: Program) -> str:
    """Return a unified diff of two programs' texts, named for the file of the first."""
    spans = [s.span for s in before.walk() if s.span is not None]
    name = spans[0].file if spans else f"{before.name}.hir"
    old, new = str(before).splitlines(keepends=True), str(after).splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, name, name))


def redundant(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> list[Diagnostic]:
    """Return warnings about synchronisation that can all be removed together without any new finding.

    Synchronises, waits, barriers, signals, and loops of nothing else are tried in program order, outer before inner.
    """
    repairer = Repairer(sizes, calls)
    _host_program(program)
    known = {f.message for f in repairer.checked(program).found}
    found: list[Diagnostic] = []
    for unit in _units(program):
        body = without(program.body, unit)
        if body == program.body or not _same_streams(program, unit):
            continue
        if all(f.message in known for f in repairer.checked(program.with_body(body)).found):
            found.append(_too_much(unit, program))
            program = program.with_body(body)
    return found


# What a program costs -------------------------------------------------------------------------------------------------
def cost(program: Program, order: Order) -> Cost:
    """Return the longest chain of work, in events; the number of waits over all ranks; the number of statements."""
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
    """Whether a read part of a symmetric buffer is overwritten before its earlier value is read.

    On one rank the order of issue says which access comes first. Between ranks a repair has to choose an order, and
    might choose one in which nothing races but values are lost.
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
    """Whether an event is the one in which its statement has its result; one by blocks has that in the end."""
    s = event.statement
    if s is not None and any(use.rows for use in s.flag_operands):
        return event.verb == "ends"
    return s is not None and any(a.does == "writes" for a in event.accesses)


# What is wrong with it ------------------------------------------------------------------------------------------------
def suggestions(candidate: RepairCandidate) -> Iterator[Edits]:
    """Yield edits for the first finding that edits may repair."""
    outline, order = Outline(candidate.program), candidate.order
    if order is None:
        yield from for_handles(outline)
        return
    found = [f for f in candidate.found if isinstance(f, Finding) and f.kind != "leak"]
    if first := next((f for f in found if repairable(f, order)), None):
        yield from Suggestions(outline, order).of(first)


def _weight(found: Diagnostic) -> int:
    if not isinstance(found, Finding):
        return UNSOUND
    return found.times if found.kind in ("race", "leak", "unwritten") else UNMET * found.times


def _hopeful(found: Diagnostic, candidate: RepairCandidate) -> bool:
    """Whether an insertion may repair a finding."""
    if not isinstance(found, Finding):
        return any(True for _ in for_handles(Outline(candidate.program)))
    races = {f.buffer for f in candidate.found if isinstance(f, Finding) and f.kind == "race"}
    return repairable(found, candidate.order) or (found.kind == "unwritten" and found.buffer in races)


def _given_up(why: str, found: Diagnostic) -> Diagnostic:
    hint = found.hint or "change what these statements do, or where they stand: no waiting makes them right"
    return replace(found, message=f"{why}: {found.message}", hint=hint)


def _host_program(program: Program) -> None:
    """Raise for a fusion, which has no streams."""
    if program.phase is not Phase.HOST:
        raise error(f"@{program.name} is a fusion, in which nothing waits", expected="a host program")


def _without_unused(program: Program, before: Program) -> Program:
    """Return the program without a `current_stream` that the repair inserted and nothing uses."""
    first = program.body[0]
    if not names_stream(first) or first in before.body:
        return program
    used = any(v == first.defines(Phase.HOST) for s in program.walk() for v in s.values(Codec.USE))
    return program if used else program.with_body(program.body[1:])


# What is too much -----------------------------------------------------------------------------------------------------
def _units(program: Program) -> Iterator[Block]:
    """Yield statements that may be removed together, outer before inner. A `wait` may not: every handle needs one."""
    flags: dict[str, list[Statement]] = {}
    for s in program.walk():
        if s.orders and s.flag_operands:
            flags.setdefault(s.flag_operands[0].flags.name, []).append(s)
    for s in program.walk():
        if s.orders and s.flag_operands and s.flag_operands[0].flags.name in flags:
            yield tuple(flags.pop(s.flag_operands[0].flags.name))
        loop = s.bodies and not s.conditional
        if _orders_alone(s) or (loop and all(_orders_alone(x) or x.sets_stream for b in s.bodies for x in b)):
            yield (s,)


def _orders_alone(s: Statement) -> bool:
    """Whether a statement orders others, and may be left out for all else: a handle needs its wait."""
    return bool(s.orders) and s.awaited is None


def _same_streams(program: Program, unit: Block) -> bool:
    """Whether the rest of a program is issued to the same streams without these statements."""
    if not any(x.sets_stream for s in unit for body in s.bodies for x in body):
        return True
    outline = Outline(program)
    return all(resets(outline.block(at := outline.place(s))[at[-1] + 1 :]) for s in unit)


def _too_much(unit: Block, program: Program) -> Diagnostic:
    text = f"'{format_statement(unit[0], program)}'"
    return Finding(
        f"nothing needs {text}: all that is right stays right without it, and more may overlap",
        unit[0].span,
        hint="take it out, unless it is there to hold a stream back",
        notes=tuple((s.span, f"together with '{format_statement(s, program)}'") for s in unit[1:]),
        level="warning",
        kind="redundant",
    )
