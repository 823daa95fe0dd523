"""Build the scene of a picture: statements are boxes in lanes and columns, and arrows show their order.

A box stands to the right of all boxes that happen before it. The boxes of different ranks for one communication are in
the same column.

A picture hides some ranks and statements. An arrow between two boxes of one rank may stand for a chain of hidden events
of any rank. An arrow between boxes of different ranks stands for a chain of events of hidden ranks only.
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

# The roles of boxes. "communication" is also the name of a lane.
COMMUNICATION, COMPUTATION, OTHER = "communication", "computation", "other"
CYCLIC = ("deadlock", "SMs held")  # the categories of findings about events that wait for each other in a cycle
EARLY = ("begins", "moves")  # events of a communication that do not wait for other ranks
# What an arrow joins: events of one rank; events of two ranks; the events of two ranks that meet in one communication.
Way = Literal["order", "ranks", "meets"]
Tie = tuple[int, ...]  # the events of different ranks that meet in one barrier


@dataclass(eq=False)
class Box:
    """A box of a picture.

    It stands for one statement in one rank, round and call, or for several similar statements in a row. It may also
    stand for an action of the caller.

    Fields:
        rank: the rank that runs the statement.
        lane: "caller", the name of a pool stream, or "communication".
        role: COMMUNICATION, COMPUTATION or OTHER. It decides the color.
        word: the first line of the text in the box: a keyword, or the action of the caller.
        operands: the second line of the text in the box.
        title: the text that viewers show when the pointer is over the box.
        rounds: for each statement, the rounds of the loops around it; empty outside loops.
        events: the events of the statements.
        first, last: the columns of the first and last event.
        row: the row of the box in its lane.
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
    """An arrow, which shows that `source` happens before `target`.

    Fields:
        source, target: the boxes that the arrow joins.
        leaves, enters: the columns in which the arrow begins and ends.
        way: the events that the arrow joins: events of one rank, of two ranks, or of two ranks that meet in one
            communication.
        back: True if the arrow closes a cycle.
    """

    source: Box
    target: Box
    leaves: int
    enters: int
    way: Way
    back: bool = False


@dataclass(frozen=True)
class FindingMark:
    """The red parts of a picture for one finding.

    Fields:
        number: the number of the finding in the list of findings.
        finding: the finding.
        boxes: the boxes of the events of the finding.
        pairs: the pairs of boxes that a red dashed line joins.
        cycle: the red arrows, if the events of the finding wait for each other in a cycle; otherwise empty.
    """

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
        """The number of rows of each lane, by rank and lane name. The lanes are sorted from top to bottom."""
        rows: dict[tuple[int, str], int] = {}
        for box in sorted(self.boxes, key=_place):
            rows[box.rank, box.lane] = max(rows.get((box.rank, box.lane), 0), box.row + 1)
        return rows


def boxes_of(program: Program, order: Order, ranks: Iterable[int], calls: int, named: Set[Event]) -> list[Box]:
    """Return the boxes of some ranks in the first calls, in the order in which each rank issues its statements.

    Args:
        program: the host program.
        order: the order of its events.
        ranks: the ranks to draw.
        calls: the number of calls to draw.
        named: the events that findings name. An allocation gets a box only if a finding names it.
    """
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
    """Build the scene of the boxes to draw: set their columns and rows, and add arrows and marks.

    Args:
        order: the order of the program's events.
        boxes: the boxes to draw. This function sets the fields `first`, `last` and `row` of each box.
        findings: the findings to mark, by number.
    """
    if not boxes:
        return Scene((), (), ())
    events = [event for box in boxes for event in box.events]
    owner_of = {event: box for box in boxes for event in box.events}
    owners = [owner_of[event] for event in events]
    graph = _between(order, events, held=any(finding.category in CYCLIC for finding in findings.values()))
    # Early events come before the other events of their box. The order lacks this edge if ranks' collectives differ.
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
    """Return the happens-before graph of the shown events. A node is the index of an event in `shown`.

    There is an edge between two shown events if a path through hidden events leads from the first to the second. If
    the events are of different ranks, the path may only go through ranks without shown events.

    Args:
        order: the order of all events.
        shown: the events in boxes.
        held: True to also follow the edges from an event to the events that it may delay. A program may not rely on
            such edges, but they close cycles.
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
    seen = [0] * len(events)  # for each event, as a bit mask: the shown events with a path of hidden events to it
    near = [0] * len(events)  # the same, for paths through ranks that are not shown
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
    """Return edges to remove from the graph so that it has no cycles.

    An edge of a cycle is in the result if it leads to another rank, or back to an earlier event of the same rank.
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
    """Return the column of each event: the number of steps from box to box on the longest path that ends at it.

    A step between two boxes that may share a column does not count.
    """
    import networkx as nx

    columns: dict[int, int] = {}
    for n in nx.lexicographical_topological_sort(graph):
        before = graph.predecessors(n)
        columns[n] = max((columns[m] + (not _share_column(owners[m], owners[n])) for m in before), default=0)
    return columns


