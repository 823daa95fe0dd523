"""The bar chart of scores."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import chart
from tests.benchmarks.results_of_a_run import run

SVG = "{http://www.w3.org/2000/svg}"


def drawn(ranks: int = 8, wanted: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(chart.draw(run(ranks, wanted)))


def bars(picture: ElementTree.Element, side: str) -> list[ElementTree.Element]:
    """Return the bars of the rows; they have titles, and the legend's squares do not."""
    rectangles = [group.find(f"{SVG}rect") for group in picture.iter(f"{SVG}g")]
    return [bar for bar in rectangles if bar is not None and bar.get("class") == side]


def text_of(picture: ElementTree.Element) -> str:
    return "\n".join(text.text or "" for tag in ("text", "title") for text in picture.iter(f"{SVG}{tag}"))


def test_a_bar_is_as_high_as_its_score() -> None:
    data = run(wanted="70B")
    picture = ElementTree.fromstring(chart.draw(data))
    for side in ("peer", "ours"):
        heights = [float(bar.get("height", 0)) / chart.HEIGHT for bar in bars(picture, side)]
        scores = [row[f"score_{side}"] for row in sorted(data["rows"], key=lambda row: row["M"])]
        assert heights == pytest.approx(scores, abs=1e-3)


def test_every_row_has_a_bar_for_each_side_inside_the_picture() -> None:
    picture = drawn()
    assert len(bars(picture, "peer")) == len(bars(picture, "ours")) == 19
    places = sorted(float(bar.get("x", 0)) for side in ("peer", "ours") for bar in bars(picture, side))
    assert all(after - before >= chart.BAR for before, after in pairwise(places))
    assert places[0] >= chart.LEFT
    assert places[-1] + chart.BAR <= float(picture.get("width", 0))


def test_required_scores_are_marked_only_in_rows_that_have_one() -> None:
    assert "must reach 0.78" in text_of(drawn())
    assert "goal 0.97" in text_of(drawn())
    assert "must reach" not in text_of(drawn(ranks=4))


def test_pointing_at_a_bar_names_the_candidate_and_its_time() -> None:
    row = run(wanted="8B:2048")["rows"][0]
    expected = f"8B M=2048: {row['best_ours']}: {row['score_ours']:.2f}, {row['ours_us']:.0f} us"
    assert expected in text_of(drawn(wanted="8B:2048"))


def test_a_row_without_a_candidate_has_no_bar() -> None:
    data = run(wanted="8B:2048")
    data["rows"][0] |= {"score_ours": None, "best_ours": None, "ours_us": None}
    picture = ElementTree.fromstring(chart.draw(data))
    assert (len(bars(picture, "peer")), len(bars(picture, "ours"))) == (1, 0)


def test_names_are_escaped() -> None:
    data = run(wanted="8B:2048")
    data["environment"]["gpu"] = "<GPU> & co"
    assert "<GPU> & co" in text_of(ElementTree.fromstring(chart.draw(data)))


def test_a_run_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        chart.draw(run() | {"rows": []})


def test_the_picture_is_written_from_the_results_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run(2, "405B")))
    monkeypatch.setattr("sys.argv", ["chart", str(tmp_path / "run.json"), str(tmp_path / "run.svg")])
    chart.main()
    assert (tmp_path / "run.svg").read_text() == chart.draw(run(2, "405B"))
