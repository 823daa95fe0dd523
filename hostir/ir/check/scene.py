"""What a picture of an analysis shows: statements as boxes in lanes and columns, and what orders them.

Columns are the depth in happens-before: a box stands right of all that comes before it, and sides of one communication
stand above each other. Arrows within a rank also stand for chains through what is left out; arrows from rank to rank
only for those through ranks that are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from typing import Any, Literal

from hostir.ir.check.findings import Finding
from hostir.ir.check.order import Order
from hostir.ir.check.tracer import CALLER, Event
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Allocate, FreeBuffer, Synchronize
from hostir.ir.onesided_ops import Barrier, Copy
from hostir.ir.p2p_ops import Message
from hostir.ir.program import Program, format_statement

COMMUNICATION, COMPUTATION, OTHER = "communication", "computation", "other"  # kinds of boxes; the first is a lane, too
CIRCLES = ("deadlock", "SMs held")  # findings whose events wait for each other all around
EARLY = ("begins", "moves")  # of a communication's events, those that need not have met other ranks
MERGED = (FreeBuffer, Synchronize)  # statements that share a box with those of the kind that they follow
Way = Literal["order", "ranks", "meets"]  # of an arrow: within a rank, to another, between sides of a communication
Tie = tuple[int, ...]  # events that happen together


@dataclass(eq=False)
class Box:
    """A statement of one rank in one round and call, several like it in a row, or the caller's. `last` is included."""

    rank: int
    lane: str
    kind: str
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
        """The rounds."""
        ends = dict.fromkeys((*self.rounds[:1], *self.rounds[-1:]))
        return f"[{' to '.join(map(_list, ends))}] " if ends else ""


@dataclass(frozen=True)
class Arrow:
    """`source` comes before `target`; the columns are those of the events that say so. `back`: it closes a circle."""

    source: Box
    target: Box
    leaves: int
    enters: int
    way: Way
    back: bool = False


@dataclass(frozen=True)
class Mark:
    """A finding in the picture: its boxes, the pairs that are in conflict, and the arrows that make a circle."""

    number: int
    finding: Finding
    boxes: tuple[Box, ...]
    pairs: tuple[tuple[Box, Box], ...]
    circle: tuple[Arrow, ...] = ()


@dataclass(frozen=True)
class Scene:
    """What is drawn."""

    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    marks: Sequence[Mark]

    @property
    def columns(self) -> int:
        return 1 + max((box.last for box in self.boxes), default=-1)

    @property
    def lanes(self) -> dict[tuple[int, str], int]:
        """How many rows each lane has, by rank and name, from the top."""
        rows: dict[tuple[int, str], int] = {}
        for box in sorted(self.boxes, key=_place):
            rows[box.rank, box.lane] = max(rows.get((box.rank, box.lane), 0), box.row + 1)
        return rows


def boxes_of(program: Program, order: Order, ranks: Iterable[int], calls: int, named: Set[Event]) -> list[Box]:
    """The boxes of some ranks in the first calls, as issued. Allocations have one where a finding names them."""
    found: dict[tuple[object, ...], Box] = {}
    for event in (e for rank in ranks for e in order.ranks[rank].events):
        if event.call >= calls or (event.verb == "allocates" and event not in named):
            continue
        what = id(event.statement) if event.statement else event.verb == "writes"
        key = (event.rank, event.call, what, event.rounds)
        if key not in found:
            found[key] = _box(program, event, calls)
        found[key].events.append(event)
    return list(found.values())


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
    moves = isinstance(s, Communication | Message)
    lane = COMMUNICATION if moves else "caller" if event.stream == CALLER else event.stream
    kind = COMMUNICATION if moves or isinstance(s, Copy) else COMPUTATION if event.sms and not event.small else OTHER
    operands = text.split(s.keyword(), 1)[1].split(" over ")[0].replace("->", "→").strip()
    if isinstance(s, Allocate):
        operands = f"{s.out}"
    return Box(event.rank, lane, kind, s.keyword(), operands, f"{text}\n{where}", [rounds] if rounds else [])


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def stage(order: Order, boxes: Sequence[Box], findings: Mapping[int, Finding]) -> Scene:
    """Puts boxes into columns and rows, with arrows for what orders them and marks for numbered findings."""
    if not boxes:
        return Scene((), (), ())
    events = [event for box in boxes for event in box.events]
    owner_of = {event: box for box in boxes for event in box.events}
    owners = [owner_of[event] for event in events]
    graph = _between(order, events, held=any(finding.kind in CIRCLES for finding in findings.values()))
    early = [n for n, event in enumerate(events) if event.verb in EARLY]  # where ranks differ, no edge leads on
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
    circle = {(arrow.source, arrow.target) for mark in marks for arrow in mark.circle}
    return Scene(boxes, [a for a in arrows if (a.target, a.source) not in circle], marks)


