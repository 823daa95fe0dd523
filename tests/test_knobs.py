from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hostir import knobs
from hostir.__main__ import main
from hostir.call.executor import Executor
from hostir.ir import parse, source
from hostir.ir.source import HostIRError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in knobs.KNOBS:
        monkeypatch.delenv(knob.name, raising=False)


def test_a_knob_has_its_default_if_nothing_is_set() -> None:
    assert knobs.DUMP.get() is None
    assert knobs.SPEC.get() == 1
    assert knobs.TIMEOUT.get() == 30.0
    assert knobs.KERNELS.get() == "auto"


def test_variables_are_read_and_converted_at_each_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOSTIR_DUMP", str(tmp_path / "new"))
    monkeypatch.setenv("HOSTIR_SPEC", "2")
    monkeypatch.setenv("HOSTIR_TIMEOUT", "0.5")
    monkeypatch.setenv("HOSTIR_KERNELS", "triton")
    assert knobs.DUMP.get() == tmp_path / "new"
    assert knobs.SPEC.get() == 2
    assert knobs.TIMEOUT.get() == 0.5
    assert knobs.KERNELS.get() == "triton"


def test_an_argument_overrides_a_scope_and_a_scope_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTIR_TIMEOUT", "10")
    with knobs.scope(timeout=20):
        assert knobs.TIMEOUT.get() == 20.0
        assert knobs.TIMEOUT.get(40) == 40.0
    assert knobs.TIMEOUT.get() == 10.0


def test_zero_as_an_argument_is_a_value() -> None:
    assert knobs.SPEC.get(0) == 0


def test_an_inner_scope_overrides_only_its_knobs() -> None:
    with knobs.scope(spec=2, kernels="aten"):
        with knobs.scope(kernels="triton"):
            assert (knobs.SPEC.get(), knobs.KERNELS.get()) == (2, "triton")
        assert (knobs.SPEC.get(), knobs.KERNELS.get()) == (2, "aten")


def test_a_scope_ends_when_its_block_raises() -> None:
    with pytest.raises(RuntimeError, match="inside"), knobs.scope(spec=2):
        raise RuntimeError("inside")
    assert knobs.SPEC.get() == 1


def test_none_in_a_scope_restores_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTIR_DUMP", "somewhere")
    with knobs.scope(dump=None):
        assert knobs.DUMP.get() is None


def test_an_empty_variable_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTIR_SPEC", "")
    assert knobs.SPEC.get() == 1


