"""Measurements on disk: they are read back; a damaged or foreign file is ignored with one warning."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostir import knobs
from hostir.choice import cache
from hostir.choice.cache import CacheWarning, Entry
from hostir.choice.choices import Candidate
from hostir.ir import source as notices
from hostir.ir.source import HostIRError

KEY = {"fusion": "abc", "sizes": {"M": 8}, "ranks": 2, "versions": {"torch": "2.11"}}
FUSED, PLAIN = Candidate("fused", 1, "triton"), Candidate("sequential", 1, "aten")
ENTRIES = {FUSED: Entry("d1", 12.5, 10.25), PLAIN: Entry("d2", 20.0)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    notices._warned.clear()
    with knobs.scope(cache=tmp_path):
        yield tmp_path / "tuning"


def test_written_measurements_are_read_back() -> None:
    assert cache.read(KEY) == {}
    path = cache.write(KEY, "p", ENTRIES)
    assert cache.read(KEY) == ENTRIES
    assert path == cache.path_of(KEY)
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".new"] == []


def test_other_keys_have_other_files() -> None:
    cache.write(KEY, "p", ENTRIES)
    for name, value in {"fusion": "abd", "sizes": {"M": 16}, "ranks": 4, "versions": {"torch": "2.12"}}.items():
        assert cache.read({**KEY, name: value}) == {}


def test_writers_add_to_each_other() -> None:
    cache.write(KEY, "p", ENTRIES)
    later = {PLAIN: Entry("d3", 19.0), Candidate("ring", 2, "aten"): Entry("d4", failure="it is wrong")}
    cache.write(KEY, "p", later)
    assert cache.read(KEY) == {**ENTRIES, **later}


def _write(place: str, streams: int) -> None:
    with knobs.scope(cache=place):
        for turn in range(10):
            cache.write(KEY, "p", {Candidate("ring", 100 * streams + turn, "aten"): Entry("d", 1.0)})


def test_concurrent_writers_lose_no_measurements(folder: Path) -> None:
    start = multiprocessing.get_context("spawn")
    jobs = [start.Process(target=_write, args=(str(folder.parent), number)) for number in (1, 2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert len(cache.read(KEY)) == 20


@pytest.mark.timeout(30)
def test_a_file_that_is_not_regular_is_ignored_and_replaced(folder: Path) -> None:
    folder.mkdir(parents=True)
    path = cache.path_of(KEY)
    os.mkfifo(path)
    os.mkfifo(folder / "lock")
    with pytest.warns(CacheWarning, match="ignored: it is not a regular file"):
        assert cache.read(KEY) == {}
    cache.write(KEY, "p", ENTRIES)
    assert cache.read(KEY) == ENTRIES


def changed(**changes: object) -> str:
    path = cache.path_of(KEY)
    return json.dumps({**json.loads(path.read_text()), **changes})


@pytest.mark.parametrize(
    "damage",
    [
        lambda: "",
        lambda: "{",
        lambda: "[]",
        lambda: "null",
        lambda: "[" * 100_000,
        lambda: changed(format=0),
        lambda: changed(key={"fusion": "of somebody else"}),
        lambda: changed(entries=[{"candidate": {"strategy": "fused"}}]),
        lambda: changed(entries=[{"candidate": {"strategy": "f", "streams": 1, "kernels": "aten"}, "digest": "d"}]),
        lambda: changed(entries=7),
        lambda: changed().replace("10.25", "NaN"),
        lambda: changed().replace("10.25", "-1"),
        lambda: changed().replace("10.25", '"fast"'),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning(damage: Callable[[], str]) -> None:
    path = cache.write(KEY, "p", ENTRIES)
    path.write_text(damage())
    with pytest.warns(CacheWarning, match=r"are ignored: .*\.\n  hint: 'hostir tune' measures again"):
        assert cache.read(KEY) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.read(KEY) == {}  # no second warning
        cache.write(KEY, "p", ENTRIES)
    assert cache.read(KEY) == ENTRIES


def test_a_file_that_is_not_text_is_ignored() -> None:
    cache.write(KEY, "p", ENTRIES).write_bytes(b"\xff\xfe\x00")
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert cache.read(KEY) == {}


@pytest.mark.parametrize("step", ["pathlib.Path.mkdir", "tempfile.mkstemp", "os.replace"])
def test_a_folder_that_cannot_be_written_is_a_diagnostic(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:  # file permissions would not stop root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(step, refuse)
    with pytest.raises(HostIRError, match=f"cannot write the tuning cache {folder}: Permission denied"):
        cache.write(KEY, "p", ENTRIES)
    assert not list(folder.glob("*.new"))
    assert cache.read(KEY) == {}


def test_a_file_in_place_of_the_folder_is_a_diagnostic(folder: Path) -> None:
    folder.write_text("")
    with pytest.raises(HostIRError, match="cannot write the tuning cache"):
        cache.write(KEY, "p", ENTRIES)


def test_the_default_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with knobs.scope(cache=None):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache.folder() == tmp_path / "xdg" / "hostir" / "tuning"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache.folder() == tmp_path / ".cache" / "hostir" / "tuning"


def test_a_trial_of_calls_in_graphs_measures_replays() -> None:
    entry = Entry.of("d", "graph", 12.345, 12.3)
    assert entry == Entry("d", graph=12.35)
    assert (entry.time("graph"), entry.time("eager"), entry.time("out")) == (12.35, None, None)
    both = Entry("d", 30.0, out=29.0, replays=False).merged(entry)
    assert (both.time("graph"), both.time("eager"), both.time("out")) == (12.35, 30.0, 29.0), (
        "a capture succeeded later"
    )
    assert both.merged(Entry.of("d", "eager", 31.0)).time("graph") == 12.35
    assert Entry("d", 30.0, replays=False).merged(Entry.of("d", "eager", 31.0)).time("graph") is None
    plain = Entry.of("d", "out", 20.0, 25.0, plain=True)
    assert plain.plain
    assert Entry.of("d", "out", 20.0).merged(plain).plain
    assert plain.merged(Entry.of("d", "graph", 25.0)).plain, "it belongs to the time with out="
    assert not plain.merged(Entry.of("d", "out", 19.0, 19.0)).plain
