"""What is chosen, and why: plain data, which an executor holds and the cache keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MEASURED, ESTIMATED, ASKED_FOR, FALLBACK = "measured", "estimated", "asked for", "fallback"


@dataclass(frozen=True)
class Candidate:
    """A way to run a fusion: how it is lowered, and what computes."""

    strategy: str
    streams: int
    kernels: str

    @property
    def on_streams(self) -> bool:
        """Whether the number of its worker streams tells it from others of its strategy."""
        return self.strategy in ("pipeline", "ring") or (self.strategy == "fused" and self.streams > 1)

    def __str__(self) -> str:
        streams = f", {self.streams} streams" if self.on_streams else ""
        return f"{self.strategy}{streams}, {self.kernels}"


@dataclass(frozen=True)
class Timing:
    """What a call takes, in microseconds.

    Fields:
        us: what candidates are ranked by, one of the other two; see `CALLS`.
        eager: every statement issued anew.
        graph: the replay of a CUDA graph; None where there is none.
    """

    candidate: Candidate
    us: float
    eager: float | None = None
    graph: float | None = None


# How calls are made, and so by which time candidates are ranked. With `out=` an executor replays a CUDA graph of its
# own, but for programs that communicate through NCCL, which only their caller can capture.
CALLS = ("out", "eager", "graph")


def ranked_by(calls: str, eager: float | None, graph: float | None, *, captured_by_caller: bool) -> float | None:
    """The time that counts for calls made so; None where it is not known."""
    replayed = calls == "graph" or (calls == "out" and not captured_by_caller)
    return graph if replayed and graph is not None else eager


@dataclass(frozen=True)
class Impossible:
    """A candidate that cannot be taken, and why.

    `loud` where the reason is the machine or the sizes, not what the fusion computes: with others it might be taken.
    """

    candidate: Candidate
    reason: str
    loud: bool = False


@dataclass(frozen=True)
class Choice:
    """How a fusion runs, and why so.

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
        """Which strategies are not possible as one might have hoped, with each reason, as clauses.

        This is what is warned of.
        """
        strategies: dict[str, dict[str, None]] = {}
        for it in self.impossible:
            if it.loud or self.source == FALLBACK:
                strategies.setdefault(it.reason, {})[it.candidate.strategy] = None
        return tuple(f"{_listed(list(names))} not possible here: {reason}" for reason, names in strategies.items())

    def __str__(self) -> str:
        times = {timing.candidate: timing.us for timing in self.timings}
        took = f" {times[self.taken]:.0f} us" if self.taken in times else ""
        return f"@{self.fusion} runs '{self.taken}' ({self.source}{took}) on {self.machine}"

    def to_json(self) -> dict[str, Any]:
        """As data for tools, and for the other ranks."""
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
    """`ring is`, or `ring, fused and push are`."""
    *others, last = names
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"
