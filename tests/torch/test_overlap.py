"""The key of the overlap pass in Inductor's cache."""

from __future__ import annotations

import sys

import pytest

from hostir.torch import OverlapPass, overlap


def test_the_key_of_the_pass_covers_every_module_of_hostir() -> None:
    loaded = {module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "hostir"}
    assert len(loaded) > 50
    assert loaded <= set(overlap.sources())


def test_the_key_of_the_pass_changes_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = OverlapPass().uuid()
    monkeypatch.setattr(overlap, "__version__", "0.0.0.changed")
    assert OverlapPass().uuid() != before
