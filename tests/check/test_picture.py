"""Pictures of `hostir check FILE --graph OUT.svg`, read back from the SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

import hostir as hi
from hostir.check import check_structure
from hostir.check.findings import Finding
from hostir.check.proof import Analysis, analyse
from hostir.cli.pictures.drawing import INK, draw
from hostir.cli.pictures.layout import WIDE, WIDEST
from hostir.ir.program import format_statement
from tests.golden import Golden
from tests.pages import ROOT

CASES = ROOT / "tests" / "cases"
SVG = "{http://www.w3.org/2000/svg}"


def drawable(folder: str) -> list[Path]:
    """Return the programs of a folder that have no structural errors."""

    def sound(path: Path) -> bool:
        try:
            return not check_structure(hi.parse(path.read_text(), path.name))
        except hi.HostIRError:
            return False

    return [path for path in sorted((CASES / folder).glob("*.hir")) if sound(path)]


EVERY = [*drawable("findings"), *drawable("onesided"), *drawable("nvfuser"), CASES / "patterns" / "mlp-pipeline.hir"]
each = pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)


@dataclass(frozen=True)
class Box:
    title: str
    left: float
    top: float
    right: float
    bottom: float
    red: bool


class Picture:
    """An SVG picture of a program, parsed into boxes, paths and words."""

    def __init__(self, program: hi.Program, analysis: Analysis) -> None:
        self.program, self.analysis = program, analysis
        self.text = draw(program, analysis)
        self.root = ET.fromstring(self.text)
        self.width, self.height = (float(self.root.attrib[side]) for side in ("width", "height"))
        self.boxes = [box for group in self.root.iter(f"{SVG}g") for box in self._boxes(group)]
        self.words = [text.text or "" for text in self.root.iter(f"{SVG}text")]

    def _boxes(self, group: ET.Element) -> list[Box]:
        title, frame = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is None or frame is None:
            return []
        x, y, w, h = (float(frame.attrib[a]) for a in ("x", "y", "width", "height"))
        return [Box(title.text or "", x, y, x + w, y + h, "red" in frame.attrib["class"])]

    def paths(self, style: str, ink: str | None = None) -> list[str]:
        every = self.root.iter(f"{SVG}path")
        return [p.attrib["d"] for p in every if p.get("class") == style and p.get("stroke") == ink]

    @property
    def red(self) -> list[str]:
        return [box.title for box in self.boxes if box.red]


def picture(text: str, **sizes: int) -> Picture:
    program = hi.parse(text)
    return Picture(program, analyse(program, sizes))


@cache
def case(path: Path | str) -> Picture:
    return picture((CASES / path).with_suffix(".hir").read_text())


# Every program ----------------------------------------------------------------------------------------------------
@each
def test_boxes_do_not_overlap(path: Path) -> None:
    drawn = case(path)
    for a, b in combinations(drawn.boxes, 2):
        apart = a.right < b.left or b.right < a.left or a.bottom < b.top or b.bottom < a.top
        assert apart, f"{a.title} and {b.title}"


@each
def test_nothing_is_drawn_outside_the_view_box(path: Path) -> None:
    drawn = case(path)
    assert drawn.root.attrib["viewBox"] == f"0 0 {drawn.width:g} {drawn.height:g}"
    for rect in drawn.root.iter(f"{SVG}rect"):
        if rect.get("width") != "100%":
            x, y, w, h = (float(rect.attrib[a]) for a in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= drawn.width
            assert 0 <= y <= y + h <= drawn.height
    for way in drawn.paths("conflict") + [way for ink in INK.values() for way in drawn.paths("arrow", ink)]:
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", way):
            assert 0 <= float(x) <= drawn.width, way
            assert 0 <= float(y) <= drawn.height, way
    for text in drawn.root.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["y"]) < drawn.height
        if text.get("class") in ("quiet", "finding", "title"):
            assert float(text.attrib["x"]) + 5.5 * len(text.text or "") < drawn.width, text.text


@each
def test_exactly_the_statements_of_findings_are_red(path: Path) -> None:
    drawn = case(path)
    findings = [f for f in drawn.analysis.findings if isinstance(f, Finding) and f.events]
    stuck = [f for f in findings if f.category == "deadlock"]
    wanted = {
        ("the caller" if s is None else format_statement(s, drawn.program), id(s), e.rank, e.rounds[:1], e.call)
        for f in stuck or findings
        for e in f.events
        for s in [e.statement]
    }
    assert len(drawn.red) == len(wanted)
    for text, _, rank, rounds, call in wanted:
        place = f"rank {rank}, .*" + "".join(f"round {n}.*" for n in rounds) + f"call {call + 1}"
        assert any(re.fullmatch(f"{re.escape(text)}.*\n{place}", title) for title in drawn.red), (text, place)


@each
def test_every_finding_is_listed(path: Path) -> None:
    drawn = case(path)
    words = " ".join(drawn.words)
    assert f"@{drawn.program.name}: {len(drawn.analysis.findings) or 'no'} finding" in words
    for finding in drawn.analysis.findings:
        assert finding.message in words
        assert finding.hint in words


@each
def test_a_program_always_gives_the_same_picture(path: Path) -> None:
    assert picture(path.read_text()).text == case(path).text


# Boxes and arrows -------------------------------------------------------------------------------------------------
FORK = """hostir 1
mesh @mesh [didx] = 0
program @fork(%x: f32[8]) -> (%y, %z) streams 2 {
  %user = current_stream
  %y: f32[8] = allocate
  %z: f32[8] = allocate
  set_stream 0
  synchronize %user
  relu %x -> %y
  set_stream 1
  synchronize %user
  gelu %x -> %z
  set_stream %user
  synchronize 0
  relu %y -> %y
  synchronize 1
}
"""


def test_arrows_show_orders_that_other_arrows_do_not_imply() -> None:
    drawn = picture(FORK)
    assert len(drawn.boxes) == 9
    # Two forks, two joins, two workers with one step each, and three of the four steps of the caller's stream:
    # the relu implies that the first 'synchronize' comes after the beginning.
    assert len(drawn.paths("arrow", INK["order"])) == 1 + 2 + 2 + 2 + 3
    assert len(drawn.paths("arrow", INK["ranks"])) == 2  # in the legend
    assert drawn.red == []


def test_a_box_stands_right_of_what_comes_before_it() -> None:
    left = {box.title.split()[0] + box.title.split("\n")[1]: box.left for box in picture(FORK).boxes}
    caller, workers = "rank 0, caller's stream, call 1", [f"rank 0, stream {n}, call 1" for n in range(2)]
    assert left[f"synchronize{workers[0]}"] < left[f"relu{workers[0]}"] < left[f"relu{caller}"]
    assert left[f"relu{workers[0]}"] == left[f"gelu{workers[1]}"]  # nothing orders the workers


def test_the_ranks_of_a_collective_are_drawn_above_each_other() -> None:
    drawn = case("patterns/allgather_matmul-pipeline")
    sides: dict[str, set[float]] = {}
    for box in drawn.boxes:
        if "allgather" in box.title:
            sides.setdefault(box.title.split(", ")[-2], set()).add(box.left)
    assert len(sides) == 3  # the picture has room for 3 of 4 rounds
    assert all(len(places) == 1 for places in sides.values())


def test_the_ranks_of_a_barrier_are_connected_even_if_earlier_statements_are_not_drawn() -> None:
    drawn = case("findings/kernel_keeps_its_producer_out")
    assert any("round 1 of loops not drawn" in words for words in drawn.words)
    barriers = [box for box in drawn.boxes if box.title.startswith("barrier")]
    (x,) = {(box.left + box.right) / 2 for box in barriers}
    assert [way for way in drawn.paths("arrow", INK["meets"]) if way.startswith(f"M{x:g} {barriers[0].bottom:g}V")]


def test_a_race_is_a_dashed_line() -> None:
    drawn = case("findings/race_between_streams")
    assert len(drawn.paths("conflict")) == 1
    assert drawn.paths("arrow", INK["red"]) == []
    assert "1: race on %t" in drawn.words


def test_a_deadlock_is_a_cycle_of_red_arrows() -> None:
    drawn = case("findings/ring_of_sends")
    assert len(drawn.paths("arrow", INK["red"])) == len(drawn.red) == 8
    assert drawn.paths("conflict") == []
    assert "1: deadlock" in drawn.words


def test_a_kernel_that_holds_the_sms_is_a_cycle_with_a_dashed_step() -> None:
    drawn = case("findings/kernel_keeps_its_producer_out")
    assert len(drawn.paths("conflict")) == 1  # from the matmul to the relu that it blocks
    assert len(drawn.paths("arrow", INK["red"])) == 3  # relu, put, signal, matmul


def test_an_order_between_ranks_has_another_colour() -> None:
    legend = 2
    arrows = case("findings/get_without_signal.fixed.hir").paths("arrow", INK["ranks"])
    assert len(arrows) == legend + 2 + 1  # two signals and a barrier


# Statements that are not drawn ------------------------------------------------------------------------------------
def test_one_call_is_drawn_unless_a_finding_spans_two_calls() -> None:
    assert "call 1 of 2" in case("findings/put_without_signal").words
    across = case("findings/reused_by_the_next_call")
    assert "calls 1 to 2 of 2" in across.words
    assert {title[-1] for title in across.red} == {"1", "2"}


def test_one_of_the_ranks_without_findings_is_drawn() -> None:
    drawn = case("nvfuser/seed_3606")
    assert {box.title.split("\n")[1].split(",")[0] for box in drawn.boxes} == {"rank 0", "rank 1"}
    assert any("ranks 2 to 7 alike, not drawn" in words for words in drawn.words)


def test_ranks_that_differ_are_not_called_alike() -> None:
    drawn = picture("""hostir 1
