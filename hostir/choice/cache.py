"""Measurements on disk, in the folder HOSTIR_CACHE.

There is one JSON file for each combination of a fusion, its sizes and a platform. A file is replaced atomically.
Writers hold a lock, and keep the measurements that other jobs have added meanwhile. If a file cannot be read, or if
another version has written it, it is ignored with one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hostir.choice.choices import NO_CAPTURE, Candidate, ranked_by
from hostir.ir.program import Program, uses_nccl
from hostir.ir.source import error, warn_once
from hostir.knobs import CACHE

if TYPE_CHECKING:
    from hostir.choice.platforms import Platform

FORMAT = 5
T = TypeVar("T")


class CacheWarning(UserWarning):
    """The category of the warning that a file of the tuning cache is ignored."""


@dataclass(frozen=True)
class Entry:
    """The measurement of one candidate: its times in microseconds, or the reason why it has no times.

    The measurement is valid only for the host program with this `digest`. A time is None if it was not measured.

    Fields:
        eager: the time of a call without `out=`.
        out: the time of a call with `out=`.
        graph: the time in a replay of a CUDA graph that the caller captured.
        replays: False if measuring has shown that the program cannot be captured.
        plain: True if a trial has shown that a call with `out=` is faster if the executor replays no graph for it.
    """

    digest: str
    eager: float | None = None
    graph: float | None = None
    failure: str = ""
    out: float | None = None
    replays: bool = True
    plain: bool = False

    @staticmethod
    def measured(program: Program, eager: float | None, graph: float | None = None, failure: str = "") -> Entry:
        """Return the measurement of `hostir tune`, with these two times of a program.

        If `graph` is None, the program cannot be captured. `hostir tune` replays the graphs of all candidates in turn,
        so nothing is added to the times of replays, as in trials.
        """
        out = ranked_by("out", eager, graph, captured_by_caller=uses_nccl(program))
        return Entry(program.digest, eager, graph, failure, out, replays=graph is not None)

    @staticmethod
    def of(digest: str, calls: str, us: float, graph: float | None = None, plain: bool = False) -> Entry:
        """Return the measurement of a trial.

        Args:
            digest: the digest of the host program.
            calls: how the calls were made that took `us` microseconds: `eager`, `out` or `graph`.
            graph: the time in a replay of a CUDA graph; None if it was not measured.
            plain: the field of the result.
        """
        us, graph = round(us, 2), None if graph is None else round(graph, 2)
        if calls == "graph":
            return Entry(digest, graph=us)
        return Entry(digest, graph=graph, out=us, plain=plain) if calls == "out" else Entry(digest, us, graph)

    def refusal(self, calls: str) -> str:
        """Return the reason not to choose the candidate for calls as in `time`, or an empty text."""
        return self.failure or (NO_CAPTURE if calls == "graph" and not self.replays else "")

    def time(self, calls: str) -> float | None:
        """Return the time of calls that are made as `calls` says: `eager`, `out` or `graph`; None if it is unknown."""
        if calls == "graph":
            return self.graph if self.replays else None
        return self.out if calls == "out" else self.eager

    def merged(self, later: Entry) -> Entry:
        """Return this measurement with the times of a later one.

        The later one replaces it if the program has changed, or if the later one failed.
        """
        if self.digest != later.digest or later.failure:
            return later
        times = {name: getattr(later, name) or getattr(self, name) for name in ("eager", "graph", "out")}
        replays = later.replays and (self.replays or later.graph is not None)  # a later capture may succeed
        return replace(later, **times, replays=replays, plain=(self if later.out is None else later).plain)


Entries = Mapping[Candidate, Entry]


def folder() -> Path:
    """Return the folder of the measurements.

    It is the folder `tuning` in HOSTIR_CACHE if that is set, else the folder `hostir/tuning` in the user's cache
    folder.
    """
    directory = CACHE.get()
    if directory is not None:
        return directory / "tuning"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hostir" / "tuning"


def key_of(fusion: Program, sizes: Mapping[str, int], platform: Platform) -> dict[str, Any]:
    """Return the key of measurements: the fusion, the sizes and the platform for which they are valid."""
    return {"fusion": fusion.digest, "sizes": dict(sorted(sizes.items())), **platform.identity}


def path_of(key: Mapping[str, Any]) -> Path:
    """Return the path of the file with the measurements of a key. Its name begins with `_prefix`."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return folder() / f"{_prefix(key)}-{digest}.json"


def _prefix(key: Mapping[str, Any]) -> str:
    """Return the beginning of the names of the files of a fusion, for all sizes and platforms."""
    return str(key.get("fusion", "machine"))[:16]