def _between(order: Order, shown: Sequence[Event], held: bool) -> Any:
    """A graph of events by place in `shown`: an edge wherever a chain leads from one to another past the rest.

    What may hold an event up is in it only if `held`: nobody may rely on it, but it closes circles.
    """
    import networkx as nx

    last = max(event.call for event in shown)
    events = [event for event in order.events if event.call <= last]
    number = {event: n for n, event in enumerate(events)}
    bit = {number[event]: 1 << n for n, event in enumerate(shown)}
    whole = nx.DiGraph()
    whole.add_nodes_from(range(len(events)))
    for n, event in enumerate(events):
        whole.add_edges_from((number[before], n) for before in (*event.after, *(event.held if held else ())))
    ranks = {event.rank for event in shown}
    outside = [event.rank not in ranks or event.verb == "meets" for event in events]
    seen = [0] * len(events)  # for each event, as bits: which of those shown lead to it past the rest
    near = [0] * len(events)  # the same, through other ranks only
    groups = nx.condensation(whole)
    for group in nx.topological_sort(groups):
        members, stable = sorted(groups.nodes[group]["members"]), False
        while not stable:
            before = [(seen[n], near[n]) for n in members]
            for n in members:
                for other in whole.predecessors(n):
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
    """The edges that close circles: all within one that lead to another rank, or to what was issued earlier."""
    import networkx as nx

    found: list[tuple[int, int]] = []
    for circle in nx.strongly_connected_components(graph):
        inner = graph.subgraph(circle).edges
        found += [
            (a, b) for a, b in inner if owners[a].rank != owners[b].rank or (a > b and owners[a] is not owners[b])
        ]
    return sorted(found)


def _columns(graph: Any, owners: Sequence[Box]) -> dict[int, int]:
    """The longest way to each event, in boxes."""
    import networkx as nx

    columns: dict[int, int] = {}
    for n in nx.lexicographical_topological_sort(graph):
        before = graph.predecessors(n)
        columns[n] = max((columns[m] + (not _beside(owners[m], owners[n])) for m in before), default=0)
    return columns


def _beside(a: Box, b: Box) -> bool:
    """Whether two boxes are one, or sides of one communication: ranks order each other's only where these meet."""
    if a is b or a.rank == b.rank or not a.lane == b.lane == COMMUNICATION:
        return a is b
    return a.word == b.word or all(isinstance(box.events[0].statement, Message) for box in (a, b))


def _stack(boxes: Iterable[Box]) -> None:
    """Gives each box the first row of its lane in which its columns are free."""
    ends: dict[tuple[int, str], list[int]] = {}
    for box in sorted(boxes, key=lambda box: box.first):
        rows = ends.setdefault((box.rank, box.lane), [])
        box.row = next((row for row, end in enumerate(rows) if end < box.first), len(rows))
        rows[box.row : box.row + 1] = [box.last]


def _arrows(
    graph: Any, back: Sequence[tuple[int, int]], owners: Sequence[Box], columns: Mapping[int, int], ties: Iterable[Tie]
) -> list[Arrow]:
    """An arrow for each pair of boxes that an edge joins which no others imply; ties in place of those they explain."""
    import networkx as nx

    found: dict[tuple[Box, Box], Arrow] = {}
    tied = {(owners[a].rank, b) for sides in ties for a, b in permutations(sides, 2)}
    for a, b in (step for sides in ties for step in pairwise(sides)):
        found[owners[a], owners[b]] = Arrow(owners[a], owners[b], columns[a], columns[b], "meets")
    for edges, closes in ((sorted(nx.transitive_reduction(graph).edges), False), (back, True)):
        for a, b in edges:
            source, target = owners[a], owners[b]
            if source is target or (source.rank, b) in tied:
                continue
            level = not closes and columns[a] == columns[b]
            way: Way = "meets" if level else "ranks" if source.rank != target.rank else "order"
            leaves, enters = (max(columns[n], owners[n].first) for n in (a, b))
            found.setdefault((source, target), Arrow(source, target, leaves, enters, way, closes))
    return list(found.values())


