"""A choice and its reasons, as plain data that an executor holds and the cache keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hostir.lower import STRATEGIES

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