mesh @mesh [didx] = 0 1 2 3
program @last(%x: f32[4@didx, 8]) -> (%y) {
  %r = rank of %x over didx
  %y: f32[4@didx, 8] = allocate
  if %r == 3 { relu %x -> %y }
  if %r / 3 == 0 { gelu %x -> %y }
}
""")
    assert "call 1 of 2; ranks 2 to 3 not drawn" in drawn.words


@pytest.mark.parametrize("rounds", [24, 120])
def test_rounds_far_from_the_conflict_are_not_drawn(rounds: int) -> None:
    drawn = picture((CASES / "nvfuser" / "seed_3606.hir").read_text(), i0=rounds)
    assert drawn.width <= WIDEST
    assert drawn.red
    assert any(re.search(rf"rounds \d+ to {rounds - 1} of loops not drawn", words) for words in drawn.words)


def test_statements_near_the_conflict_of_a_long_program_are_drawn() -> None:
    steps = "\n".join("  relu %x -> %t" for _ in range(300))
    drawn = picture(f"""hostir 1
mesh @mesh [didx] = 0
program @long(%x: f32[8]) -> (%y) streams 1 {{
  %user = current_stream
  %t: f32[8] = allocate
  %y: f32[8] = allocate
  set_stream 0
  synchronize %user
{steps}
  relu %x -> %y
  set_stream %user
  gelu %x -> %y
  synchronize 0
  free %t
}}
""")
    assert drawn.width <= WIDEST
    assert [title.split("\n")[0] for title in drawn.red] == ["relu %x -> %y", "gelu %x -> %y"]
    assert f"call 1 of 2; {307 - len(drawn.boxes)} statements farther off not drawn" in drawn.words


def test_a_program_that_cannot_be_traced_shows_its_findings_without_boxes() -> None:
    drawn = picture("""hostir 1
mesh @mesh [didx] = 0
program @far(%x: f32[8]) -> (%y) streams 2 {
  %y: f32[8] = allocate
  for %i in 0..4 { set_stream %i }
  relu %x -> %y
}
""")
    assert drawn.boxes == []
    assert any("there is no stream 2" in words for words in drawn.words)


def test_the_picture_in_the_docs_is_up_to_date(pytestconfig: pytest.Config) -> None:
    drawn = case("findings/nvfuser_3606")
    assert drawn.width <= WIDE
    Golden(ROOT / "docs" / "images", accept=pytestconfig.getoption("accept"))("race.svg", drawn.text)
