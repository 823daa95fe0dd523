"""Try candidates in the first calls of a range of sizes, and keep the fastest.

The cost model proposes a few candidates. The caller's calls are the trials: the candidate that is tried computes the
results of the call. So candidates are timed at the place where they are used, in the way that the caller makes calls.

A trial is a series of duels. The champion, at first the candidate with the shortest estimate, meets one challenger
after another. In a duel the challenger first runs a few calls untimed. Then both run ROUNDS calls in turn, in the order
A B B A A B. The time of a call is the time of its slowest rank. The candidate with the smaller median wins. The loser
gives up its memory, so at most two candidates hold memory at a time.

On CUDA there is a race before the duels, at the end of the first call. The trial captures each candidate in a CUDA
graph, and replays the graphs in turn on the inputs of this call. The winner is the first champion. So a caller who
captures the second call captures the candidate that is best for captures. If replays of a candidate take longer than
calls of the champion, the candidate has lost without a duel. So if the device takes longer than the host, the race
decides alone, and the trial ends after a few more calls.

Some calls are not timed. The first call with new sizes runs the best candidate so far, because the caller may capture
the next call with these sizes into a CUDA graph. The first call of a candidate with new sizes makes a plan. Captures,
recomputations and sizes that do not fit all candidates are no trials either.

All ranks must run the same candidate in the same call. In every call of a trial, the rank that comes first writes to
the store which candidate runs, and the other ranks follow it. So the ranks agree even if one of them captures a CUDA
graph. At the end of a duel all ranks meet, and exchange their times. After the trial, calls cost no more than the calls
of any executor. If a rank fails in a meeting, all ranks raise an error, and the trial restarts.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import torch

from hostir.call.arguments import written_inputs
from hostir.call.executor import Executor
from hostir.call.rank import RankExecutor
from hostir.call.started import Started
from hostir.choice.choices import Candidate, Timing, TrialState
from hostir.choice.laps import REPLAYS, Lap, Stopwatch, replayed, room_for_flush
from hostir.choice.ranges import Ranges, key
from hostir.choice.recomputation import Checkpointed, recomputes
from hostir.ir.source import HostIRError, error
from hostir.job.links import MisalignedError, headline

WARM = {"cpu": 1, "cuda": 3}  # untimed calls; on CUDA, native code or a CUDA graph issues calls from the fourth on
ROUNDS = 5  # timed calls of each candidate in a duel
MOST_CALLS = 64  # the most calls of a trial in which all calls have the same sizes
LIMIT = 2 * MOST_CALLS  # calls after which a trial ends with the best so far; captures and recomputations do not count
PATIENCE = 600.0  # seconds that ranks wait for a rank that compiles kernels of a candidate
SHOWN_AFTER = 1.0  # seconds after which a trial shows its progress at a terminal
LATE = f"not tried: a trial ends after {LIMIT} calls"


def is_capturing(device: str) -> bool:
    """Return True if the caller captures a CUDA graph. `device` is the type of the device."""
    return device == "cuda" and torch.cuda.is_current_stream_capturing()


class TrialStep(NamedTuple):
    """The part of one call in a trial, on which the ranks agree.

    Fields:
        candidate: the candidate that runs.
        scheduled: True if the call is the next one of the schedule.
        timed: True if the call is timed.
        counted: True if the call counts toward LIMIT.
    """

    candidate: Candidate
    scheduled: bool = False
    timed: bool = False
    counted: bool = False

    @staticmethod
    def of(text: str) -> TrialStep:
        candidate, *flags = json.loads(text)
        return TrialStep(Candidate(*candidate), *flags)

    def __str__(self) -> str:
        return json.dumps([astuple(self.candidate), *self[1:]])


class TrialCall(NamedTuple):
    """A call that has just been made, with the tensors of this rank. `out` is the argument of the call."""

    sizes: Mapping[str, int]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    out: Any


class Trial:
    """The trial of the candidates for one range of sizes.

    Args:
        name: a text that names the fusion and the range. It is the same on all ranks, and different for each trial.
        rivals: the candidates to try, with estimated times, the best first. A rank tries those that all ranks have.
        ranges: the choices of the fusion. The trial replaces the choice for its range.
        sizes: the sizes of the first call.
        execute: returns the executor of a candidate.
    """

    def __init__(
        self,
        name: str,
        rivals: Sequence[Timing],
        ranges: Ranges,
        sizes: Mapping[str, int],
        execute: Callable[[Candidate], Executor],
    ) -> None:
        self.name, self.rivals, self.ranges, self.sizes, self.execute = name, rivals, ranges, sizes, execute
        self.before = ranges.choice(sizes)  # the choice before the trial
        self.estimates = {timing.candidate: timing.us for timing in rivals}
        # The seconds that the trial may add to the calls; those of rank 0 count. Without any, there are no duels.
        self.budget = 0.0 if torch.are_deterministic_algorithms_enabled() else ranges.budget
        self.checkpointed = Checkpointed[Candidate]()
        self.busy: threading.Thread | None = None  # the thread that is in a call
        first = execute(rivals[0].candidate)
        self.session, self.device = first.session, "cuda" if first.machine == "cuda" else "cpu"
        self.began = time.monotonic()
        self.restart()

    def restart(self) -> None:
        """Restart the trial. All ranks do this after a call that ended midway.

        If a rank has ended the trial before, all ranks take the result of that rank.
        """
        known = self.ranges.replays(self.sizes) if self.budget else {}
        replays = known if known.keys() >= self.estimates.keys() else {}
        best = min(self.estimates, key=lambda c: replays.get(c, inf))  # by estimate, if there are no times
        self.progress = TrialState(best, rivals=len(self.estimates), replays=replays)
        self.waiting = [c for c in self.estimates if c != best]  # challengers that have not been tried
        self.challenger: Candidate | None = None
        self.number = 0  # calls so far
        self.counted = 0  # calls so far that count toward LIMIT
        self.spent = 0.0  # seconds that the losers took longer than the winners
        self.laps: list[tuple[Candidate, Mapping[str, int], Lap]] = []  # of the current duel
        self.ran: dict[Candidate, set[str]] = {}  # the sizes that each candidate has run, while it has plans
        self.schedule: deque[tuple[Candidate, bool]] = deque([(self.progress.best, False)])
        self.met = False
        self.ranges.choices[key(self.ranges.representative(self.sizes))] = self.before
        if (result := self._posted_result()) is not None:
            self.progress.best = result
            self._conclude()

    @property
    def is_over(self) -> bool:
        """True if all later calls run the winner: the trial has ended, and no checkpointed part can be recomputed."""
        return self.progress.done and not self.checkpointed and not is_capturing(self.device)

    def call(self, sizes: Mapping[str, int], inputs: Sequence[Any], out: Any) -> tuple[Executor, tuple[Any, ...]]:
        """Make a call, which may be a part of the trial. Return the executor that made it, and its outputs."""
        executor = self.execute(self.progress.best)
        calls = executor.calls
        if (other := self.busy) is not None:
            calls.refuse_overlap(executor.program.name, other)
        with calls.lock:
            self.busy = threading.current_thread()
            try:
                self._recover()
                return self._call(sizes, inputs, out)
            finally:
                self.busy = None

    def start(self, sizes: Mapping[str, int], inputs: Sequence[Any], out: Any) -> tuple[Executor, Started]:
        """Start a call of the best candidate so far. A started call is not timed, because other work runs beside it."""
        self._recover()
        candidate = self._kept(sizes)
        executor = self.execute(candidate)
        started = executor.start(*inputs, out=out)
        self.ran.setdefault(candidate, set()).add(key(sizes))
        return executor, started

    def end(self) -> None:
        """End the trial with the best candidate so far. All ranks call this between the same two calls."""
        executor = self.execute(self.progress.best)
        with self._together(executor):
            executor.synchronize()
            self._finish()

    def rest(self) -> None:
        """Drop the plans of the losers, which recomputations may have made again after the trial."""
        for candidate in self.ran.keys() - {self.progress.best}:
            self._rest(candidate)

    def _recover(self) -> None:
        """Recover from a failure before this call. If the ranks renew their shared state, the trial restarts."""
        executor = self.execute(self.progress.best)
        if isinstance(executor, RankExecutor):
            executor.recover()

    @contextlib.contextmanager
    def _together(self, executor: Executor) -> Iterator[None]:
        """Return a context manager for work that all ranks do together.

        If an exception ends the work, the other ranks get an error, too, and the trial restarts in the next call.
        """
        try:
            yield
        except BaseException as problem:
            if isinstance(executor, RankExecutor):
                executor.abandon(problem)
            if self.session is None:
                self.restart()
            raise

    def _call(self, sizes: Mapping[str, int], inputs: Sequence[Any], out: Any) -> tuple[Executor, tuple[Any, ...]]:
        repeats, capturing = recomputes(), is_capturing(self.device)
        step = self._first(self._step(sizes, repeats, capturing))
        if step.counted and capturing:
            what = f"this rank captures a call of {self.name} into a CUDA graph, and another rank does not"
            raise error(what, expected="all ranks to capture the same calls")
        executor = self.execute(step.candidate)
        lap = self.stopwatch.start() if step.timed else None
        outputs = executor(*inputs, out=out)
        if lap is not None:
            lap.stop()
            self.laps.append((step.candidate, sizes, lap))
        self.number += 1
        self.counted += step.counted
        self.ran.setdefault(step.candidate, set()).add(key(sizes))
        if not repeats:
            self.checkpointed.append(step.candidate)
        if step.scheduled:
            self.schedule.popleft()
        if step.counted and (not self.schedule or self.counted >= LIMIT):
            with self._together(executor):
                self._meet(executor, TrialCall(sizes, inputs, outputs, out))
        return executor, outputs

    def _step(self, sizes: Mapping[str, int], repeats: bool, capturing: bool) -> TrialStep:
        """Return the part of a call with these sizes in the trial, as this rank proposes it.

        `repeats` is True if the call recomputes a call, and `capturing` is True if it is captured in a CUDA graph.
        """
        kept = self._kept(sizes)
        if repeats:
            return TrialStep(self.checkpointed.repeated() or kept)
        if self.progress.done or capturing:
            return TrialStep(kept)
        candidate, timed = self.schedule[0]
        if not all(self.ranges.fits(rival, sizes) for rival in self.estimates):
            return TrialStep(kept, counted=True)
        if key(sizes) not in self.ran.get(kept, ()):
            return TrialStep(kept, scheduled=(candidate, timed) == (kept, False), counted=True)
        if timed and key(sizes) not in self.ran.get(candidate, ()):
            return TrialStep(candidate, counted=True)
        return TrialStep(candidate, scheduled=True, timed=timed, counted=True)

    def _kept(self, sizes: Mapping[str, int]) -> Candidate:
        """Return the candidate for a call that cannot be timed: the best so far.

        If it does not fit the sizes, return the next best candidate that does.
        """
        kept = self.progress.best
        return kept if self.ranges.fits(kept, sizes) else self.ranges.candidate(sizes)

    def _first(self, mine: TrialStep) -> TrialStep:
        """Return the step that the rank that comes first proposes for this call. All ranks follow it.

        `mine` is the proposal of this rank.
        """
        if self.progress.done or self.session is None or self.session.size == 1:
            return mine
        with self.session.asking(f"call {self.number} of the trial of {self.name}"):
            place = f"trial of {self.name}/{self.number}"
            return TrialStep.of(self.session.store.compare_set(place, "", str(mine)).decode())

    def _exchange(self, mine: object) -> list[Any]:
        """Send data to all ranks, and return the data of all ranks."""
        text = json.dumps(mine)
        if self.session is None:
            return [json.loads(text)]
        where = f"the trial of {self.name}"
        return [json.loads(each) for each in self.session.exchange(where, text, PATIENCE, where)]

    def _meet(self, executor: Executor, call: TrialCall) -> None:
        """End a duel, and begin the next one. All ranks call this after the same call."""
        executor.synchronize()
        if not self.met:
            self._agree()
            self.stopwatch = Stopwatch(self.device, self.session)
            if self.waiting and self.stopwatch.on_gpu:
                self._race(call)
                best = self.progress.best
                self.schedule.extend([(best, False)] * WARM[self.device] + [(best, True)] * ROUNDS)
                return self._publish()
        medians = self._medians() if self.laps else {}
        if self.challenger is not None and not self.schedule:
            self._end_duel(self.challenger, medians)
            self.challenger = None
        elif (us := medians.get(self.progress.best, nan)) > 0:
            self.progress.times[self.progress.best] = us
        if self.counted >= LIMIT:
            self.progress.refused |= dict.fromkeys(filter(None, (self.challenger, *self.waiting)), LATE)
            return self._finish()
        self._drop_losers()
        while self.waiting:
            challenger = self.waiting.pop(0)
            self.progress.tried += 1
            if self._lost(challenger):
                continue
            self._show(challenger)
            if reason := self._too_slow(challenger) or self._prepared(challenger, call):
                self.progress.refused[challenger] = reason
                continue
            self.challenger = challenger
            duel = [self.progress.best, challenger]
            turns = [c for n in range(ROUNDS) for c in (duel if n % 2 == 0 else reversed(duel))]
            self.schedule.extend([(challenger, False)] * WARM[self.device] + [(c, True) for c in turns])
            return self._publish()
        return self._finish()

    def _agree(self) -> None:
        """Agree on the budget and on the candidates: those of rank 0, unless another rank lacks them."""
        mine = [astuple(candidate) for candidate in self.waiting]
        answers = self._exchange([self.budget, mine])
        self.budget, waiting = answers[0]
        shared = [each for each in waiting if all(each in rivals for _, rivals in answers)]
        self.waiting = [Candidate(*each) for each in shared] if self.budget else []
        self.met = True

    def _race(self, call: TrialCall) -> None:
        """Replay the candidates in turn, each in a CUDA graph of its own. The winner is the new champion."""
        replays = self.progress.replays
        if replays or written_inputs(self.ranges.program(self.progress.best)):  # replays would write the inputs, too
            return
        outs = [None if x is None else torch.empty_like(x) for x in call.outputs]
        graphs: dict[Candidate, torch.cuda.CUDAGraph] = {}
        flush = room_for_flush()
        best = self.progress.best
        for candidate in (best, *self.waiting):
            if self.spent > self.budget:
                break
            self._show(candidate)
            if candidate != best and (reason := self._prepared(candidate, call)):
                self.progress.refused[candidate] = reason
                continue
            if self._attempted(lambda c=candidate: graphs.update({c: self._recorded(c, call, outs)})):  # type: ignore[misc]
                if candidate == best:  # for example, because nothing runs with these sizes
                    break
                self._drop_losers()
                continue
            if candidate == best:
                continue
            self.laps = [(c, call.sizes, lap) for c, lap in replayed(graphs, self.stopwatch, flush)]
            self.execute(candidate).synchronize()
            medians = self._medians()
            replays.setdefault(best, medians[best])
            replays[candidate] = medians[candidate] * replays[best] / medians[best]
            self.spent += sum(medians.values()) * REPLAYS / 1e6
            loser = best if replays[candidate] < replays[best] else candidate
            best = candidate if loser == best else best
            graphs.pop(loser).reset()
            self.progress.best = best
            self.ran[candidate] = {key(call.sizes)}
            self._drop_losers()
        for graph in graphs.values():
            graph.reset()
        left = {*self.waiting, *replays} - {best, *self.progress.refused}
        self.waiting = sorted([c for c in self.estimates if c in left], key=lambda c: replays.get(c, inf))

    def _recorded(self, candidate: Candidate, call: TrialCall, outs: Sequence[Any]) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of a candidate that writes to `outs`."""
        executor = self.execute(candidate)
        assert isinstance(executor, RankExecutor)
        executor(*call.inputs, out=outs)
        return executor.record(call.inputs, outs)

    def _lost(self, challenger: Candidate) -> bool:
        """Return True for a candidate whose replays take longer than calls of the champion. Keep the longer time."""
        us, best = self.progress.replays.get(challenger, nan), self.progress.times.get(self.progress.best, nan)
        if us > best:
            self.progress.times[challenger] = us
        return us > best

    def _medians(self) -> dict[Candidate, float]:
        """Return the median time of each candidate in the laps so far, in microseconds. Begin new laps.

        A lap's time is that of its slowest rank. The time of a candidate without times is NaN.
        """
        first = self.laps[0][1]
        mine = [_finite(lap.us() * self._scale(c, first, sizes)) for c, sizes, lap in self.laps]
        slowest: dict[Candidate, list[float]] = {candidate: [] for candidate, *_ in self.laps}
        for (candidate, *_), by_rank in zip(self.laps, zip(*self._exchange(mine), strict=True), strict=True):
            slowest[candidate] += [max(known)] if (known := [us for us in by_rank if us is not None]) else []
        self.laps.clear()
        return {candidate: statistics.median(times or [nan]) for candidate, times in slowest.items()}

    def _end_duel(self, challenger: Candidate, medians: Mapping[Candidate, float]) -> None:
        """End a duel by the times of its two candidates. The winner is the new champion."""
        champion = self.progress.best
        if not all(us > 0 for us in medians.values()):  # NaN is not greater than 0 either
            self.progress.refused[challenger] = "its calls could not be timed"
            return
        # The champion's time differs a little from duel to duel. All times are relative to its time in the first duel.
        times, calls = self.progress.times, WARM[self.device] + ROUNDS
        times.setdefault(champion, medians[champion])
        times[challenger] = medians[challenger] * times[champion] / medians[champion]
        self.spent += abs(medians[champion] - medians[challenger]) * calls / 1e6
        if times[challenger] < times[champion]:
            self.progress.best = challenger

    def _scale(self, candidate: Candidate, first: Mapping[str, int], sizes: Mapping[str, int]) -> float:
        """Return the factor that turns the time of a call with `sizes` into a time for the sizes `first`."""
        if sizes == first:
            return 1.0
        return self.ranges.estimate(candidate, first) / (self.ranges.estimate(candidate, sizes) or nan)

    def _too_slow(self, challenger: Candidate) -> str:
        """Return a reason not to try a candidate, if its calls would exceed the budget; else an empty text."""
        best = self.progress.best
        us = self.progress.times.get(best, self.estimates[best])
        longer = max(self.estimates[challenger] / self.estimates[best] - 1, 0.0) * us / 1e6
        if self.spent + longer * (WARM[self.device] + ROUNDS) <= self.budget:
            return ""
        return f"not tried: HOSTIR_TUNE allows trials {self.budget:g} s"

    def _attempted(self, work: Callable[[], object]) -> str:
        """Do work that all ranks do together. Return the reason if a rank cannot do it, else an empty text."""
        problem = ""
        try:
            work()
        except MisalignedError:
            raise
        except Exception as refusal:  # any failure, for example of a compiler: the other ranks wait for the reason
            if self.session is not None and self.session.groups.abandoned:  # another rank was interrupted
                raise
            problem = headline(refusal)
        return next(filter(None, self._exchange(problem)), "")

    def _prepared(self, candidate: Candidate, call: TrialCall) -> str:
        """Make the plan of a candidate on all ranks. Return the reason if a rank cannot, else an empty text."""
        self.ran[candidate] = set()
        best = self.execute(self.progress.best)
        held = bool(best.plans)

        def prepare() -> None:
            executor = self.execute(candidate)
            if isinstance(executor, RankExecutor):
                executor.prepare(call.inputs, call.out)
            if held and not best.plans:  # each call would release the memory of the other candidate
                raise error(f"HOSTIR_SYMMETRIC_LIMIT has no room for it beside '{self.progress.best}'")

        if problem := self._attempted(prepare):
            self._drop_losers()
            if isinstance(best, RankExecutor):
                best.prepare(call.inputs, call.out)
        return problem

    def _drop_losers(self) -> None:
        """Release the memory of all candidates except the best. All ranks call this, and none uses the memory now."""
        self.rest()
        self.ran = {self.progress.best: self.ran.get(self.progress.best, set())}
        if self.session is not None and self.session.groups.memory is not None:
            self.session.groups.memory.discard()

    def _rest(self, candidate: Candidate) -> None:
        try:
            executor = self.execute(candidate)
        except HostIRError:  # it could not be made at all
            return
        if isinstance(executor, RankExecutor):
            executor.rest()

    def _finish(self) -> None:
        """End the trial, and release the memory of all losers. All ranks call this."""
        self._drop_losers()
        self._post_result()
        self._conclude()

    def _conclude(self) -> None:
        """Set the state of a trial that has ended."""
        self.schedule.clear()
        self.waiting.clear()
        self.challenger = None
        self.met = self.progress.done = True
        self._publish()

    def _publish(self) -> None:
        first = self.session is None or self.session.rank == 0
        self.ranges.tried(self.sizes, self.before, self.rivals, first, self.progress)

    def _post_result(self) -> None:
        """Write the winner to the store, for ranks whose last meeting is interrupted now."""
        if self.session is not None and self.session.size > 1:
            with self.session.asking(f"the result of the trial of {self.name}"):
                text = json.dumps(astuple(self.progress.best))
                self.session.first_store.set(f"result of the trial of {self.name}", text)

    def _posted_result(self) -> Candidate | None:
        """Return the winner that a rank has written to the store; None if no rank has."""
        if self.session is None or self.session.size == 1:
            return None
        place, store = f"result of the trial of {self.name}", self.session.first_store
        with self.session.asking(place):
            return Candidate(*json.loads(store.get(place))) if store.check([place]) else None

    def _show(self, challenger: Candidate) -> None:
        """Print the progress at a terminal, if the trial takes long."""
        first = self.session is None or self.session.rank == 0
        if first and sys.stderr.isatty() and time.monotonic() - self.began > SHOWN_AFTER:
            count = f"{self.progress.tried} of {self.progress.rivals}"
            sys.stderr.write(f"hostir tries '{challenger}' for {self.name} ({count})\n")


def _finite(us: float) -> float | None:
    """Return a time for JSON: None if it is not finite."""
    return us if isfinite(us) else None
