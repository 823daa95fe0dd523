"""Plain data: the candidate that was chosen, and the reasons for the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hostir.lower import STRATEGIES
from hostir.lower.strategies import ACROSS_HOSTS

MEASURED, ESTIMATED, ASKED_FOR, FALLBACK = "measured", "estimated", "asked for", "fallback"
BEING_MEASURED = "being measured"  # with the number of candidates that were tried so far
NO_CAPTURE = "it cannot be captured in a CUDA graph"  # the reason why a candidate is left out of calls in graphs
WORTH = 0.02  # captures run another candidate if its replay takes less time by at least this share


@dataclass(frozen=True)
class Candidate:
    """One way to run a fusion: with a strategy, a number of worker streams, and a family of kernels."""

    strategy: str
    streams: int
    kernels: str

    @property
    def shows_streams(self) -> bool:
        """True if the candidate's text must contain the number of worker streams: the strategy allows several."""
        streamed = {**STRATEGIES, **ACROSS_HOSTS}
        counts = streamed[self.strategy].stream_counts if self.strategy in streamed else (1,)
        return max(counts) > 1 and (self.streams > 1 or 1 not in counts)

    def __str__(self) -> str:
        streams = f", {self.streams} stream{'s' * (self.streams != 1)}" if self.shows_streams else ""
        return f"{self.strategy}{streams}, {self.kernels}"


@dataclass(frozen=True)
class Timing:
    """The time of one call of a candidate, in microseconds, and the symmetric memory that the candidate uses.

    Fields:
        us: the time by which candidates are ranked. It is `eager` or `graph` (see `ranked_by`), or comes from a trial.
        eager: the time of a call that issues every statement anew.
        graph: the time of a replay of a CUDA graph; None if the candidate cannot be replayed.
        symmetric: the number of bytes of symmetric memory on a rank.
        plain: True if a call with `out=` is faster if the executor replays no graph for it.
    """

    candidate: Candidate
    us: float
    eager: float | None = None
    graph: float | None = None
    symmetric: int = 0
    plain: bool = False


def ranked_by(calls: str, eager: float | None, graph: float | None, *, captured_by_caller: bool) -> float | None:
    """Return the time by which a candidate is ranked: `graph` if its calls are replays of a CUDA graph, else `eager`.

    If `graph` is None, return `eager`. The result is None if both times are None.

    Args:
        calls: how calls are made, as in `hostir.choice.choose`. Calls are replays for `graph`. They are also replays
            for `out`, unless `captured_by_caller` is True.
        eager, graph: the two times of the candidate, as in `Timing`.
        captured_by_caller: True if only the caller captures calls of the program in a CUDA graph, because executors
            cannot, or would gain nothing.
    """
    replayed = calls == "graph" or (calls == "out" and not captured_by_caller)
    return graph if replayed and graph is not None else eager


@dataclass
class TrialState:
    """The state of a trial, for reports.

    Fields:
        best: the best candidate so far.
        times: the times of the candidates tried so far, in microseconds.
        replays: the times of replays of a CUDA graph of each candidate, in microseconds.
        plain: the candidates whose calls are faster if their executors replay no graphs.
        refused: the reasons why candidates were not tried.
        tried, rivals: the number of candidates that were tried so far, and the number of all candidates.
        done: True once the trial has ended.
        seconds: the time of the trial so far, on this rank.
        compiling: the part of this time in which challengers were planned and compiled, on the slowest rank.
    """

    best: Candidate
    times: dict[Candidate, float] = field(default_factory=dict)
    replays: dict[Candidate, float] = field(default_factory=dict)
    plain: set[Candidate] = field(default_factory=set)
    refused: dict[Candidate, str] = field(default_factory=dict)
    tried: int = 1
    rivals: int = 1
    done: bool = False
    seconds: float = 0.0
    compiling: float = 0.0


