"""The chart of steps of models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.steps_chart import CLASS, HEIGHT, MOST, cases, draw

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/2xH100"


def test_the_bars_show_how_much_faster_each_way_is_in_one_order() -> None:
    drawn = list(cases(RESULTS))
    picture = ElementTree.fromstring(draw(drawn, {"gpus": 2, "gpu": "<GPU> & co"}))
    shown = []
    for group in picture.iter("{http://www.w3.org/2000/svg}g"):
        title, bar = group
        assert title.text is not None
        ratio = float(re.findall(r"([\d.]+) x$", title.text)[0])
        assert abs(float(bar.get("height", 0)) / HEIGHT * MOST - ratio) < 0.01
        shown.append((title.text.split(":")[0], bar.get("class"), ratio))
    assert shown == [
        (f"{case.kind}, {case.name}", CLASS[way], round(case.base / case.times[way], 2))
        for case in drawn
        for way in CLASS
        if way in case.times
    ]
    classes = [kind for name, kind, _ in shown if name.startswith("training")]
    assert classes == ["peer", "ours", "layers"]


def test_the_picture_of_the_page_is_up_to_date() -> None:
    environment = json.loads((RESULTS / "train.json").read_text())["environment"]
    assert (ROOT / "docs/images/steps.svg").read_text() == draw(list(cases(RESULTS)), environment)
