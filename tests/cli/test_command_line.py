"""The command line: its output and its exit codes. Refused inputs are under tests/cases/bad."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hostir as hi
from examples import patterns
from hostir.__main__ import main
from hostir.lower import passes_of
from tests.cli.commands_on_ranks import on_ranks

ROOT = Path(__file__).parents[2]
MLP = "examples/patterns.py:mlp"
SYMBOLIC = """
import hostir as hi

with hi.Fusion("symbolic") as fusion:
    a, b = hi.tensor("a", ["M", "K"], "f32"), hi.tensor("b", ["K", 8], "f32")
    c = a @ b
    fusion.output(c)
mesh = hi.DeviceMesh(range(2))
a.shard(0, mesh)
c.set_device_mesh(mesh)
"""
WITHOUT_WAIT = """hostir 1
mesh @mesh [didx] = 0 1
program @racy(%a: f32[4@didx, 8]) -> (%c) streams 1 {
  %user = current_stream
  %full: f32[4, 8] = allocate
  %c: f32[4, 8] = allocate
  set_stream 0
  synchronize %user
  %h = allgather %a -> %full over didx
  relu %full -> %c
  set_stream %user
  synchronize 0
  wait %h
}
"""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    shown = capfd.readouterr()
    assert bool(shown.err) == bool(code), shown.err
    return shown.out


def test_lower_prints_the_host_program(capfd: pytest.CaptureFixture[str]) -> None:
    assert printed(capfd, "lower", MLP) == str(hi.lower(patterns.mlp()))


def test_lower_prints_comments_as_str_does(capfd: pytest.CaptureFixture[str]) -> None:
    text = printed(capfd, "lower", MLP, "--strategy", "fused")
    assert "  // " in text
    assert text == str(hi.lower(patterns.mlp(), "fused"))


def test_set_ranks_strategy_and_streams_reach_the_fusion_and_the_lowering(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--set", "S=2", "--set", "dtype=bf16", "--ranks", "2", "--streams", "1")
    assert hi.parse(printed(capfd, "lower", MLP, *options)) == hi.lower(patterns.mlp(2, S=2, dtype="bf16"), streams=1)
    options = ("--strategy", "sequential", "--ranks", "8")
    assert hi.parse(printed(capfd, "lower", MLP, *options)) == hi.lower(patterns.mlp(8), "sequential")


def test_lower_after_a_pass_prints_the_program_after_it(capfd: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, str] = {}
    hi.lower(patterns.mlp(), watch=lambda name, program: seen.update({name: str(program)}))
    for name, text in seen.items():
        assert printed(capfd, "lower", MLP, "--after", name) == text


def test_lower_all_prints_the_program_after_every_pass(capfd: pytest.CaptureFixture[str]) -> None:
    shown = printed(capfd, "lower", MLP, "--all")
    blocks = shown.split("// after ")[1:]
    assert [block.splitlines()[0] for block in blocks] == ["fusion", *(p.name for p in passes_of())]
    programs = [hi.parse(block.split("\n", 1)[1]) for block in blocks]
    assert programs[0] == patterns.mlp().program()
    assert programs[-1] == hi.lower(patterns.mlp())


def test_every_command_reads_the_file_that_lower_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "out.hir")
    assert printed(capfd, "lower", MLP, "-o", file) == ""
    program = hi.parse(Path(file).read_text())
    assert program == hi.lower(patterns.mlp())
    assert printed(capfd, "lower", file) == str(program)
    assert "nothing to report" in printed(capfd, "check", file)
    assert "ok" in printed(capfd, "run", file, "--compare")


@pytest.mark.parametrize(
    ("form", "start"), [("hir", "hostir 1\n"), ("nvfuser", "%HostIrContainer"), ("dot", "digraph")]
)
def test_lower_prints_other_formats(form: str, start: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert printed(capfd, "lower", "examples/patterns.py:allgather_matmul", "--format", form).lstrip().startswith(start)


def test_check_prints_its_statements_and_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    count = sum(1 for _ in hi.lower(patterns.mlp()).walk())
    assert printed(capfd, "check", MLP) == f"@mlp: {count} statements, 4 ranks, nothing to report\n"


def test_check_as_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capfd, "check", MLP, "--format", "json")) == {
        "program": "mlp",
        "sizes": {},
        "findings": [],
    }
    file = tmp_path / "bad.hir"
    file.write_text("hostir 1\nmesh @m [x] = 0\nprogram @p(%a: f32[4], %b: f32[5]) -> (%b) {\n  relu %a -> %b\n}\n")
    assert main(["check", str(file), "--format", "json"]) == 1
    (finding,) = json.loads(capfd.readouterr().out)["findings"]
    assert finding == {
        "level": "error",
        "kind": "structure",
        "message": "%b is f32[5], but relu gives f32[4]",
        "where": {"file": str(file), "line": 4, "column": 3, "width": 13},
        "expected": "f32[4]",
        "hint": "",
        "times": 1,
        "notes": [],
    }


def test_check_reports_a_refusal_of_the_lowering(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "streams.hir"
    text = (
        str(patterns.allgather_matmul())
        .replace("4@stream, 4, 16", "4, 4, 16")
        .replace("%b: f32[64, 48]", "%b: f32[64@stream, 48]")
    )
    file.write_text(text)
    assert main(["check", str(file)]) == 1
    assert "it sums over the Stream axis of %b" in capfd.readouterr().err


def test_run_compares_with_the_unsharded_reference(capfd: pytest.CaptureFixture[str]) -> None:
    shown = printed(capfd, "run", MLP, "--ranks", "2", "--compare", "--seed", "3", "--repeat", "2")
    assert shown.startswith("@mlp: ran on 2 simulated ranks, kernels ")
    assert "%y: error " in shown
    assert "maximum error " in shown


def test_run_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(printed(capfd, "run", MLP, "--compare", "--json", "--kernels", "aten"))
    assert (shown["program"], shown["ranks"], shown["kernels"]) == ("mlp", 4, "aten")
    (output,) = shown["outputs"]
    assert output["good"]
    assert 0 < output["error"] <= output["bound"]


def test_run_binds_named_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "symbolic.py"
    file.write_text(SYMBOLIC)
    assert "ok" in printed(capfd, "run", str(file), "--set", "M=6", "--set", "K=5", "--compare")
    assert main(["run", str(file), "--set", "M=7", "--set", "K=5"]) == 2
    assert "M=7 does not fit @symbolic: M must be a multiple of 2, because" in capfd.readouterr().err


def test_a_racy_program_is_refused_and_the_command_from_check_reproduces_the_race(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "racy.hir"
    file.write_text(WITHOUT_WAIT)
    assert main(["run", str(file), "--compare"]) == 1
    refusal = capfd.readouterr().err
    assert "race on %full" in refusal
    assert refusal.endswith("--no-check runs it all the same\n")
    assert main(["check", str(file)]) == 1
    shown = re.search(r"shown by 'hostir (run .*)': (.*)", capfd.readouterr().err)
    assert shown
    assert main(shown[1].split()) == 1
    warning = capfd.readouterr().err
    assert shown[2] in warning
    assert "warning: race: " in warning, "simulated ranks detect the race on their own"
    assert main(["run", str(file), "--no-check", "--compare"]) == 0, "in program order the result is right"


def test_only_rank_0_prints_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "racy.hir"
    file.write_text(WITHOUT_WAIT)
    monkeypatch.setenv("RANK", "1")
    assert main(["run", str(file)]) == 1
    assert capfd.readouterr().err == ""


def test_a_schedule_seed_does_not_change_the_result_of_a_correct_program(
    capfd: pytest.CaptureFixture[str],
) -> None:
    command = ("run", "examples/patterns.py:mlp", "--compare", "--json", "--repeat", "5")
    results = {printed(capfd, *command, "--schedule-seed", str(seed)) for seed in range(4)}
    assert len(results) == 1


@pytest.mark.parametrize("suffix", ["json", "svg"])
def test_run_writes_a_trace(suffix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"trace.{suffix}"
    printed(capfd, "run", MLP, "--trace", str(file))
    text = file.read_text()
    assert "matmul" in text
    assert suffix == "svg" or json.loads(text)["traceEvents"]


PARTIAL = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%a: bf16[512, 256@didx], %b: bf16[256@didx, 128]) -> (%y) streams 0 {
  %y: bf16[512, 128] partial(didx) = allocate
  matmul %a, %b -> %y
}
"""


