"""Try candidates in the first calls of a range of sizes, and keep the fastest.

The cost model proposes a few candidates. The caller's calls are the trials: the candidate that is tried computes the
results of the call. So candidates are timed at the place where they are used, in the way that the caller makes calls.

A trial is a series of duels. The champion, at first the candidate with the shortest estimate, meets one challenger
after another. In a duel the challenger first runs a few calls untimed. Then both run ROUNDS calls in turn, in the order
A B B A A B. The time of a call is the time of its slowest rank. The candidate with the smaller median wins. The loser
gives up its memory, so at most two candidates hold memory at a time.

All ranks must run the same candidate in the same call. In every call of a trial, the rank that comes first writes to
the store which candidate runs: the next one of the trial, the best one so far, or a certain one again. The other ranks
follow it. So the ranks agree even if one of them captures a CUDA graph, in which no candidate can be timed. At the end
of a duel all ranks meet, and exchange their times. After the trial, calls cost no more than the calls of any executor.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

import torch

from hostir.call.executor import Executor
from hostir.call.rank import RankExecutor
from hostir.call.started import Started
from hostir.choice.choices import Candidate, Timing, TrialState
from hostir.choice.recomputation import Checkpointed, recomputes
from hostir.ir.source import HostIRError, error
from hostir.job.links import MisalignedError, headline

WARM = {"cpu": 1, "cuda": 3}  # untimed calls; on CUDA, native code or a CUDA graph issues calls from the fourth on
ROUNDS = 5  # timed calls of each candidate in a duel
MOST_CALLS = 64  # calls after which a trial ends, with the champion so far
PATIENCE = 600.0  # seconds that ranks wait for a rank that compiles kernels of a candidate
SHOWN_AFTER = 1.0  # seconds after which a trial shows its progress at a terminal
TRY, KEEP = "try", "keep"  # kinds of calls: run the next candidate of the trial; run the best candidate so far


class Lap:
    """Measures one call on a CPU by the wall clock, from the creation of this object to `stop`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds = nan

    def stop(self) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self.began

    def us(self) -> float:
        """Return the time in microseconds; NaN if it is not known."""
        return self.seconds * 1e6


class CudaLap(Lap):
    """Measures one call on CUDA by two events on the caller's stream."""

    def __init__(self) -> None:
        self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.first.record()

    def stop(self) -> None:
        self.last.record()

    def us(self) -> float:
        return float(self.first.elapsed_time(self.last)) * 1e3 if self.last.query() else nan


LAPS: dict[str, Callable[[], Lap]] = {"cpu": Lap, "cuda": CudaLap}  # by the type of the device


def is_capturing(device: str) -> bool:
    """Return True if the caller captures a CUDA graph. `device` is the type of the device."""
    return device == "cuda" and torch.cuda.is_current_stream_capturing()


