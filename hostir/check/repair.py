"""Repair host programs: insert the least synchronisation with which `check` finds nothing, and report redundant ones.

The repair is a best-first search over edits that findings suggest. Whatever is put in can only lengthen the chains of
work of a program, never shorten them: so a program that already costs more than a sound one that was found is given up
(branch and bound). In the end every piece that was put in is taken out once, to see whether it is needed. What comes
first of two things on one rank is what is issued first there, as a repair by hand would have it.
"""

from __future__ import annotations

import difflib
import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from hostir.check.findings import Finding
from hostir.check.insertions import (
    REPAIRABLE,
    Block,
    Edit,
    Edits,
    Outline,
    Suggestions,
    edited,
    for_handles,
    for_leaks,
    resets,
    with_callers_stream,
    without,
)
from hostir.check.order import Order
from hostir.check.proof import analyse
from hostir.check.structure import check_structure
from hostir.check.tracer import Buffer, Event
from hostir.ir.host_ops import CurrentStream, For, SetStream, Synchronize, Wait
from hostir.ir.onesided_ops import Barrier, Signal, WaitSignal
from hostir.ir.op import Codec, Lit, Phase, Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.regions import Region
from hostir.ir.source import Diagnostic, HostIRError, error

MOST_LOOKS = 250  # programs that one repair looks at
MORE_LOOKS = 12  # once it has found one without findings
WAITING = (Synchronize, Wait, WaitSignal)
ORDERING = (Synchronize, Barrier, Signal, WaitSignal)
UNSOUND, UNMET = 1_000_000, 10_000  # a finding that hides all others, and one that hides what memory has to say

Cost = tuple[int, int, int]


@dataclass(frozen=True)
class Look:
    """A program that was checked during a repair, with its findings and its cost.

    Fields:
        cost: work events in the longest chain, what ranks wait for, statements. Zeros where they are not known.
        added: what was put in so far, edit by edit.
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

    def look(self, program: Program, added: tuple[Block, ...] = ()) -> Look:
        if unsound := check_structure(program):
            return Look(program, unsound, added=added)
        analysis = analyse(program, self.sizes, self.calls)
        if analysis.order is None:
            return Look(program, analysis.findings, added=added)
        return Look(program, analysis.findings, analysis.order, cost(program, analysis.order), added)

    def tried(self, program: Program, added: tuple[Block, ...]) -> Look:
        """Check a program, with frees inserted for buffers that leak in it."""
        after = self.look(program, added)
        if leaks := {f.buffer for f in after.found if isinstance(f, Finding) and f.kind == "leak"}:
            frees = for_leaks(Outline(program), leaks)
            after = self.look(edited(program, frees), (*added, *(edit.new for edit in frees)))
        return after

    def search(self, start: Look) -> Look | None:
        """Return the cheapest candidate without findings, or None."""
        best, turn, looks = None, count(), MOST_LOOKS
        todo = [(start.left, start.cost, next(turn), start)]
        seen = {start.program}
        while todo and looks > 0:
            look = heapq.heappop(todo)[-1]
            if best is not None and (look.cost >= best.cost or look.left == start.left):
                continue
            for edits in suggestions(look):
                program = edited(look.program, edits)
                if program in seen:
                    continue
                seen.add(program)
                looks -= 1
                after = self.tried(program, (*look.added, *(edit.new for edit in edits if edit.new)))
                if best is not None and after.cost >= best.cost:
                    continue
                if after.order is not None and not after.found and not loses(after.order):
                    best, looks = after, min(looks, MORE_LOOKS)
                elif after.found and after.left <= look.left:
                    heapq.heappush(todo, (after.left, after.cost, next(turn), after))
        return best

    def trimmed(self, look: Look, before: Look) -> Look:
        """Remove inserted statements that are not needed, then statements that the repair has made redundant."""
        known = {f.message for f in before.found}
        for piece in look.added:
            less = self.removed(look, piece)
            if not less.found and less.cost <= look.cost:
                look = less
        for join in [s for piece in look.added for s in piece if isinstance(s, For)]:
            look = self.narrowed(look, join)
        for unit in _units(before.program):
            if isinstance(unit[0], (Signal, WaitSignal)) or (less := self.removed(look, unit)).found:
                continue
            if less.program == look.program or not _same_streams(look.program, unit):
                continue
            if any(f.message not in known for f in self.removed(before, unit).found):
                look = less
        return look

    def narrowed(self, look: Look, join: For) -> Look:
        """Replace a wait for all pool streams by a wait for one of them, where that is enough."""
        if any(not isinstance(s, Synchronize) for s in join.body) or all(s is not join for s in look.program.walk()):
            return look
        place = Outline(look.program).place(join)
        for stream in range(look.program.streams):
            less = self.look(edited(look.program, (Edit(place, (Synchronize(stream=Lit(stream)),), drop=1),)))
            if not less.found and less.cost < look.cost:
                return less
        return look

    def removed(self, look: Look, piece: Block) -> Look:
        return self.look(look.program.with_body(without(look.program.body, piece)))


def repair(program: Program, sizes: Mapping[str, int] | None = None, calls: int | None = None) -> Program:
    """Insert the least synchronisation and frees into a program with which `check` finds nothing in it.

    Least is what leaves the shortest chain of work (computations, communications and copies, each counting one) over
    all ranks and calls; then what waits for the least; then what is the fewest statements. A wait, a free or a
    synchronize that stands too late is moved. A flag that is waited for and not raised, or raised and not waited for,
    gets the other half where one statement is enough; else a wait for it becomes a barrier, or goes.

    Args:
        program: a host program.
        sizes: of symbols, as for `check`.
        calls: how many calls follow each other; unless given, as many as show what any number would.

    Raises:
        HostIRError: naming what putting in cannot repair, with what to do about it.
    """
    repairer = Repairer(sizes, calls)
    _host_program(program)
    if not (first := repairer.look(program)).found:
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
    known = {f.message for f in repairer.look(program).found}
    found: list[Diagnostic] = []
    for unit in _units(program):
        body = without(program.body, unit)
        if body == program.body or not _same_streams(program, unit):
            continue
        if all(f.message in known for f in repairer.look(program.with_body(body)).found):
            found.append(_too_much(unit, program))
            program = program.with_body(body)
    return found


# What a program costs -------------------------------------------------------------------------------------------------
def cost(program: Program, order: Order) -> Cost:
    """Return the longest chain of work, in events; the number of waits over all ranks; the number of statements."""
    waits = sum(_waits(event.statement) for event in order.events)
    return longest_chain(order), waits, sum(1 for _ in program.walk())


def _waits(s: Statement | None) -> int:
    """Return what a statement waits for: the number of ranks for a barrier, 1 for another wait, else 0."""
    if isinstance(s, Barrier):
        return s.x.tensor.mesh.size(s.over) if s.x.tensor.mesh else 1
    return int(isinstance(s, WAITING))


def longest_chain(order: Order) -> int:
    """Return the length of the longest chain of computations, communications and copies, over all ranks and calls."""
    chain: dict[Event, int] = {}
    for event in _in_order(order):
        chain[event] = max((chain[before] for before in event.after), default=0) + _work(event)
    return max(chain.values(), default=0)


def loses(order: Order) -> bool:
    """Whether a read part of a symmetric buffer is overwritten before its earlier value is read.

    The order in which a rank issues says who is first on that rank. Who is first of two ranks a repair has to choose,
    and may choose an order in which nothing races and values are lost.
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
    """Whether an event is the one in which its statement writes its result."""
    return event.statement is not None and any(a.does == "writes" for a in event.accesses)


