"""Traces of simulated ranks, as Chrome traces and as SVG pictures."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from examples import patterns
from hostir.call.random import random_inputs
from hostir.ir import parse
from hostir.ir.source import HostIRError
from hostir.lower import lower
from hostir.machines.trace import COLORS, Trace, TraceEvent
from tests.call.programs import AG_MATMUL, TRANSFERS
from tests.call.whole import run_whole


def traced(text: str, sizes: dict[str, int]) -> Trace:
    program = parse(text)
    trace = Trace(title=f"{program.name} <of> 4 & more")
    run_whole(program, random_inputs(program, sizes), trace=trace)
    return trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced(AG_MATMUL, {"M": 3, "K": 8, "N": 5})


def test_every_statement_that_takes_time_is_an_event_of_its_stream(trace: Trace) -> None:
    assert trace.lanes == {rank: ["stream 0", "stream 1", "communication"] for rank in range(4)}
    for rank in range(4):
        events = sorted((e.stream, e.label, e.activity) for e in trace.events if e.rank == rank)
        gathers = [("communication", f"allgather {i}", "communication") for i in range(4)]
        matmuls = [(f"stream {i % 2}", f"matmul {i}", "matmul") for i in (0, 2, 1, 3)]
        assert events == gathers + matmuls


def test_events_are_placed_as_if_streams_ran_concurrently(trace: Trace) -> None:
    for rank in range(4):
        at = {e.label: e for e in trace.events if e.rank == rank}
        for i in range(4):
            assert at[f"allgather {i}"].end <= at[f"matmul {i}"].start
        assert at["matmul 0"].end <= at["allgather 2"].start, "on one stream, the gather follows the matmul"
        assert at["allgather 1"].start < at["matmul 0"].end, "on different streams, they overlap"
        for lane in trace.lanes[rank]:
            ends = sorted((e.start, e.end) for e in trace.events if (e.rank, e.stream) == (rank, lane))
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


LATE = """hostir 1
mesh @mesh [didx] = 0 1
program @late(%x: f32[2@didx, 64, 64], %b: f32[64, 64]) -> (%y) {
  %r = rank of %x over didx
  %box: f32[2@didx, 64, 64] = allocate_symmetric
  %f: flag[1] = allocate_symmetric
  %t: f32[2@didx, 64, 64] = allocate
  %y: f32[2@didx, 64, 64] = allocate
  barrier of %x over didx
  if %r == 0 {
    matmul %x, %b -> %t
    put %t -> %box at 1 over didx
    signal %f[0] = 1 at 1 over didx
    relu %t -> %y
  }
  if %r == 1 { wait_signal %f[0] >= 1   relu %box -> %y }
  free %t
}
"""


def test_what_waits_for_a_flag_begins_after_the_signal() -> None:
    at = {(e.rank, e.keyword): e for e in traced(LATE, {}).events}
    assert at[1, "relu"].start >= at[0, "put"].end


def test_rows_that_arrive_while_a_kernel_waits_are_marked(tmp_path: Path) -> None:
    trace = Trace()
    program = lower(patterns.moe_layer(ranks=3, S=1, M=4, K=6, H=6), "fused")
    run_whole(program, random_inputs(program, {}), trace=trace)
    sent = [(e.rank, e.end) for e in trace.events if e.statement.startswith("put %x_dense ->")]
    assert len(sent) == 9
    for rank in range(3):
        (kernel,) = [e for e in trace.events if e.rank == rank and "grouped_matmul %x_full, %gate" in e.statement]
        marks = [m for m in trace.marks if m.rank == rank]
        assert sorted(m.text.split(":")[0] for m in marks) == [f"block {n} of 3 is there" for n in range(3)]
        for mark in marks:
            assert kernel.start <= mark.at <= kernel.end
            assert mark.at >= min(end for sender, end in sent if sender == int(mark.text.split()[1]))
    trace.to_svg(tmp_path / "trace.svg")
    root = ElementTree.parse(tmp_path / "trace.svg").getroot()
    assert len([path for path in root.iter() if path.get("class") == "mark"]) == len(trace.marks) == 9
    trace.to_chrome(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {row["name"] for row in rows if row["ph"] == "i"} == {m.text for m in trace.marks}


def test_each_team_of_a_rank_has_a_lane() -> None:
    trace = traced(TRANSFERS, {"K": 3})
    assert trace.lanes[0] == ["communication (0 1 2)", "communication (0 1)"]


def test_a_chrome_trace_has_a_process_for_each_rank_and_a_track_for_each_stream(trace: Trace, tmp_path: Path) -> None:
    trace.to_chrome(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    tracks = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    bars = [row for row in rows if row["ph"] == "X"]
    assert len(bars) == len(trace.events)
    assert min(row["ts"] for row in bars) == 0
    for row in bars:
        assert row["dur"] >= 0
        stream = tracks[row["pid"], row["tid"]]
        assert stream == "communication" if row["name"].startswith("%h = allgather") else stream.startswith("stream ")
    assert {"%h = allgather %a_i -> %g_i over didx", "matmul %g_i, %b -> %c_i"} == {row["name"] for row in bars}
    assert {tuple(row["args"]["rounds"]) for row in bars} == {(i,) for i in range(4)}


def test_the_picture_is_well_formed_and_shows_every_event(trace: Trace, tmp_path: Path) -> None:
    trace.to_svg(tmp_path / "trace.svg")
    root = ElementTree.parse(tmp_path / "trace.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    bars = [g.find(f"{svg}rect") for g in root.iter(f"{svg}g")]
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    assert len(bars) == len(trace.events)
    assert {bar.attrib["fill"] for bar in bars} == {COLORS["communication"], COLORS["matmul"]}
    for bar in bars:
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height
    texts = {text.text for text in root.iter(f"{svg}text")}
    assert {"rank 0", "rank 3", "stream 1", "communication", "matmul", "ag_matmul <of> 4 & more"} <= texts


@pytest.mark.parametrize(
    ("span", "last"), [(1e-6, "1 us"), (0.95e-3, "900 us"), (1e-3, "1 ms"), (0.13, "120 ms"), (7.3, "7 s")]
)
def test_the_time_axis_has_round_marks(span: float, last: str, tmp_path: Path) -> None:
    trace = Trace(events=[TraceEvent(0, "caller", "relu %x -> %y", 5.0, 5.0 + span)])
    trace.to_svg(tmp_path / "trace.svg")
    texts = [t.text for t in ElementTree.parse(tmp_path / "trace.svg").getroot().iter() if t.get("class") == "time"]
    assert texts[0] == f"0 {last.split()[1]}"
    assert texts[-1] == last
    assert 3 <= len(texts) <= 11


def test_streams_are_ordered_by_number(tmp_path: Path) -> None:
    lanes = ["communication", *(f"stream {i}" for i in (10, 2, 0)), "caller"]
    trace = Trace()
    trace.extend(TraceEvent(1, lane, "relu %x -> %y", 0, 1e-6) for lane in lanes)
    assert trace.lanes == {1: ["caller", "stream 0", "stream 2", "stream 10", "communication"]}


def test_an_empty_trace_can_be_written(tmp_path: Path) -> None:
    Trace().to_svg(tmp_path / "empty.svg")
    Trace().to_chrome(tmp_path / "empty.json")
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []
    ElementTree.parse(tmp_path / "empty.svg")


def test_a_file_that_cannot_be_written_is_named_at_the_users_line() -> None:
    for write in (Trace().to_svg, Trace().to_chrome):
        with pytest.raises(
            HostIRError, match=r"test_trace.py:\d+:\d+: error: cannot write /nonexistent/x: No such file"
        ):
            write("/nonexistent/x")