def _share_column(a: Box, b: Box) -> bool:
    """Return True if two boxes may share a column.

    This holds if they are the same box, or if they are the boxes of two ranks for the same communication.
    """
    if a is b or a.rank == b.rank or not a.lane == b.lane == COMMUNICATION:
        return a is b
    return a.word == b.word or not any(s and s.collective for s in (a.events[0].statement, b.events[0].statement))


def _stack(boxes: Iterable[Box]) -> None:
    """Set the row of each box to the first row of its lane in which the columns of the box are free."""
    ends: dict[tuple[int, str], list[int]] = {}
    for box in sorted(boxes, key=lambda box: box.first):
        rows = ends.setdefault((box.rank, box.lane), [])
        box.row = next((row for row, end in enumerate(rows) if end < box.first), len(rows))
        rows[box.row : box.row + 1] = [box.last]


def _arrows(
    graph: Any, back: Sequence[tuple[int, int]], owners: Sequence[Box], columns: Mapping[int, int], ties: Iterable[Tie]
) -> list[Arrow]:
    """Return the arrows between boxes. An arrow is left out if a path of other arrows implies it.

    Args:
        graph: the edges between events, without the edges that close cycles.
        back: the edges that close cycles.
        owners: the box of each event.
        columns: the column of each event.
        ties: the events that meet in each barrier. Lines from one rank to the next join the boxes of these events. They
            replace the arrows from each rank to every other rank.
    """
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
    """Return one tie for each barrier and column.

    A tie holds the events in the column at which ranks leave the barrier.
    """
    sides: dict[tuple[Event, int], list[int]] = {}
    for n, event in enumerate(events):
        for meeting in event.after if event.statement and event.statement.orders is Sync.MEET else ():
            if meeting.verb == "meets":
                sides.setdefault((meeting, columns[n]), []).append(n)
    return [tuple(side) for side in sides.values()]


def _marks(findings: Mapping[int, Finding], owner: Mapping[Event, Box], arrows: Sequence[Arrow]) -> list[FindingMark]:
    """Return a mark for each finding with at least one box.

    Args:
        findings: the findings by number.
        owner: the box of each event.
        arrows: all arrows of the picture.
    """
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
    """Return the lines and arrows that show a cycle of boxes. In the cycle, each box waits for the box before it.

    If a path of arrows leads from a box to the next box, the shortest such path is shown. Otherwise a line joins the
    two boxes.

    Returns:
        The pairs of boxes to join by a line, and the arrows of the paths.
    """
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
    """Return the boxes that are outside loops, or in a round close to the rounds of the findings.

    Args:
        boxes: all boxes.
        centre: the events that findings name.
        reach: the largest distance, in rounds of an outermost loop, to the round of an event that findings name.
    """
    rounds = {event.rounds[0] for event in centre if event.rounds} or {0}
    return [box for box in boxes if not box.rounds or min(abs(box.rounds[0][0] - r) for r in rounds) <= reach]


def closest(boxes: Sequence[Box], centre: Set[Event], most: int) -> list[Box]:
    """Return at most `most` boxes, in the order of `boxes`.

    Each box has a position among the boxes of its rank. The result holds the boxes with the positions that are closest
    to the positions of boxes with an event of `centre`.

    Args:
        boxes: all boxes; the boxes of a rank are consecutive.
        centre: the events that findings name.
        most: the largest number of boxes.
    """
    first: dict[int, int] = {}  # by rank: the index of its first box
    firsts = [first.setdefault(box.rank, n) for n, box in enumerate(boxes)]
    places = [n - firsts[n] for n, box in enumerate(boxes) if not centre.isdisjoint(box.events)] or [0]
    distances = [min(abs(n - start - place) for place in places) for n, start in enumerate(firsts)]
    chosen = sorted(range(len(boxes)), key=lambda n: (distances[n], n))[:most]
    return [boxes[n] for n in sorted(chosen)]


def merged(boxes: Iterable[Box], centre: Set[Event]) -> list[Box]:
    """Merge successive boxes in a lane if all of them free buffers, or if all wait for streams; return all boxes.

    A box with an event of `centre` is not merged. `centre` holds the events that findings name.
    """
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
    """Return True if a statement frees a buffer or waits for a stream. Similar neighbours may then share its box."""
    return s.freed is not None or s.orders is Sync.STREAMS


def _place(box: Box) -> tuple[int, bool, bool, int]:
    """Return the sort key for the lane of a box.

    Lanes are sorted by rank. Within a rank, the caller's stream is first, then come the pool's streams by number, and
    communications are last.
    """
    number = box.lane.removeprefix("stream ")
    return box.rank, box.lane == COMMUNICATION, box.lane != "caller", int(number) if number.isdigit() else 0