class Trial:
    """The trial of the candidates for one range of sizes.

    Args:
        name: a text that names the fusion and the range. It is the same on all ranks, and different for each trial.
        rivals: the candidates to try, with estimated times, the fastest first. Those of rank 0 count.
        captured: the candidate that runs in captures of CUDA graphs before the first duel.
        execute: returns the executor of a candidate.
        estimate: returns the estimated time of a candidate for some sizes.
        budget: the seconds that the trial may add to the calls. If rank 0 passes 0, there is no trial.
        publish: called with the progress after each duel.
    """

    def __init__(
        self,
        name: str,
        rivals: Sequence[Timing],
        captured: Candidate,
        execute: Callable[[Candidate], Executor],
        estimate: Callable[[Candidate, Mapping[str, int]], float],
        budget: float,
        publish: Callable[[TrialState], None],
    ) -> None:
        self.name, self.execute, self.estimate, self.publish = name, execute, estimate, publish
        self.estimates = {timing.candidate: timing.us for timing in rivals}
        self.budget = budget
        self.captured = captured
        self.checkpointed = Checkpointed[Candidate]()
        self.busy: threading.Thread | None = None  # the thread that is in a call
        first = execute(rivals[0].candidate)
        self.session, self.device = first.session, "cuda" if first.machine == "cuda" else "cpu"
        self.began = time.monotonic()
        self.restart()

    def restart(self) -> None:
        """Restart the trial. All ranks do this after a call that ended midway."""
        self.progress = TrialState(next(iter(self.estimates)), rivals=len(self.estimates))
        self.waiting = list(self.estimates)[1:]  # challengers that have not been tried
        self.challenger: Candidate | None = None
        self.number = 0  # calls so far
        self.spent = 0.0  # seconds that the losers took longer than the winners
        self.laps: list[tuple[Candidate, Mapping[str, int], Lap]] = []  # of the current duel
        warm = WARM[self.device] + (self.captured != self.progress.best)
        self.schedule: deque[tuple[Candidate, bool]] = deque([(self.progress.best, False)] * warm)
        if self.captured != self.progress.best:  # first, so that it has a plan when a capture comes in the second call
            self.schedule[0] = self.captured, False
        self.met = False

    @property
    def is_over(self) -> bool:
        """True if all later calls run the winner: the trial has ended, and no checkpointed part can be recomputed."""
        return self.progress.done and not self.checkpointed

    def call(self, sizes: Mapping[str, int], inputs: Sequence[Any], out: Any) -> tuple[Executor, tuple[Any, ...]]:
        """Make a call, which may be a part of the trial. Return the executor that made it, and its outputs."""
        executor = self.execute(self.progress.best)
        calls, thread = executor.calls, threading.current_thread()
        if (other := self.busy) is not None and other is not thread:
            calls.refuse_overlap(executor.program.name, other)
        with calls.lock:
            self.busy = thread
            try:
                self._recover()
                return self._call(sizes, inputs, out)
            finally:
                self.busy = None

    def start(self, inputs: Sequence[Any], out: Any) -> tuple[Executor, Started]:
        """Start a call of the best candidate so far. A started call is not timed, because other work runs beside it."""
        self._recover()
        executor = self.execute(self._kept)
        return executor, executor.start(*inputs, out=out)

    def end(self) -> None:
        """End the trial with the best candidate so far. All ranks call this between the same two calls."""
        self._finish()

    def _recover(self) -> None:
        """Recover from a failure before this call. If the ranks renew their shared state, the trial restarts."""
        executor = self.execute(self.progress.best)
        if isinstance(executor, RankExecutor):
            executor.recover()

    def _call(self, sizes: Mapping[str, int], inputs: Sequence[Any], out: Any) -> tuple[Executor, tuple[Any, ...]]:
        capturing = is_capturing(self.device)
        proposed = KEEP if capturing or self.progress.done else TRY
        if recomputes():
            forward = self.checkpointed.repeated()
            proposed = KEEP if forward is None else str(list(self.estimates).index(forward))
        agreed = proposed if self.progress.done else self._first(proposed)
        if agreed == TRY and not self.schedule:  # an exception ended the meeting after the last duel
            self._finish()
            agreed = KEEP
        if agreed == TRY:
            if capturing:
                what = f"this rank captures a call of {self.name} into a CUDA graph, and another rank does not"
                raise error(what, expected="all ranks to capture the same calls")
            candidate, timed = self.schedule[0]
        else:
            candidate, timed = self._kept if agreed == KEEP else list(self.estimates)[int(agreed)], False
        executor = self.execute(candidate)
        lap = LAPS[self.device]() if timed else None
        outputs = executor(*inputs, out=out)
        self.number += 1
        if not recomputes():
            self.checkpointed.append(candidate)
        if agreed == TRY:
            self.schedule.popleft()
        if lap is not None:
            lap.stop()
            self.laps.append((candidate, sizes, lap))
        if agreed == TRY and not self.schedule:
            self._meet(executor, inputs, out)
        elif self.number >= MOST_CALLS and not self.progress.done:
            self._finish()
        return executor, outputs

    @property
    def _kept(self) -> Candidate:
        """The candidate for a call that cannot be timed: the best so far, or `captured` before the first duel."""
        return self.progress.best if self.met else self.captured

    def _first(self, mine: str) -> str:
        """Return the proposal for this call of the rank that comes first. All ranks follow it.

        `mine` is the proposal of this rank: TRY, KEEP, or the index of a candidate.
        """
        if self.session is None or self.session.size == 1:
            return mine
        with self.session.asking(f"call {self.number} of the trial of {self.name}"):
            return str(self.session.store.compare_set(f"trial of {self.name}/{self.number}", "", mine).decode())

    def _exchange(self, mine: object) -> list[Any]:
        """Send data to all ranks, and return the data of all ranks."""
        text = json.dumps(mine)
        if self.session is None:
            return [json.loads(text)]
        where = f"the trial of {self.name}"
        return [json.loads(each) for each in self.session.exchange(where, text, PATIENCE, where)]

    def _meet(self, executor: Executor, inputs: Sequence[Any], out: Any) -> None:
        """End a duel, and begin the next one. All ranks call this after the same call, with its tensors."""
        executor.synchronize()
        if not self.met:
            settings = self._exchange([self.budget, [list(self.estimates).index(c) for c in self.waiting]])[0]
            self.met, self.budget = True, settings[0]
            self.waiting = [list(self.estimates)[i] for i in settings[1]] if self.budget else []
            if self.captured != self.progress.best:
                self._drop(self.captured)
        if self.challenger is not None:
            self._end_duel(self.challenger)
        while self.waiting:
            challenger = self.waiting.pop(0)
            self.progress.tried += 1
            self._show(challenger)
            if reason := self._too_slow(challenger) or self._prepared(challenger, inputs, out):
                self.progress.refused[challenger] = reason
                continue
            self.challenger = challenger
            duel = [self.progress.best, challenger]
            turns = [c for n in range(ROUNDS) for c in (duel if n % 2 == 0 else reversed(duel))]
            self.schedule.extend([(challenger, False)] * WARM[self.device] + [(c, True) for c in turns])
            self.publish(self.progress)
            return
        self._finish()

    def _end_duel(self, challenger: Candidate) -> None:
        """End a duel: compare the times of all ranks, and drop the loser."""
        first = self.laps[0][1]
        mine = [_finite(lap.us() * self._scale(c, first, sizes)) for c, sizes, lap in self.laps]
        slowest: dict[Candidate, list[float]] = {candidate: [] for candidate, *_ in self.laps}
        for (candidate, *_), by_rank in zip(self.laps, zip(*self._exchange(mine), strict=True), strict=True):
            slowest[candidate] += [max(known)] if (known := [us for us in by_rank if us is not None]) else []
        champion = self.progress.best
        medians = {candidate: statistics.median(times or [nan]) for candidate, times in slowest.items()}
        self.laps.clear()
        self.challenger = None
        if not all(map(isfinite, medians.values())):
            self.progress.refused[challenger] = "its calls could not be timed"
            self._drop(challenger)
            return
        # The champion's time differs a little from duel to duel. All times are relative to its time in the first duel.
        times, calls = self.progress.times, WARM[self.device] + ROUNDS
        times.setdefault(champion, medians[champion])
        times[challenger] = medians[challenger] * times[champion] / medians[champion]
        self.spent += abs(medians[champion] - medians[challenger]) * calls / 1e6
        if times[challenger] < times[champion]:
            self.progress.best = challenger
        self._drop(champion if self.progress.best == challenger else challenger)

    def _scale(self, candidate: Candidate, first: Mapping[str, int], sizes: Mapping[str, int]) -> float:
        """Return the factor that turns the time of a call with `sizes` into a time for the sizes `first`."""
        return 1.0 if sizes == first else self.estimate(candidate, first) / self.estimate(candidate, sizes)

    def _too_slow(self, challenger: Candidate) -> str:
        """Return a reason not to try a candidate, if its calls would exceed the budget; else an empty text."""
        best = self.progress.best
        us = self.progress.times.get(best, self.estimates[best])
        longer = max(self.estimates[challenger] / self.estimates[best] - 1, 0.0) * us / 1e6
        if self.spent + longer * (WARM[self.device] + ROUNDS) <= self.budget:
            return ""
        return f"not tried: HOSTIR_TUNE allows trials {self.budget:g} s"

    def _prepared(self, candidate: Candidate, inputs: Sequence[Any], out: Any) -> str:
        """Make the plan of a candidate on all ranks. Return the reason if a rank cannot, else an empty text."""
        problem = ""
        try:
            executor = self.execute(candidate)
            if isinstance(executor, RankExecutor):
                executor.prepare(inputs, out)
        except MisalignedError:
            raise
        except HostIRError as refusal:
            problem = headline(refusal)
        problem = next(filter(None, self._exchange(problem)), "")
        if problem:
            self._drop(candidate)
        return problem

    def _drop(self, candidate: Candidate) -> None:
        """Release the memory of a candidate that lost. All ranks call this, and no rank uses the memory any more."""
        try:
            executor = self.execute(candidate)
        except HostIRError:  # it could not be made at all
            return
        if isinstance(executor, RankExecutor):
            executor.rest()
        if self.session is not None and self.session.groups.memory is not None:
            self.session.groups.memory.discard()

    def _finish(self) -> None:
        self.schedule.clear()
        self.waiting.clear()
        self.met = self.progress.done = True
        self.publish(self.progress)

    def _show(self, challenger: Candidate) -> None:
        """Print the progress at a terminal, if the trial takes long."""
        first = self.session is None or self.session.rank == 0
        if first and sys.stderr.isatty() and time.monotonic() - self.began > SHOWN_AFTER:
            count = f"{self.progress.tried} of {self.progress.rivals}"
            sys.stderr.write(f"hostir tries '{challenger}' for {self.name} ({count})\n")


def _finite(us: float) -> float | None:
    """Return a time for JSON: None if it is not finite."""
    return us if isfinite(us) else None
