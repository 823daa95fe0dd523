"""Measurements on disk: one JSON file for each fusion, its sizes and a platform, in the folder HOSTIR_CACHE.

A file is replaced atomically. Writers hold a lock and keep what other jobs have measured meanwhile. Files that cannot
be read, or that another version has written, are ignored with one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from hostir.choice.choices import Candidate
from hostir.choice.platforms import Platform
from hostir.ir.program import Program
from hostir.ir.source import error, warn_once
from hostir.knobs import CACHE

FORMAT = 1


class CacheWarning(UserWarning):
    """A file of the tuning cache is ignored."""


@dataclass(frozen=True)
class Entry:
    """The measurement of one candidate, of the program with this digest: microseconds, or why there are none."""

    digest: str
    eager: float | None = None
    graph: float | None = None
    failure: str = ""


Entries = Mapping[Candidate, Entry]


def folder() -> Path:
    """Return where measurements are kept: the knob HOSTIR_CACHE, else the platform's folder for caches."""
    chosen = CACHE.get()
    if chosen is not None:
        return chosen / "tuning"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hostir" / "tuning"


def key_of(fusion: Program, sizes: Mapping[str, int], platform: Platform) -> dict[str, Any]:
    """Return what a measurement is valid for. The fusion's text includes its dtypes and constant sizes."""
    return {"fusion": fusion.digest, "sizes": dict(sorted(sizes.items())), **platform.identity}


def path_of(key: Mapping[str, Any]) -> Path:
    """Return the file of a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return folder() / f"{digest}.json"


def read(key: Mapping[str, Any]) -> Entries:
    """Read what was measured for a key; nothing if the file cannot be used."""
    path = path_of(key)
    if path.exists() and not path.is_file():  # to read a FIFO, or a device, may never end
        return _ignored(path, "it is no regular file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as problem:
        return _ignored(path, f"it cannot be read: {problem}")
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            return _ignored(path, f"it has format {data['format']}, not {FORMAT}")
        if data["key"] != json.loads(json.dumps(key)):
            return _ignored(path, "it is of something else")
        return {Candidate(**it["candidate"]): _entry(it) for it in data["entries"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # the last: nested too deeply
        return _ignored(path, "it is damaged")


def _entry(data: Mapping[str, Any]) -> Entry:
    entry = Entry(str(data["digest"]), _time(data["eager"]), _time(data["graph"]), str(data["failure"]))
    if entry.eager is None and not entry.failure:
        raise ValueError(data)
    return entry


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ValueError(value)
    return float(value)


def _ignored(path: Path, why: str) -> Entries:
    message = f"The measurements in {path} are ignored: {why}."
    warn_once((path, message), message, "'hostir tune' writes them anew", CacheWarning)
    return {}


def write(key: Mapping[str, Any], name: str, entries: Entries) -> Path:
    """Add measurements to those of a key; `name` is for people who read the file.

    Raises HostIRError where the folder cannot be written.
    """
    path = path_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            _replace(path, key, name, {**read(key), **entries})
    except OSError as problem:
        raise error(
            f"cannot write the tuning cache {path.parent}: {problem.strerror or problem}",
            hint="HOSTIR_CACHE names another folder",
        ) from None
    return path


def _replace(path: Path, key: Mapping[str, Any], name: str, entries: Entries) -> None:
    listed = [{"candidate": asdict(candidate), **asdict(entry)} for candidate, entry in entries.items()]
    data = {"format": FORMAT, "program": name, "key": key, "entries": listed}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1) + "\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold a file lock: one writer at a time, of whatever job."""
    lock = os.open(
        place / "lock", os.O_RDWR | os.O_CREAT, 0o666
    )  # opened to write alone, a FIFO would wait for a reader
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
