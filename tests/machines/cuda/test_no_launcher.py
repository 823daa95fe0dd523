"""Without a C compiler or a driver, Python issues calls, and a warning says so once."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from hostir import knobs
from hostir.ir import source
from hostir.ir.source import FallbackWarning
from hostir.machines.cuda import native
from hostir.machines.cuda.native import launcher


def no_compiler() -> Any:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def no_driver() -> Any:
    def open_library(path: str, error: type[Exception]) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    return SimpleNamespace(open=open_library)


@pytest.mark.parametrize(("build", "reason"), [(no_compiler, "Failed to find C compiler"), (no_driver, "libcuda")])
def test_python_issues_calls_where_the_launcher_cannot_be_built(
    build: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_warned", type(source._warned)())
    monkeypatch.setattr(native, "build", build)
    launcher.cache_clear()
    try:
        with pytest.warns(FallbackWarning, match=f"native launcher cannot be built.*{reason}") as raised:
            assert launcher() is None
        assert "HOSTIR_NATIVE=0" in str(raised[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert launcher() is None
    finally:
        launcher.cache_clear()


def test_native_code_issues_calls_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTIR_NATIVE")
    assert knobs.NATIVE.get()
