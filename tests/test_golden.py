from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import Golden


def test_equal_text_passes(tmp_path: Path) -> None:
    (tmp_path / "a.hir").write_text("one\n")
    Golden(tmp_path, accept=False)("a.hir", "one\n")


def test_a_mismatch_shows_a_unified_diff(tmp_path: Path) -> None:
    (tmp_path / "a.hir").write_text("one\ntwo\n")
    with pytest.raises(AssertionError, match=r"(?s)-two\n\+2\n.*pytest --accept"):
        Golden(tmp_path, accept=False)("a.hir", "one\n2\n")


def test_a_missing_last_newline_is_shown_as_a_mismatch(tmp_path: Path) -> None:
    (tmp_path / "a.hir").write_text("one\n")
    with pytest.raises(AssertionError, match=r"'one\\n' expected at the end, 'one' found"):
        Golden(tmp_path, accept=False)("a.hir", "one")


def test_a_file_that_does_not_exist_fails_and_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"a\.hir does not exist"):
        Golden(tmp_path, accept=False)("a.hir", "one\n")
    assert not list(tmp_path.iterdir())


def test_accept_writes_the_file_and_its_folders(tmp_path: Path) -> None:
    Golden(tmp_path, accept=True)("lower/a.hir", "one\n")
    assert (tmp_path / "lower" / "a.hir").read_text() == "one\n"
