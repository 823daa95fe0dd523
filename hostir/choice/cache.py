"""Choices as plain data, and measurements on disk."""

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

from hostir.choice.platforms import Platform
from hostir.ir.program import Program
from hostir.ir.source import error, warn_once
from hostir.knobs import CACHE
from hostir.lower import STRATEGIES

# Choices --------------------------------------------------------------------------------------------------------------
# The choice and its reasons, as plain data that an executor holds and the cache keeps.

MEASURED, ESTIMATED, ASKED_FOR, FALLBACK = "measured", "estimated", "asked for", "fallback"


@dataclass(frozen=True)
class Candidate:
    """A way to run a fusion: strategy, streams and kernels."""

    strategy: str
    streams: int
    kernels: str

    @property
    def on_streams(self) -> bool:
        """Whether candidates of its strategy differ in the number of worker streams."""
        counts = STRATEGIES[self.strategy].stream_counts if self.strategy in STRATEGIES else (1,)
        return max(counts) > 1 and (self.streams > 1 or 1 not in counts)

    def __str__(self) -> str:
        streams = f", {self.streams} stream{'s' * (self.streams != 1)}" if self.on_streams else ""
        return f"{self.strategy}{streams}, {self.kernels}"


@dataclass(frozen=True)
class Timing:
    """The time of a call, in microseconds, and the memory that it takes.

    Fields:
        us: what candidates are ranked by, one of the other two; see `hostir.lower.CALLS`.
        eager: every statement issued anew.
        graph: the replay of a CUDA graph; None where there is none.
        symmetric: the bytes of symmetric memory on a rank.
    """

    candidate: Candidate
    us: float
    eager: float | None = None
    graph: float | None = None
    symmetric: int = 0


def ranked_by(calls: str, eager: float | None, graph: float | None, *, captured_by_caller: bool) -> float | None:
    """Return the time that counts for calls made so; None if it is not known."""
    replayed = calls == "graph" or (calls == "out" and not captured_by_caller)
    return graph if replayed and graph is not None else eager


@dataclass(frozen=True)
class Impossible:
    """A candidate that cannot be taken, and why.

    `warn` if the reason is the machine or the sizes, not what the fusion computes: with others it might be possible.
    """

    candidate: Candidate
    reason: str
    warn: bool = False


@dataclass(frozen=True)
class Choice:
    """The way in which a fusion runs, and why it was chosen.

    Fields:
        fusion: its name.
        taken: the candidate.
        source: `measured`, here or earlier; `estimated` by the cost model; `asked for` by the caller; `fallback` where
            nothing else was possible.
        machine: in words, what the times are of.
        timings: of the candidates, the fastest first.
        impossible: those that could not be taken, with the reasons.
        notes: what else there is to know, such as what cannot be overlapped.
    """

    fusion: str
    taken: Candidate
    source: str
    machine: str
    timings: tuple[Timing, ...] = ()
    impossible: tuple[Impossible, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def strategy(self) -> str:
        return self.taken.strategy

    @property
    def streams(self) -> int:
        return self.taken.streams

    @property
    def kernels(self) -> str:
        return self.taken.kernels

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The clauses of a fallback warning: strategies that are not possible here, with the reason of each."""
        strategies: dict[str, dict[str, None]] = {}
        for it in self.impossible:
            if it.warn or self.source == FALLBACK:
                strategies.setdefault(it.reason, {})[it.candidate.strategy] = None
        return tuple(f"{_listed(list(names))} not possible here: {reason}" for reason, names in strategies.items())

    def __str__(self) -> str:
        times = {timing.candidate: timing.us for timing in self.timings}
        took = f" {times[self.taken]:.0f} us" if self.taken in times else ""
        return f"@{self.fusion} runs '{self.taken}' ({self.source}{took}) on {self.machine}"

    def to_json(self) -> dict[str, Any]:
        """Return the choice as data for tools, and for the other ranks."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Choice:
        """The inverse of `to_json`. Raises KeyError or TypeError for anything else."""
        return Choice(
            data["fusion"],
            Candidate(**data["taken"]),
            data["source"],
            data["machine"],
            tuple(Timing(**{**it, "candidate": Candidate(**it["candidate"])}) for it in data["timings"]),
            tuple(Impossible(**{**it, "candidate": Candidate(**it["candidate"])}) for it in data["impossible"]),
            tuple(data["notes"]),
        )


def _listed(names: list[str]) -> str:
    """Join names with their verb: `ring is`, or `ring, fused and push are`."""
    *others, last = names
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"


# The cache ------------------------------------------------------------------------------------------------------------
# Measurements on disk: one JSON file for each fusion, sizes and platform, below HOSTIR_CACHE.
#
# A file is replaced atomically. Writers hold a lock and add to what others have measured meanwhile. Files that
# cannot be read, or were written by another version, are ignored with one warning.

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
