"""The picture of a warm call on the host."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from benchmarks.host_timeline import COLOURS, KINDS, LEFT, WIDTH, Stamped, draw, main, report, stamped
from hostir.machines.cuda.taped import IssuedSteps


class Tape:
    """A tape of the native launcher."""

    def run(self, registers: list[object]) -> None:
        time.sleep(0.002)


SPANS = [("rest", "checks", 0.0, 2.0), ("native", "<segment>", 2.0, 12.0), ("rest", "return", 12.0, 13.0)]


@pytest.mark.parametrize("taped", [False, True])
def test_the_spans_of_a_call_are_its_checks_its_steps_and_its_return(taped: bool) -> None:
    def product() -> None:
        time.sleep(0.004)

    def copy() -> None: ...

    issued = IssuedSteps([partial(Tape().run, []), product] if taped else [copy, product], [0, 1, 2])
    tapes = SimpleNamespace(latest=issued, by_key={"seen": issued, "seen once": None}) if taped else None
    ops = [SimpleNamespace(by_group=False), SimpleNamespace(by_group=True)]
    plan = SimpleNamespace(steps=[copy, product], ops=ops, in_captures={}, tapes=tapes, in_python=issued)
    plan.unrolled = SimpleNamespace(text=lambda op: "copy" if op is ops[0] else "allgather")

    def run(*arguments: object) -> None:
        assert arguments == (1, 2)
        for step in (plan.tapes.by_key["seen"] if taped else plan.in_python).steps:
            step()

    plan.run, stamps = run, Stamped()
    stamped(SimpleNamespace(latest=SimpleNamespace(plan=plan)), stamps)
    spans = stamps.spans(lambda: plan.run(1, 2), 3, partial(time.sleep, 0))
    first = ("native", "native code") if taped else ("step", "copy")
    kinds = [("rest", "checks"), first, ("torch", "allgather"), ("rest", "return")]
    assert [(kind, text) for kind, text, _, _ in spans] == kinds
    assert [end for *_, end in spans[:-1]] == [begin for _, _, begin, _ in spans[1:]]
    assert spans[2][3] - spans[2][2] >= 4000


def test_the_boxes_of_the_picture_are_as_long_as_the_spans_and_the_table_adds_them_up() -> None:
    ways = {"by hand": [("torch", "mm", 0.0, 26.0)], "ring & native": SPANS}
    whole = {"by hand": 25.0, "ring & native": 11.5}
    data = {"ways": ways, "whole": whole, "ranks": 2, "environment": {"gpus": 2, "gpu": "<GPU>"}}
    boxes = [box for box in ElementTree.fromstring(draw(data)).iter() if box.findall("{*}title")]
    assert [box[0].text for box in boxes] == ["mm: 26.0 us", "checks: 2.0 us", "<segment>: 10.0 us", "return: 1.0 us"]
    assert [box.get("fill") for box in boxes] == [COLOURS[kind] for spans in ways.values() for kind, *_ in spans]
    assert [float(box.get("x", 0)) for box in boxes] == [
        LEFT,
        LEFT,
        round(LEFT + WIDTH / 13, 1),
        round(LEFT + 12 * WIDTH / 26, 1),
    ]
    assert float(boxes[2].get("width", 0)) == pytest.approx(10 * WIDTH / 26 - 0.6, abs=0.1)
    assert report(ways, whole).splitlines()[-1] == "| ring & native |  |  | 10.0 | 3.0 | 13.0 | 11.5 |"
    assert set(COLOURS) == set(KINDS)


def test_without_gpus_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "it needs several ranks on GPUs" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--draw", str(tmp_path / "none.json"), str(tmp_path / "none.svg")])
    assert "none.json: write them with --out" in capsys.readouterr().err
