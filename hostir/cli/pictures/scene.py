"""The scene of a picture: statements as boxes in lanes and columns, and arrows for their order.

A column is a depth in happens-before: a box stands right of all boxes that come before it, and the sides of one
communication stand above each other. An arrow within a rank also represents chains through boxes that are left out.
An arrow from rank to rank only represents chains through ranks that are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from typing import Any, Literal

from hostir.check.findings import Finding
from hostir.check.ordering.order import Order
from hostir.check.tracing.events import CALLER, Event
from hostir.ir.op import Statement, Sync
from hostir.ir.program import Program, format_statement

# Categories of boxes; the first is a lane, too.
COMMUNICATION, COMPUTATION, OTHER = "communication", "computation", "other"
CYCLIC = ("deadlock", "SMs held")  # findings whose events wait for each other in a cycle
EARLY = ("begins", "moves")  # events of a communication that do not wait for other ranks
Way = Literal["order", "ranks", "meets"]  # an arrow within a rank; to another rank; between sides of a communication
Tie = tuple[int, ...]  # events that happen together


@dataclass(eq=False)
class Box:
    """A box: a statement of one rank, round and call; several similar statements in a row; or an action of the caller.

    Fields:
        lane: "caller", the name of a pool stream, or "communication".
        first, last: the columns of its first and last event.
        row: its row in the lane.
    """

    rank: int
    lane: str
    role: str
    word: str
    operands: str
    title: str
    rounds: list[tuple[int, ...]]
    events: list[Event] = field(default_factory=list)
    first: int = 0
    last: int = 0
    row: int = 0

    @property
    def place(self) -> str:
        """The rounds of the loops around the statement, as text."""
        ends = dict.fromkeys((*self.rounds[:1], *self.rounds[-1:]))
        return f"[{' to '.join(map(_list, ends))}] " if ends else ""


@dataclass(frozen=True)
class Arrow:
    """An arrow: `source` happens before `target`.

    Fields:
        leaves, enters: the columns between which it runs.
        back: True if it closes a cycle.
    """

    source: Box
    target: Box
    leaves: int
    enters: int
    way: Way
    back: bool = False


@dataclass(frozen=True)
class FindingMark:
    """The mark of a finding: its boxes, the pairs in conflict, and the arrows of a cycle."""

    number: int
    finding: Finding
    boxes: tuple[Box, ...]
    pairs: tuple[tuple[Box, Box], ...]
    cycle: tuple[Arrow, ...] = ()


@dataclass(frozen=True)
class Scene:
    """The boxes, arrows and marks of a picture."""

    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    marks: Sequence[FindingMark]

    @property
    def columns(self) -> int:
        return 1 + max((box.last for box in self.boxes), default=-1)

    @property
    def lanes(self) -> dict[tuple[int, str], int]:
        """Return the number of rows of each lane, by rank and lane name, from top to bottom."""
        rows: dict[tuple[int, str], int] = {}
        for box in sorted(self.boxes, key=_place):
            rows[box.rank, box.lane] = max(rows.get((box.rank, box.lane), 0), box.row + 1)
        return rows


def boxes_of(program: Program, order: Order, ranks: Iterable[int], calls: int, named: Set[Event]) -> list[Box]:
    """Return the boxes of some ranks in the first calls, in issue order; allocations only if a finding names them."""
    boxes: dict[tuple[object, ...], Box] = {}
    for event in (e for rank in ranks for e in order.ranks[rank].events):
        if event.call >= calls or (event.verb == "allocates" and event not in named):
            continue
        statement = id(event.statement) if event.statement else event.verb == "writes"
        key = (event.rank, event.call, statement, event.rounds)
        if key not in boxes:
            boxes[key] = _box(program, event, calls)
        boxes[key].events.append(event)
    return list(boxes.values())


def _box(program: Program, event: Event, calls: int) -> Box:
    rounds, s = event.rounds, event.statement
    where = f"rank {event.rank}, {event.stream}" + (f", round {_list(rounds)}" if rounds else "")
    where += f", call {event.call + 1}"
    if s is None:
        enters, turn = event.verb == "writes", f" {event.call + 1}" if calls > 1 else ""
        does = "the caller writes the inputs" if enters else "the caller reads the outputs, then overwrites all"
        values = ", ".join(map(str, program.inputs if enters else program.outputs))
        head = f"call{turn} begins" if enters else f"call{turn} ends"
        return Box(event.rank, "caller", OTHER, head, values, f"{does}\n{where}", [])
    text = format_statement(s, program)
    lane = COMMUNICATION if s.started else "caller" if event.stream == CALLER else event.stream
    role = COMMUNICATION if s.transfers else COMPUTATION if event.sms and not event.small else OTHER
    operands = text.split(s.keyword(), 1)[1].split(" over ")[0].replace("->", "→").strip()
    if s.buffer:
        operands = f"{s.buffer}"
    return Box(event.rank, lane, role, s.keyword(), operands, f"{text}\n{where}", [rounds] if rounds else [])


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def stage(order: Order, boxes: Sequence[Box], findings: Mapping[int, Finding]) -> Scene:
    """Place boxes in columns and rows, with arrows for the edges between them and marks for numbered findings."""
    if not boxes:
        return Scene((), (), ())
    events = [event for box in boxes for event in box.events]
    owner_of = {event: box for box in boxes for event in box.events}
    owners = [owner_of[event] for event in events]
    graph = _between(order, events, held=any(finding.category in CYCLIC for finding in findings.values()))
    # Early events come before the other events of their box. No edge says so if the ranks' collectives differ.
    early = [n for n, event in enumerate(events) if event.verb in EARLY]
    met = [n for n, event in enumerate(events) if event.verb not in EARLY]
    graph.add_edges_from((n, m) for n in early for m in met if owners[m] is owners[n])
    back = _closing(graph, owners)
    graph.remove_edges_from(back)
    columns = _columns(graph, owners)
    for box in boxes:
        at = [columns[n] for n, event in enumerate(events) if owners[n] is box and event.verb not in EARLY]
        box.first, box.last = min(at), max(at)
    _stack(boxes)
    arrows = _arrows(graph, back, owners, columns, _barriers(events, columns))
    marks = _marks(findings, owner_of, arrows)
    cycle = {(arrow.source, arrow.target) for mark in marks for arrow in mark.cycle}
    return Scene(boxes, [a for a in arrows if (a.target, a.source) not in cycle], marks)


def _between(order: Order, shown: Sequence[Event], held: bool) -> Any:
    """Return a graph of the shown events, with an edge wherever a path through hidden events leads from one to another.

    With `held`, the paths include edges from events that may hold an event up. Programs may not rely on such edges, but
    they close cycles.
    """
    import networkx as nx

    last = max(event.call for event in shown)
    events = [event for event in order.events if event.call <= last]
    number = {event: n for n, event in enumerate(events)}
    bit = {number[event]: 1 << n for n, event in enumerate(shown)}
    full = nx.DiGraph()
    full.add_nodes_from(range(len(events)))
    for n, event in enumerate(events):
        full.add_edges_from((number[before], n) for before in (*event.after, *(event.held if held else ())))
    ranks = {event.rank for event in shown}
    outside = [event.rank not in ranks or event.verb == "meets" for event in events]
    seen = [0] * len(events)  # for each event, as bits: the shown events that lead to it through hidden events
    near = [0] * len(events)  # the same, only through events of other ranks
    groups = nx.condensation(full)
    for group in nx.topological_sort(groups):
        members, stable = sorted(groups.nodes[group]["members"]), False
        while not stable:
            before = [(seen[n], near[n]) for n in members]
            for n in members:
                for other in full.predecessors(n):
                    seen[n] |= bit.get(other, seen[other])
                    near[n] |= bit.get(other, near[other] if outside[other] else 0)
            stable = before == [(seen[n], near[n]) for n in members]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(shown)))
    for n, event in enumerate(shown):
        for m, other in enumerate(shown):
            leads = seen if other.rank == event.rank else near
            if leads[number[event]] >> m & 1 and m != n:
                graph.add_edge(m, n)
    return graph


def _closing(graph: Any, owners: Sequence[Box]) -> list[tuple[int, int]]:
    """Return edges whose removal leaves the graph without cycles.

    These are edges of a cycle that lead to another rank, or from an event to an earlier event of another box.
    """
    import networkx as nx

    edges: list[tuple[int, int]] = []
    for cycle in nx.strongly_connected_components(graph):
        inner = graph.subgraph(cycle).edges
        edges += [
            (a, b) for a, b in inner if owners[a].rank != owners[b].rank or (a > b and owners[a] is not owners[b])
        ]
    return sorted(edges)


def _columns(graph: Any, owners: Sequence[Box]) -> dict[int, int]:
    """Return the column of each event: the number of boxes on the longest path to it."""
    import networkx as nx

    columns: dict[int, int] = {}
    for n in nx.lexicographical_topological_sort(graph):
        before = graph.predecessors(n)
        columns[n] = max((columns[m] + (not _share_column(owners[m], owners[n])) for m in before), default=0)
    return columns


def _share_column(a: Box, b: Box) -> bool:
    """Return True if two boxes may share a column: they are the same box, or sides of one communication."""
    if a is b or a.rank == b.rank or not a.lane == b.lane == COMMUNICATION:
        return a is b
    return a.word == b.word or not any(s and s.collective for s in (a.events[0].statement, b.events[0].statement))


def _stack(boxes: Iterable[Box]) -> None:
    """Give each box the first row of its lane in which its columns are free."""
    ends: dict[tuple[int, str], list[int]] = {}
    for box in sorted(boxes, key=lambda box: box.first):
        rows = ends.setdefault((box.rank, box.lane), [])
        box.row = next((row for row, end in enumerate(rows) if end < box.first), len(rows))
        rows[box.row : box.row + 1] = [box.last]


def _arrows(
    graph: Any, back: Sequence[tuple[int, int]], owners: Sequence[Box], columns: Mapping[int, int], ties: Iterable[Tie]
) -> list[Arrow]:
    """Return the arrows between boxes, without arrows that others imply. Ties replace the arrows that they explain."""
    import networkx as nx

    arrows: dict[tuple[Box, Box], Arrow] = {}
    tied = {(owners[a].rank, b) for sides in ties for a, b in permutations(sides, 2)}
    for a, b in (step for sides in ties for step in pairwise(sides)):
        arrows[owners[a], owners[b]] = Arrow(owners[a], owners[b], columns[a], columns[b], "meets")
    for edges, closes in ((sorted(nx.transitive_reduction(graph).edges), False), (back, True)):
        for a, b in edges:
            source, target = owners[a], owners[b]
            if source is target or (source.rank, b) in tied:
                continue
            level = not closes and columns[a] == columns[b]
            way: Way = "meets" if level else "ranks" if source.rank != target.rank else "order"
            leaves, enters = (max(columns[n], owners[n].first) for n in (a, b))
            arrows.setdefault((source, target), Arrow(source, target, leaves, enters, way, closes))
    return list(arrows.values())


def _barriers(events: Sequence[Event], columns: Mapping[int, int]) -> list[Tie]:
    """Return the ties of barriers: sides that share a column, in the order of ranks."""
    sides: dict[tuple[Event, int], list[int]] = {}
    for n, event in enumerate(events):
        for meeting in event.after if event.statement and event.statement.orders is Sync.MEET else ():
            if meeting.verb == "meets":
                sides.setdefault((meeting, columns[n]), []).append(n)
    return [tuple(side) for side in sides.values()]


def _marks(findings: Mapping[int, Finding], owner: Mapping[Event, Box], arrows: Sequence[Arrow]) -> list[FindingMark]:
    """Return the marks of the numbered findings that have a box."""
    marks = []
    for number, finding in findings.items():
        boxes = tuple(dict.fromkeys(owner[event] for event in finding.events if event in owner))
        pairs, cycle = list(pairwise(boxes)), list[Arrow]()
        if finding.category in CYCLIC:
            pairs, cycle = _around(boxes, arrows)
        if boxes:
            marks.append(FindingMark(number, finding, boxes, tuple(pairs), tuple(cycle)))
    return marks


def _around(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> tuple[list[tuple[Box, Box]], list[Arrow]]:
    """Return the neighbours in a cycle of boxes that no path of arrows joins, and the arrows of the other paths."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(boxes)
    for arrow in arrows:
        graph.add_edge(arrow.source, arrow.target, arrow=arrow)
    apart, cycle = [], []
    for a, b in zip(boxes, (*boxes[1:], *boxes[:1]), strict=True):
        if not nx.has_path(graph, a, b):
            apart.append((a, b))
            continue
        cycle += [graph.edges[step]["arrow"] for step in pairwise(nx.shortest_path(graph, a, b))]
    return apart, cycle


