"""The predicted timeline agrees with the estimate, and its critical path and resources are those of the program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hostir as hi
from examples import patterns
from hostir.__main__ import main
from hostir.choice.cost import tasks_of
from hostir.choice.hardware import KNOWN
from hostir.choice.platforms import reference
from hostir.choice.simulation import EAGER, GRAPH, estimates, start
from hostir.choice.timeline import SMS, PredictedTimeline, predict
from hostir.ir.source import HostIRError

H100 = KNOWN["h100"]
LARGE: dict[str, Any] = {"S": 2, "M": 8192, "K": 8192, "N": 3584, "dtype": "bf16"}
PATTERNS = {
    "allgather_matmul": patterns.allgather_matmul(2, **LARGE),
    "row_parallel_scattered": patterns.row_parallel_scattered(2, **LARGE),
    "row_parallel": patterns.row_parallel(2, **LARGE),
    "mlp": patterns.mlp(2, S=2, M=8192, K=4096, H=8192, dtype="bf16"),
}
STRATEGIES = ("sequential", "pipeline", "ring", "fused", "push")


def timeline(pattern: str, strategy: str, kernels: str = "triton") -> PredictedTimeline:
    return hi.timeline(hi.lower(PATTERNS[pattern], strategy), machine="h100x2", kernels=kernels)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_timeline_agrees_with_the_estimate_of_its_program(pattern: str, strategy: str) -> None:
    program = hi.lower(PATTERNS[pattern], strategy)
    for kernels in ("cublas", "triton"):
        each = predict(program, {}, reference(H100, 2), kernels)
        tasks = tasks_of(program, {})
        estimate, later = estimates(tasks, H100, kernels), start(tasks, H100, GRAPH) - start(tasks, H100, EAGER)
        assert each.us + later == pytest.approx(estimate[GRAPH])
        assert max(each.us, each.host_us - H100.host_lead) == pytest.approx(estimate[EAGER])
        assert all(0 <= span.begin <= span.end <= each.us + 1e-6 for span in each.spans)
        assert all(-1e-6 <= span.waited <= span.end - span.begin + 1e-6 for span in each.spans)
        for rank in range(2):
            assert all(0 <= us <= each.us + 1e-6 for us in each.busy(rank).values())
            assert each.exposed(rank) == pytest.approx(each.us - each.busy(rank)[SMS])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_critical_path_leads_from_the_beginning_to_the_end(pattern: str, strategy: str) -> None:
    each = timeline(pattern, strategy)
    assert each.critical[-1].end == pytest.approx(each.us)
    assert each.critical[0].begin <= H100.begin + H100.first_matmul + 2 * H100.edge + 2
    for before, after in zip(each.critical, each.critical[1:], strict=False):
        assert before.begin <= after.end
        assert after.end >= before.end - 1e-6 or " done " in before.statement  # it raises flags before it ends


def test_without_overlap_the_path_is_the_program() -> None:
    program = hi.lower(patterns.row_parallel(2, S=1, M=8192, K=8192, N=4096, dtype="bf16"), "sequential")
    each = hi.timeline(program, machine="h100x2", kernels="cublas")
    words = [word for span in each.critical for word in span.statement.split() if word in ("matmul", "allreduce")]
    assert words == ["matmul", "allreduce"]
    assert each.exposed(0) > 0.9 * each.busy(0)["collectives"] > 0


def test_a_waiting_kernel_is_charged_for_its_waits() -> None:
    small = patterns.allgather_matmul(2, S=2, M=8192, K=16384, N=64, dtype="bf16")  # the copies take longest
    each = hi.timeline(hi.lower(small, "fused"), machine="h100x2", kernels="triton")
    (product,) = [span for span in each.spans if span.rank == 0 and " matmul " in f" {span.statement} "]
    assert product.waited > 0.3 * (product.end - product.begin)
    assert product.working == pytest.approx(product.end - product.begin - product.waited)
    assert any("put" in span.statement for span in each.critical)


def test_the_faster_kernels_are_taken_unless_they_are_named() -> None:
    program = hi.lower(PATTERNS["row_parallel"], "push")
    both = {kernels: hi.timeline(program, machine="h100x2", kernels=kernels).us for kernels in ("cublas", "triton")}
    assert hi.timeline(program, machine="h100x2").us == min(both.values())


def test_mistakes_are_reported() -> None:
    with pytest.raises(HostIRError, match="is for 2 ranks, and there are 1"):
        hi.timeline(hi.lower(PATTERNS["mlp"], "ring"), machine="h100x1")
    with pytest.raises(HostIRError, match="unknown machine 'h1000x2'"):
        hi.timeline(hi.lower(PATTERNS["mlp"], "ring"), machine="h1000x2")
    with pytest.raises(HostIRError, match="a timeline of fusion @mlp"):
        hi.timeline(PATTERNS["mlp"], machine="h100x2")  # type: ignore[arg-type]
    with pytest.raises(HostIRError, match="@mlp is a fusion"):
        hi.timeline(PATTERNS["mlp"].program(), machine="h100x2")
    with hi.Fusion("free") as free:
        free.output(hi.relu(hi.tensor("a", ["M", 4], "f32")))
    with pytest.raises(HostIRError, match="the size 'M' of @free"):
        hi.timeline(hi.lower(free, "sequential"), machine="h100")


COMMAND = ["timeline", "examples/patterns.py:allgather_matmul", "--ranks", "2", "--machine", "h100x2"]
SETTINGS = [text for name, value in LARGE.items() for text in ("--set", f"{name}={value}")]


def test_the_command_prints_compares_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "t.svg", tmp_path / "t.json"
    options = ["--strategy", "fused", "--against", "sequential", "-o", str(picture), "--trace", str(trace)]
    assert main([*COMMAND, *SETTINGS, *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("@allgather_matmul on 2 x h100, kernels triton: ")
    assert "critical path:" in out
    assert "us, rank 0   fused us  sequential us" in out
    assert "matmul" in picture.read_text()
    assert (tmp_path / "t-sequential.svg").exists()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert main([*COMMAND, *SETTINGS, "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert data["us"] > 0
    assert data["busy"]["0"]["SMs"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "picture.png"], "a file ending in .svg"),
        (["--trace", "trace.svg"], "a file ending in .json"),
        (["--rank", "2"], "expected: a rank from 0 to 1"),
        (["--machine", "h100x1"], "is for 2 ranks, and there are 1"),
        (["--strategy", "rnig"], "did you mean 'ring'?"),
    ],
)
def test_wrong_options_get_one_diagnostic(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *SETTINGS, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_text_is_lowered_already_and_must_be_free_of_races(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(hi.lower(PATTERNS["row_parallel"], "fused"))
    file = tmp_path / "sum.hir"
    file.write_text(text)
    command = ["timeline", str(file), "--machine", "h100x2"]
    assert main(command) == 0
    assert main([*command, "--strategy", "ring"]) == 2
    assert "--strategy is for lowering a fusion" in capsys.readouterr().err
    file.write_text("\n".join(line for line in text.splitlines() if " signal " not in line))
    assert main(command) == 1
    assert "nobody sends the signal" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["lower", "check", "run"])
def test_programs_for_several_hosts_can_be_lowered_checked_and_run(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [command, "examples/patterns.py:row_parallel_scattered", "--ranks", "4", "--set", "S=1"]
    assert main([*source, "--hosts", "2", "--strategy", "hierarchical"]) == 0
    out = capsys.readouterr().out
    assert {"lower": "hosts 2", "check": "nothing to report", "run": ""}[command] in out
    assert main([*source, "--hosts", "3", "--strategy", "hierarchical"]) == 2
    assert "--hosts 3: @row_parallel_scattered is for 4 ranks" in capsys.readouterr().err