@pytest.mark.torchrun
def test_processes_beyond_the_programs_ranks_hold_no_parts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts, sums = tmp_path / "parts.hir", tmp_path / "sums.hir"
    printed(capfd, "lower", MLP, "--ranks", "2", "-o", str(parts))
    sums.write_text(PARTIAL)
    commands = {str(file): ["run", str(file), "--compare", "--device", "cpu"] for file in (parts, sums)}
    for ran in on_ranks(3, commands, tmp_path).values():
        assert ran.returncode == 0, ran.stderr
        assert "ran on 3 ranks on cpu" in ran.stdout
        assert "%y: error " in ran.stdout
        assert ": ok" in ran.stdout


@pytest.mark.parametrize("standard", ["whole tensors", "single ranks"])
def test_the_sum_of_rounded_partial_sums_is_not_rounded_again(
    standard: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "partial.hir"
    barrier = "  barrier of %a over didx\n" if standard == "single ranks" else ""
    file.write_text(PARTIAL.replace("  matmul", f"{barrier}  matmul"))
    shown = json.loads(printed(capfd, "run", str(file), "--compare", "--json"))
    assert ("simulated ranks" in shown["reference"]) == bool(barrier)
    (output,) = shown["outputs"]
    assert 0.8 * output["bound"] < output["error"] < output["bound"] < 2e-3  # 2.65e-3 if the sum is rounded again


def test_ops_prints_the_language_reference(capfd: pytest.CaptureFixture[str]) -> None:
    assert "allgather" in printed(capfd, "ops")
    assert printed(capfd, "ops", "--markdown").startswith("# The language")


def test_a_file_may_import_modules_of_its_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes_of_mine.py").write_text("ROWS = 8\n")
    (tmp_path / "fusion.py").write_text("from shapes_of_mine import ROWS\n" + SYMBOLIC.replace('"M"', "ROWS"))
    assert "%a: f32[8@didx, K]" in printed(capfd, "lower", str(tmp_path / "fusion.py"))


def test_a_python_file_with_a_syntax_error_is_a_usage_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fusion.py"
    file.write_text("import hostir as hi\n\ndef fusion() -> hi.Fusion\n    return hi.Fusion()\n")
    assert main(["lower", str(file)]) == 2
    shown = capfd.readouterr().err
    assert f"{file}:3:" in shown
    assert f"error: importing {file}: expected ':'" in shown
    assert "Traceback" not in shown


def test_the_command_ends_quietly_when_its_output_pipe_is_closed() -> None:
    command = [sys.executable, "-m", "hostir", "ops", "--markdown"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # too small for the whole output
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141, "the exit code of shells for SIGPIPE"


def test_help_explains_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("lower", "check", "run", "ops"):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        assert "usage: hostir " in capfd.readouterr().out


@pytest.mark.parametrize("watched", [True, False])
def test_repeated_runs_show_progress_to_a_terminal_only(
    watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)
    assert main(["run", str(ROOT / "examples/patterns.py") + ":gather", "--repeat", "9"]) == 0
    assert ("@gather" in capsys.readouterr().err) == watched


@pytest.mark.parametrize("value", ["M=abc", "M=5x2", "M=5.0"])
def test_a_parameter_that_is_no_integer_is_refused_with_its_default(
    value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["lower", str(ROOT / "examples/patterns.py") + ":allgather_matmul", "--set", value]) == 2
    assert capfd.readouterr().err == (
        f"error: --set {value}: not an integer\n  expected: an integer, such as 256\n"
        "  hint: leave it out for M=256, the default\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calls", "0"], "--calls 0"),
        (["--calls", "99999"], "--calls 99999\n  expected: an integer from 1 to 32\n  hint: leave it out"),
        (["--ranks", "3"], "@racy is for 2 ranks, not 3"),
        (["-o", "fixed.hir"], "-o is for the repaired program"),
        (["--graph", "picture.png"], "a file ending in .svg"),
        (["--graph", "no/such/folder.svg"], "a file in a folder that exists"),
        (["--fix", "--format", "json"], "--fix prints the repaired program"),
        (["--fix", "--graph", "picture.svg"], "--fix prints the repaired program"),
        (["--fix", "-o", "no/such/folder.hir"], "a file in a folder that exists"),
        (["--set", "M=4"], "@racy has no size 'M'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_options_are_refused_before_the_check(
    options: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "racy.hir"
    file.write_text(WITHOUT_WAIT)
    assert main(["check", str(file), *options]) == 2
    shown = capfd.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert "race on" not in shown.err


@pytest.mark.parametrize("command", ["check", "lower", "run"])
@pytest.mark.parametrize(
    ("options", "message"),
    [(["--strategy", "fussed"], "did you mean 'fused'?"), (["--streams", "0"], "streams must be at least 1, not 0")],
)
def test_an_unknown_strategy_is_a_usage_error_of_every_command(
    command: str, options: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command, MLP, *options]) == 2
    shown = capfd.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_fix_shows_its_edits_and_prints_or_writes_a_program_without_findings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, fixed = tmp_path / "racy.hir", tmp_path / "fixed.hir"
    file.write_text(WITHOUT_WAIT)
    assert main(["check", str(file), "--fix", "-o", str(fixed)]) == 0
    changed = [line for line in capfd.readouterr().err.splitlines() if line[:1] in "+-"]
    assert changed[2:] == ["+  wait %h", "-  wait %h", "+  free %full"]
    assert main(["check", str(file), "--fix"]) == 0
    assert capfd.readouterr().out == fixed.read_text()
    printed(capfd, "check", str(fixed))
    printed(capfd, "run", str(fixed), "--compare", "--repeat", "2", "--schedule-seed", "5")


def test_check_prints_the_sizes_that_it_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "symbolic.py"
    file.write_text(SYMBOLIC)
    assert printed(capfd, "check", str(file)).rstrip().endswith("nothing to report for K=2, M=2")
    assert "for K=5, M=6" in printed(capfd, "check", str(file), "--set", "M=6", "--set", "K=5")
    assert json.loads(printed(capfd, "check", str(file), "--format", "json"))["sizes"] == {"K": 2, "M": 2}


def test_a_program_too_long_to_check_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "long.hir"
    body = "  for %i in 0..200000 {\n    relu %a -> %c\n  }\n"
    text = "hostir 1\nmesh @m [x] = 0\nprogram @p(%a: f32[4]) -> (%c) {\n  %c: f32[4] = allocate\n"
    file.write_text(f"{text}{body}}}\n")
    assert main(["check", str(file)]) == 1, "a program without a proof must not pass"
    assert "error: @p was not checked for races: 800002 statements" in capfd.readouterr().err
    assert main(["check", str(file), "--format", "json"]) == 1
    (finding,) = json.loads(capfd.readouterr().out)["findings"]
    assert (finding["level"], finding["kind"]) == ("error", "unchecked")


def test_redundant_names_statements_that_a_correct_program_does_not_need(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "spare.hir"
    file.write_text(WITHOUT_WAIT.replace("  relu", "  wait %h\n  relu").replace("  wait %h\n}", "  free %full\n}"))
    printed(capfd, "check", str(file), "--redundant")
    file.write_text(file.read_text().replace("  synchronize 0\n", "  synchronize 0\n  synchronize 0\n"))
    assert main(["check", str(file), "--redundant"]) == 0
    assert "warning: nothing needs 'synchronize 0'" in capfd.readouterr().err


def test_variadic_parameters_get_no_values_from_set(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fusion.py"
    body = "\n".join(f"    {line}" for line in SYMBOLIC.replace('"M"', "rows").splitlines()[2:])
    file.write_text(
        f"import hostir as hi\n\ndef build(rows=4, /, *more, **rest) -> hi.Fusion:\n{body}\n    return fusion\n"
    )
    assert "%a: f32[8@didx, K]" in printed(capfd, "lower", str(file), "--set", "rows=8")
