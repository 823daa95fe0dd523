"""Choose the ranks, rounds and statements that a picture shows, and describe the parts that it leaves out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hostir.check.findings import Finding
from hostir.check.ordering.order import Order
from hostir.check.proof import Analysis
from hostir.cli.pictures.layout import TITLE_LENGTHS, WIDE, WIDEST, scene_width
from hostir.cli.pictures.scene import Box, Scene, boxes_of, closest, merged, nearby, stage
from hostir.ir.program import Program

MAX_BOXES, MIN_BOXES, MAX_RANKS, MAX_FINDINGS = 150, 16, 8, 4  # limits of a picture


def choose(program: Program, analysis: Analysis, order: Order) -> tuple[Scene, list[str]]:
    """Return a scene with as many rounds of loops as fit on a page, and lines that describe the parts left out."""
    numbered = {n: f for n, f in enumerate(analysis.findings, 1) if isinstance(f, Finding) and f.events}
    deadlocks = {n: f for n, f in numbered.items() if f.category == "deadlock"}  # they may cause the other findings
    findings = dict(list((deadlocks or numbered).items())[:MAX_FINDINGS])
    centre = {event for f in findings.values() for event in f.events}
    calls = 1 + max((event.call for event in centre), default=0)
    ranks = _ranks(program, {event.rank for event in centre})
    boxes = boxes_of(program, order, ranks, calls, centre)
    rounds = sorted({box.rounds[0][0] for box in boxes if box.rounds})

    def near(reach: int) -> list[Box]:
        return merged(nearby(boxes, centre, reach), centre)

    def scene(shown: Sequence[Box]) -> Scene:
        return stage(order, shown, findings)

    def too_much(reach: int) -> bool:
        shown = near(reach)
        return len(shown) > MAX_BOXES or scene_width(scene(shown), TITLE_LENGTHS[-1]) > WIDE

    candidates = near(max(0, bisect_left(range(1 + max(rounds, default=0)), True, key=too_much) - 1))
    drawn_rounds = {turn[0] for box in candidates for turn in box.rounds}
    most = MAX_BOXES
    chosen = scene(closest(candidates, centre, most))
    while most > MIN_BOXES and scene_width(chosen, TITLE_LENGTHS[-1]) > WIDEST:
        most -= most // 4
        chosen = scene(closest(candidates, centre, most))
    left_out = [
        f"{_spans('call', range(1, calls + 1))} of {order.ranks[0].turn}",
        _ranks_left_out(program, order, ranks),
        _unless_empty(_spans("round", [n for n in rounds if n not in drawn_rounds]), "of loops not drawn"),
        _unless_empty(count(len(candidates) - len(chosen.boxes), "statement"), "farther off not drawn"),
        _unless_empty(count(len(numbered) - len(findings), "finding"), "more not marked"),
    ]
    return chosen, [text for text in left_out if text]


def _ranks(program: Program, named: set[int]) -> list[int]:
    """Return the ranks to draw: the ranks that findings name, and one more. If findings name no rank, draw two ranks.

    `named` are the ranks that findings name. At most MAX_RANKS ranks of `named` are drawn.
    """
    others = [rank for rank in range(program.ranks) if rank not in named]
    return sorted({*sorted(named)[:MAX_RANKS], *others[: 1 if named else 2]})


def _ranks_left_out(program: Program, order: Order, ranks: Sequence[int]) -> str:
    """Return a line that lists the ranks that are not drawn; an empty text if all ranks are drawn.

    The line says "alike" if each rank that is not drawn issues the same events as a rank that is drawn.
    """

    def issued(rank: int) -> list[object]:
        return [(id(e.statement), e.rounds, e.verb, e.stream) for e in order.ranks[rank].events]

    others = [rank for rank in range(program.ranks) if rank not in ranks]
    drawn = [issued(rank) for rank in ranks]
    alike = all(issued(rank) in drawn for rank in others)
    return _unless_empty(_spans("rank", others), "alike, not drawn" if alike else "not drawn")


def _unless_empty(subject: str, predicate: str) -> str:
    return subject and f"{subject} {predicate}"


def _spans(noun: str, numbers: Sequence[int]) -> str:
    """Return a noun with ascending numbers, such as "ranks 0, 2 to 7". Without numbers, return an empty text."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][-1] + 1:
            spans[-1][1:] = [n]
        else:
            spans.append([n])
    text = ", ".join(" to ".join(map(str, span)) for span in spans)
    return text and f"{noun}{'s' if len(numbers) > 1 else ''} {text}"


def count(number: int, noun: str) -> str:
    """Return a number with a noun, such as "1 round" or "2 rounds". For 0, return an empty text."""
    return f"{number} {noun}{'s' if number > 1 else ''}" if number else ""