# What is wrong with it ------------------------------------------------------------------------------------------------
def suggestions(look: Look) -> Iterator[Edits]:
    """Yield edits for the first finding that edits may repair."""
    outline = Outline(look.program)
    if look.order is None:
        yield from for_handles(outline)
        return
    found = [f for f in look.found if isinstance(f, Finding) and f.kind in REPAIRABLE and f.kind != "leak"]
    if found:
        yield from Suggestions(outline, look.order).of(found[0])


def _weight(found: Diagnostic) -> int:
    if not isinstance(found, Finding):
        return UNSOUND
    return found.times if found.kind in ("race", "leak", "unwritten") else UNMET * found.times


def _hopeful(found: Diagnostic, look: Look) -> bool:
    """Whether an insertion may repair a finding."""
    if not isinstance(found, Finding):
        return any(True for _ in for_handles(Outline(look.program)))
    races = {f.buffer for f in look.found if isinstance(f, Finding) and f.kind == "race"}
    return found.kind in REPAIRABLE or (found.kind == "unwritten" and found.buffer in races)


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
    if not isinstance(first, CurrentStream) or first in before.body:
        return program
    used = any(v == first.out for s in program.walk() for v in s.values(Codec.USE))
    return program if used else program.with_body(program.body[1:])


# What is too much -----------------------------------------------------------------------------------------------------
def _units(program: Program) -> Iterator[Block]:
    """Yield statements that may be removed together, outer before inner. A `wait` may not: every handle needs one."""
    flags: dict[str, list[Statement]] = {}
    for s in program.walk():
        if isinstance(s, (Signal, WaitSignal)):
            flags.setdefault(s.flags.name, []).append(s)
    for s in program.walk():
        if isinstance(s, (Signal, WaitSignal)) and s.flags.name in flags:
            yield tuple(flags.pop(s.flags.name))
        if isinstance(s, ORDERING) or (
            isinstance(s, For) and all(isinstance(x, (*ORDERING, SetStream)) for x in s.body)
        ):
            yield (s,)


def _same_streams(program: Program, unit: Block) -> bool:
    """Whether the rest of a program is issued to the same streams without these statements."""
    if not any(isinstance(x, SetStream) for s in unit for x in getattr(s, "body", ())):
        return True
    outline = Outline(program)
    return all(resets(outline.block(at := outline.place(s))[at[-1] + 1 :]) for s in unit)


def _too_much(unit: Block, program: Program) -> Diagnostic:
    told = f"'{format_statement(unit[0], program)}'"
    return Finding(
        f"nothing needs {told}: all that is right stays right without it, and more may overlap",
        unit[0].span,
        hint="take it out, unless it is there to hold a stream back",
        notes=tuple((s.span, f"together with '{format_statement(s, program)}'") for s in unit[1:]),
        level="warning",
        kind="redundant",
    )
