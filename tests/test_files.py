"""Files that commands read and write: standard streams, devices, full disks, closed pipes, and several ranks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hostir as hi
from examples import patterns
from hostir.__main__ import main
from hostir.cli import loading as files
from hostir.ir import format_program

ROOT = Path(__file__).parent.parent
FUSION = str(patterns.mlp().program())
PROGRAM = format_program(hi.lower(patterns.mlp()), notes=False)
COMMENTED = PROGRAM.replace("{\n", "{  // the beginning\n", 1)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def ran(command: str, **options: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of a shell, with this interpreter as `hostir`."""
    line = command.replace("hostir ", f"{sys.executable} -m hostir ")
    env = {**os.environ, "PYTHONUNBUFFERED": "", **options}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env, timeout=120, check=False)


# Reading ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [["lower"], ["check"], ["run", "--compare"], ["explain", "--machine", "h200"]])
def test_every_command_reads_standard_input(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fusion.hir").write_text(FUSION)
    assert main([*command, str(tmp_path / "fusion.hir")]) == 0
    expected = capfd.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FUSION.encode())))
    assert main([*command, "-"]) == 0
    assert capfd.readouterr().out == expected


def test_commands_read_pipes_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "program.hir").write_text(PROGRAM)
    for line in ("cat {} | hostir lower -", "cat {} | hostir lower /dev/stdin", "hostir lower <(cat {}) -o -"):
        done = ran(line.format(tmp_path / "program.hir"))
        assert (done.returncode, done.stderr) == (0, "")
        assert hi.parse(done.stdout) == hi.parse(PROGRAM)


def test_closed_standard_input_is_reported_in_one_message() -> None:
    done = ran("hostir lower - <&-")
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard input is closed\n")


@pytest.mark.parametrize("change", [lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n")])
def test_a_byte_order_mark_and_windows_line_ends_are_ignored(change, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "program.hir"
    file.write_bytes(change(PROGRAM).encode())
    assert files.read(str(file)) == PROGRAM
    assert hi.parse(change(PROGRAM)) == hi.parse(PROGRAM)
    with pytest.raises(hi.HostIRError) as wrong:
        hi.parse(change(PROGRAM.replace("gelu", "gellu")))
    assert "\r" not in str(wrong.value)


# Writing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["lower {}", "check {} --format json", "run {}", "ops", "--help"])
def test_a_full_disk_is_reported_in_one_message(command: str, tmp_path: Path) -> None:
    (tmp_path / "program.hir").write_text(PROGRAM)
    done = ran(f"hostir {command.format(tmp_path / 'program.hir')} > /dev/full")
    assert (done.returncode, done.stderr) == (2, "error: cannot write the output: No space left on device\n")


def test_messages_that_cannot_be_written_do_not_change_the_exit_code() -> None:
    for line in ("hostir lower no.hir 2> /dev/full", "hostir lower no.hir 2>&-", "hostir ops >&-"):
        assert ran(line).returncode == (2 if "no.hir" in line else 0)


def test_a_closed_pipe_ends_a_command_quietly(tmp_path: Path) -> None:
    (tmp_path / "program.hir").write_text(PROGRAM)
    done = ran(f"hostir lower {tmp_path / 'program.hir'} | :; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_picture_that_cannot_be_written_is_reported_in_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for option in ("--trace", "--graph"):
        for suffix in (".svg", ".json") if option == "--trace" else (".svg",):
            full = tmp_path / f"full{suffix}"
            full.unlink(missing_ok=True)
            full.symlink_to("/dev/full")
            command = "run" if option == "--trace" else "check"
            assert main([command, "examples/patterns.py:gather", option, str(full)]) == 2
            assert capfd.readouterr().err == f"error: cannot write {full}: No space left on device\n"


def test_a_repair_notes_that_comments_are_dropped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, text in (("plain", PROGRAM), ("commented", COMMENTED)):
        file, fixed = tmp_path / f"{name}.hir", tmp_path / f"{name}_fixed.hir"
        file.write_text(text)
        assert main(["check", str(file), "--fix", "-o", str(fixed)]) == 0
        assert fixed.read_text() == PROGRAM
        assert (f"note: the repaired program has lost the comments of {file}" in capfd.readouterr().err) == (
            text == COMMENTED
        )


# Errors on several ranks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_first_rank_of_a_host_reports_an_error_of_all_ranks(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hostir.job.session.begun", False)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank % 2), ("WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert main(["run", "no.hir"]) == 2
    assert capfd.readouterr().err.startswith("error: no such file: no.hir\n" if rank != 1 else "")
    assert bool(waited) == (rank == 1), "other ranks wait, because a launcher kills all ranks when the first one exits"


@pytest.mark.torchrun
def test_a_missing_file_is_reported_once_under_torchrun() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [*torchrun, "-m", "hostir", "run", "no.hir"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.count("error: no such file: no.hir") == 1


def test_ranks_do_not_share_a_pipe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("hostir.job.session.begun", False)
    assert main(["run", "-"]) == 2
    assert "error: standard input can be read once, and every rank would read it" in capfd.readouterr().err


def test_the_version_names_the_version_of_the_text(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capfd.readouterr().out == f"hostir {hi.__version__} (text version 1)\n"


# Memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "problem", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...\nat: ...")]
)
def test_a_lack_of_memory_is_reported_in_one_message(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(options: object) -> int:
        raise problem

    monkeypatch.setattr("hostir.cli.ops.main", fails)
    assert main(["ops"]) == 2
    assert capfd.readouterr().err.splitlines()[0].startswith("error: there is not enough memory")


def test_other_runtime_errors_are_not_reported_as_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(options: object) -> int:
        raise RuntimeError("something else")

    monkeypatch.setattr("hostir.cli.ops.main", fails)
    with pytest.raises(RuntimeError, match="something else"):
        main(["ops"])