@dataclass(frozen=True)
class Impossible:
    """A candidate that cannot be chosen, and the reason.

    `warn` is True if the machine or the sizes are the reason. The candidate may then be possible on another machine or
    for other sizes. It is False if the fusion itself is the reason.
    """

    candidate: Candidate
    reason: str
    warn: bool = False


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen for a fusion, and the reason for the choice.

    Fields:
        fusion: the name of the fusion.
        taken: the chosen candidate.
        source: the reason for the choice. `measured`: the candidate was the fastest in measurements. `estimated`: it is
            the fastest by the cost model. `being measured (3 of 5)`: it is the fastest so far in a trial. `asked for`:
            the caller named its strategy. `fallback`: the program communicates, but only the sequential strategy is
            possible.
        machine: a description of the machine for which the times are valid.
        timings: the times of the candidates, the fastest first; in a trial only those that were measured so far.
        impossible: the candidates that could not be chosen, with the reasons.
        notes: further remarks, such as communications that cannot be overlapped, and the time that a trial has taken.
        hosts: the number of hosts that the fusion states, or that the machine has; 0 if neither is known.
    """

    fusion: str
    taken: Candidate
    source: str
    machine: str
    timings: tuple[Timing, ...] = ()
    impossible: tuple[Impossible, ...] = ()
    notes: tuple[str, ...] = ()
    hosts: int = 0

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
        """The clauses of a fallback warning.

        There is one clause for each reason, with the strategies that this reason excludes.
        """
        strategies: dict[str, dict[str, None]] = {}
        for impossible in self.impossible:
            if impossible.warn or self.source == FALLBACK:
                strategies.setdefault(impossible.reason, {})[impossible.candidate.strategy] = None
        return tuple(f"{_with_verb(list(names))} not possible here: {reason}" for reason, names in strategies.items())

    @property
    def captured(self) -> Candidate:
        """The candidate for calls that the caller captures in a CUDA graph.

        It is `taken`, unless the replays of another candidate took at least 2 % less time in measurements. Only
        candidates without symmetric memory count. It would stay allocated, even if nothing is ever captured.
        """
        replays = {timing.candidate: timing.graph for timing in self.timings if timing.graph is not None}
        if self.source != MEASURED or self.taken not in replays:
            return self.taken
        free = [timing.candidate for timing in self.timings if timing.candidate in replays and not timing.symmetric]
        best = min(free, key=replays.__getitem__, default=self.taken)
        return best if replays[best] < replays[self.taken] * (1 - WORTH) else self.taken

    @property
    def plain(self) -> str:
        """The reason why the executor should replay no graph for calls with `out=`; empty if it may."""
        plain = any(timing.plain for timing in self.timings if timing.candidate == self.taken)
        return "a trial has shown that plain calls are faster" if plain and self.source == MEASURED else ""

    @property
    def status(self) -> str:
        """The field `source` for a text in parentheses, such as `being measured: 3 of 5`."""
        return self.source.replace(" (", ": ").replace(")", "")

    def __str__(self) -> str:
        times = {timing.candidate: timing.us for timing in self.timings}
        time = f" {times[self.taken]:.0f} us" if self.taken in times else ""
        if time and self.source.startswith(BEING_MEASURED):
            time = f",{time} so far"
        elif len(self.timings) > 1 and self.timings[0].candidate == self.taken:
            time += f", the fastest of {len(self.timings)}"
        return f"@{self.fusion} runs '{self.taken}' ({self.status}{time}) on {self.machine}"

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a JSON object, for tools and for the other ranks."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Choice:
        """Make a choice from the data that `to_json` returns. Raise KeyError or TypeError for other data."""
        return Choice(
            data["fusion"],
            Candidate(**data["taken"]),
            data["source"],
            data["machine"],
            tuple(Timing(**{**row, "candidate": Candidate(**row["candidate"])}) for row in data["timings"]),
            tuple(Impossible(**{**row, "candidate": Candidate(**row["candidate"])}) for row in data["impossible"]),
            tuple(data["notes"]),
            data["hosts"],
        )


def _with_verb(names: list[str]) -> str:
    """Join names and add a verb: `ring is`, or `ring, fused and push are`."""
    *others, last = names
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"