def _barriers(events: Sequence[Event], columns: Mapping[int, int]) -> list[Tie]:
    """The sides of each barrier, in the order of ranks, where they stand above each other."""
    sides: dict[tuple[Event, int], list[int]] = {}
    for n, event in enumerate(events):
        for come in event.after if isinstance(event.statement, Barrier) else ():
            if come.verb == "meets":
                sides.setdefault((come, columns[n]), []).append(n)
    return [tuple(side) for side in sides.values()]


def _marks(findings: Mapping[int, Finding], owner: Mapping[Event, Box], arrows: Sequence[Arrow]) -> list[Mark]:
    marks = []
    for number, finding in findings.items():
        boxes = tuple(dict.fromkeys(owner[event] for event in finding.events if event in owner))
        pairs, circle = list(pairwise(boxes)), list[Arrow]()
        if finding.kind in CIRCLES:
            pairs, circle = _around(boxes, arrows)
        if boxes:
            marks.append(Mark(number, finding, boxes, tuple(pairs), tuple(circle)))
    return marks


def _around(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> tuple[list[tuple[Box, Box]], list[Arrow]]:
    """The arrows that lead from each box of a circle to the next, and the pairs between which there are none."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(boxes)
    for arrow in arrows:
        graph.add_edge(arrow.source, arrow.target, arrow=arrow)
    apart, circle = [], []
    for a, b in zip(boxes, (*boxes[1:], *boxes[:1]), strict=True):
        if not nx.has_path(graph, a, b):
            apart.append((a, b))
            continue
        circle += [graph.edges[step]["arrow"] for step in pairwise(nx.shortest_path(graph, a, b))]
    return apart, circle


def nearby(boxes: Iterable[Box], centre: Set[Event], reach: int) -> list[Box]:
    """The boxes outside loops, and those at most `reach` rounds of an outermost loop away from where the events are."""
    rounds = {event.rounds[0] for event in centre if event.rounds} or {0}
    return [box for box in boxes if not box.rounds or min(abs(box.rounds[0][0] - r) for r in rounds) <= reach]


def closest(boxes: Sequence[Box], centre: Set[Event], most: int) -> list[Box]:
    """At most so many boxes: those that their rank issues next to where the events are."""
    first: dict[int, int] = {}  # box of a rank
    turns = [first.setdefault(box.rank, n) for n, box in enumerate(boxes)]
    places = [n - turns[n] for n, box in enumerate(boxes) if not centre.isdisjoint(box.events)] or [0]
    far = [min(abs(n - turn - place) for place in places) for n, turn in enumerate(turns)]
    chosen = sorted(range(len(boxes)), key=lambda n: (far[n], n))[:most]
    return [boxes[n] for n in sorted(chosen)]


def merged(boxes: Iterable[Box], centre: Set[Event]) -> list[Box]:
    """The boxes, with one for all that a stream frees or waits for in a row, where no finding tells them apart."""
    found: list[Box] = []
    for box in boxes:
        before = found[-1] if found else box
        if before is box or not _alike(before, box) or not centre.isdisjoint((*before.events, *box.events)):
            found.append(replace(box))
            continue
        operands = ", ".join(dict.fromkeys([*before.operands.split(", "), box.operands]))
        title, rounds = f"{before.title}\n{box.title}", list(dict.fromkeys((*before.rounds, *box.rounds)))
        events = [*before.events, *box.events]
        found[-1] = replace(before, operands=operands, title=title, rounds=rounds, events=events)
    return found


def _alike(a: Box, b: Box) -> bool:
    one, other = a.events[0], b.events[0]
    same = (a.rank, a.lane, a.word, one.call) == (b.rank, b.lane, b.word, other.call)
    return same and isinstance(one.statement, MERGED)


def _place(box: Box) -> tuple[int, bool, bool, int]:
    """Sorts lanes: of each rank the caller's stream, the pool in order, communications."""
    number = box.lane.removeprefix("stream ")
    return box.rank, box.lane == COMMUNICATION, box.lane != "caller", int(number) if number.isdigit() else 0