def test_a_scope_is_local_to_its_thread() -> None:
    seen: list[int] = []
    with knobs.scope(spec=2):
        thread = threading.Thread(target=lambda: seen.append(knobs.SPEC.get()))
        thread.start()
        thread.join()
        assert knobs.SPEC.get() == 2
    assert seen == [1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("HOSTIR_SPEC", "x", "HOSTIR_SPEC='x'\n  expected: 0, 1 or 2"),
        ("HOSTIR_SPEC", "3", "HOSTIR_SPEC='3'\n  expected: 0, 1 or 2"),
        ("HOSTIR_TIMEOUT", "0", "HOSTIR_TIMEOUT='0'\n  expected: a number of seconds greater than 0"),
        ("HOSTIR_TIMEOUT", "nan", "HOSTIR_TIMEOUT='nan'\n  expected: a number of seconds greater than 0"),
        ("HOSTIR_TIMEOUT", "inf", "HOSTIR_TIMEOUT='inf'\n  expected: a number of seconds greater than 0"),
        ("HOSTIR_TIMEOUT", "30s", "HOSTIR_TIMEOUT='30s'\n  expected: a number of seconds greater than 0"),
        ("HOSTIR_KERNELS", "Triton", "HOSTIR_KERNELS='Triton'\n  expected: auto, triton, cublas or aten"),
    ],
)
def test_an_invalid_variable_is_named_with_the_expected_values(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(name, text)
    knob = next(knob for knob in knobs.KNOBS if knob.name == name)
    with pytest.raises(HostIRError) as error:
        knob.get()
    assert str(error.value) == f"error: {message}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("HOSTIR_KEEPALIVE", "soon", r"HOSTIR_KEEPALIVE='soon'\n  expected: a number of seconds greater than 0$"),
        ("HOSTIR_COMPARE_CALLS", "yes", r"HOSTIR_COMPARE_CALLS='yes'\n  expected: 1 or 0$"),
    ],
)
def test_executors_and_commands_check_all_variables_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(HostIRError, match=message) as refused:
        Executor(RELU)
    assert main(["ops"]) == 2
    assert capsys.readouterr().err == f"{refused.value}\n"
    monkeypatch.setenv(name, "")
    Executor(RELU)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HOSTIR_TIMOUT", "did you mean 'HOSTIR_TIMEOUT'?"),
        ("HOSTIR_COMPARE", "did you mean 'HOSTIR_COMPARE_CALLS'?"),
        ("HOSTIR_WATCH", f"hostir reads {', '.join(knob.name for knob in knobs.KNOBS)}"),
    ],
)
def test_executors_and_commands_warn_once_of_an_unknown_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.setenv(name, "5")
    monkeypatch.setattr(source, "_warned", set())
    message = f"warning: unknown environment variable {name} is ignored\n  hint: {hint}"
    with pytest.warns(knobs.UnknownVariableWarning, match=f"^{re.escape(message)}$") as warned:
        Executor(RELU)
    assert len(warned) == 1
    assert main(["ops"]) == 0  # a second warning would be an error here
    stderr = subprocess.run([sys.executable, "-m", "hostir", "ops"], capture_output=True, text=True, check=True).stderr
    assert stderr == f"{message}\n"


RELU = parse("""hostir 1
mesh @mesh [didx] = 0
program @relu(%x: f32[4]) -> (%y) {
  %y: f32[4] = allocate
  relu %x -> %y
}
""")


def test_a_dump_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "dump"
    file.write_text("")
    with pytest.raises(HostIRError, match="expected: a directory"):
        knobs.DUMP.get(file)


def test_arguments_and_scopes_are_checked_like_variables() -> None:
    with pytest.raises(HostIRError, match=r"test_knobs.py:\d+:\d+: error: spec=7\n[^$]*expected: 0, 1 or 2$"):
        knobs.SPEC.get(7)
    with pytest.raises(HostIRError, match=r"test_knobs.py:\d+:\d+: error: spec=True\n[^$]*expected: 0, 1 or 2$"):
        knobs.scope(spec=True)


def test_an_unknown_name_in_a_scope_gets_a_suggestion() -> None:
    with pytest.raises(HostIRError, match=r"no knob is called 'kernel'\n[^$]*did you mean 'kernels'\?$"):
        knobs.scope(kernel=1)
    with pytest.raises(
        HostIRError, match=r"expected: one of: dump, spec, timeout, keepalive, kernels, .*native, .*profile, tune$"
    ):
        knobs.scope(watch=1)


def test_the_table_shows_the_default_of_a_switch_as_a_value() -> None:
    assert {row.name: row.default for row in knobs.table()}["HOSTIR_COMPARE_CALLS"] == "0"


def test_the_table_has_a_row_with_a_valid_default_for_each_knob() -> None:
    rows = knobs.table()
    assert [row.name for row in rows] == [knob.name for knob in knobs.KNOBS]
    for knob, row in zip(knobs.KNOBS, rows, strict=True):
        assert row.doc
        assert knob.default is None or knob.check(row.default, knob.name) == knob.default


def test_knobs_import_only_the_standard_library() -> None:
    probe = "import sys; import hostir.knobs; print(sorted({'torch', 'triton', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_launchers_variable_that_is_no_number_is_refused(
    variable: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", variable: "few"}.items():
        monkeypatch.setenv(name, value)
    example = str(Path(__file__).parents[1] / "examples/ag_matmul.py")
    if (variable, command) == ("RANK", "check"):  # which does not need it
        assert main([command, example]) == 0
        return
    assert main([command, example]) == 2
    assert f"{variable}='few'" in capsys.readouterr().err