def nearby(boxes: Iterable[Box], centre: Set[Event], reach: int) -> list[Box]:
    """Return the boxes outside loops, and the boxes at most `reach` rounds of an outermost loop from a finding."""
    rounds = {event.rounds[0] for event in centre if event.rounds} or {0}
    return [box for box in boxes if not box.rounds or min(abs(box.rounds[0][0] - r) for r in rounds) <= reach]


def closest(boxes: Sequence[Box], centre: Set[Event], most: int) -> list[Box]:
    """Return at most `most` boxes: the boxes that their rank issues closest to the findings' events."""
    first: dict[int, int] = {}  # by rank: its first box
    firsts = [first.setdefault(box.rank, n) for n, box in enumerate(boxes)]
    places = [n - firsts[n] for n, box in enumerate(boxes) if not centre.isdisjoint(box.events)] or [0]
    distances = [min(abs(n - start - place) for place in places) for n, start in enumerate(firsts)]
    chosen = sorted(range(len(boxes)), key=lambda n: (distances[n], n))[:most]
    return [boxes[n] for n in sorted(chosen)]


def merged(boxes: Iterable[Box], centre: Set[Event]) -> list[Box]:
    """Merge successive frees or waits on one stream into one box, unless a finding names one of them."""
    kept: list[Box] = []
    for box in boxes:
        before = kept[-1] if kept else box
        if before is box or not _alike(before, box) or not centre.isdisjoint((*before.events, *box.events)):
            kept.append(replace(box))
            continue
        operands = ", ".join(dict.fromkeys([*before.operands.split(", "), box.operands]))
        title, rounds = f"{before.title}\n{box.title}", list(dict.fromkeys((*before.rounds, *box.rounds)))
        events = [*before.events, *box.events]
        kept[-1] = replace(before, operands=operands, title=title, rounds=rounds, events=events)
    return kept


def _alike(a: Box, b: Box) -> bool:
    """Return True if two successive boxes may be merged."""
    first, second = a.events[0], b.events[0]
    same = (a.rank, a.lane, a.word, first.call) == (b.rank, b.lane, b.word, second.call)
    return same and first.statement is not None and _is_small(first.statement)


def _is_small(s: Statement) -> bool:
    """Return True if a statement may share a box with equal neighbours: frees and waits for streams."""
    return s.freed is not None or s.orders is Sync.STREAMS


def _place(box: Box) -> tuple[int, bool, bool, int]:
    """Return the sort key of a lane: by rank; then the caller's stream, the pool's streams, communications."""
    number = box.lane.removeprefix("stream ")
    return box.rank, box.lane == COMMUNICATION, box.lane != "caller", int(number) if number.isdigit() else 0