def sizes_of(fusion: Program, platform: Platform) -> list[dict[str, int]]:
    """Return the sizes for which there are files with measurements of a fusion on a platform."""
    key = json.loads(json.dumps(key_of(fusion, {}, platform)))

    def parse(data: dict[str, Any]) -> dict[str, int] | None:
        sizes = {str(name): int(size) for name, size in data["key"]["sizes"].items()}
        return sizes if {**data["key"], "sizes": {}} == key else None

    files = sorted(folder().glob(f"{_prefix(key)}-*.json"))
    return [sizes for path in files if (sizes := _parsed(path, parse)) is not None]


def read(key: Mapping[str, Any]) -> Entries:
    """Return the measurements of a key. The mapping is empty if the file does not exist or cannot be used."""
    return _read(key, lambda data: {Candidate(**row["candidate"]): _entry(row) for row in data["entries"]}) or {}


def read_times(key: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the times that `write_times` has written. The mapping is empty if there is no file that can be used."""
    return _read(key, lambda data: {str(name): _known_time(us) for name, us in data["times"].items()}) or {}


def _read(key: Mapping[str, Any], parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Return what `parse` makes of the file of a key; None if the file does not exist or cannot be used."""

    def checked(data: dict[str, Any]) -> T:
        if data["key"] != json.loads(json.dumps(key)):
            raise _UnusableError("its measurements are for something else")
        return parse(data)

    return _parsed(path_of(key), checked)


def _parsed(path: Path, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Return what `parse` makes of a file. If the file cannot be used, warn once and return None."""
    try:
        if path.exists() and not path.is_file():  # reading a FIFO or a device may never end
            raise _UnusableError("it is not a regular file")
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise _UnusableError(f"it has format {data['format']}, not {FORMAT}")
        return parse(data)
    except FileNotFoundError:
        return None
    except _UnusableError as problem:
        reason = str(problem)
    except (OSError, UnicodeDecodeError) as problem:
        reason = f"it cannot be read: {problem}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: nested too deeply
        reason = "it is damaged"
    message = f"The measurements in {path} are ignored: {reason}."
    warn_once((path, message), message, "'hostir tune' measures again", CacheWarning)
    return None


class _UnusableError(Exception):
    """The reason why a file of the cache cannot be used."""


def _entry(data: Mapping[str, Any]) -> Entry:
    times = {name: _time(data[name]) for name in ("eager", "graph", "out")}
    if not any(times.values()) and not data["failure"]:
        raise ValueError(data)
    replays, plain = bool(data["replays"]), bool(data["plain"])
    return Entry(str(data["digest"]), failure=str(data["failure"]), replays=replays, plain=plain, **times)


def _time(value: Any) -> float | None:
    return None if value is None else _known_time(value)


def _known_time(value: Any) -> float:
    if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ValueError(value)
    return float(value)


def write(key: Mapping[str, Any], name: str, entries: Entries) -> Path:
    """Add measurements to the file of a key, and return the path of the file.

    `name` is the name of the fusion. The file contains it only for people who read the file.

    Raises HostIRError if the folder cannot be written.
    """

    def rows() -> dict[str, Any]:
        known = read(key)
        merged = {c: known[c].merged(entry) if c in known else entry for c, entry in entries.items()}
        every = {**known, **merged}
        return {"entries": [{"candidate": asdict(candidate), **asdict(entry)} for candidate, entry in every.items()]}

    return _write(key, name, rows)


def write_times(key: Mapping[str, Any], name: str, times: Mapping[str, float]) -> Path:
    """Replace the times of a key, and return the path of the file. See `write` for `name` and errors."""
    return _write(key, name, lambda: {"times": dict(times)})


def _write(key: Mapping[str, Any], name: str, content: Callable[[], dict[str, Any]]) -> Path:
    """Write the file of a key, and return its path. `content` is called while no other process writes to the cache."""
    path = path_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            _replace(path, {"format": FORMAT, "program": name, "key": key, **content()})
    except OSError as problem:
        raise error(
            f"cannot write the tuning cache {path.parent}: {problem.strerror or problem}",
            hint="HOSTIR_CACHE names another folder",
        ) from None
    return path


def _replace(path: Path, data: Mapping[str, Any]) -> None:
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
def _locked(directory: Path) -> Iterator[None]:
    """Return a context manager that holds the lock file of the cache.

    So only one process at a time writes to the cache.
    """
    # Open for reading as well: opening a FIFO for writing only would wait for a reader.
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
