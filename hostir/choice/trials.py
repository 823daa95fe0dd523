"""Try candidates before the first call of a range of sizes, and keep the fastest.

The cost model proposes a few candidates. Before the first call in a range of sizes, all ranks try these candidates on
the inputs of the call, and in the way in which the caller calls. The results go to memory of the trial. Then the
fastest candidate makes the call, and all later calls in the range. So a range has one candidate from its first call on:
recomputations and captures in CUDA graphs run the same candidate as the first call.

A trial is a series of duels. The champion, at first the candidate with the shortest estimate, meets one challenger
after another. Both run in turn, in the order A B B A A B, and the one with the smaller cost stays. The loser gives up
its memory, so at most two candidates hold memory at a time.

On CUDA the timed runs are replays of a CUDA graph, and the ranks meet on the device before each run. So the times
contain no delays of the host. The time of the host is measured separately, in calls without a graph. The cost of a
candidate is the time of the device; if the host takes longer, half of the difference is added. This lies between the
cost of replays, for which the host hardly counts, and the cost of calls for which the device must wait.

If a candidate cannot be planned or called, it is left out. If a call of it ends midway on a rank, all ranks raise an
error. Then the next call begins the trial anew, without this candidate.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from math import isfinite, nan
from typing import Any

import torch

from hostir.call.arguments import written_inputs
from hostir.call.rank import RankExecutor
from hostir.choice.choices import Candidate, Timing, TrialState
from hostir.choice.laps import Lap, Stopwatch
from hostir.choice.ranges import Ranges, key
from hostir.ir.source import HostIRError, error
from hostir.job.links import MisalignedError, headline
from hostir.job.session import Session

WARM = {"cpu": 1, "cuda": 4}  # untimed calls; on CUDA, native code or a CUDA graph issues calls from the fourth on
ROUNDS = {"cpu": 5, "cuda": 9}  # timed runs of each candidate in a duel
ISSUED = 7  # calls on CUDA for which the time of the host is measured
PATIENCE = 600.0  # seconds that ranks wait for a rank that compiles kernels of a candidate
SHOWN_AFTER = 1.0  # seconds after which a trial shows its progress at a terminal


class Trial:
    """The trial of the candidates for one range of sizes.

    Args:
        name: a text that names the fusion and the range. It is the same on all ranks, and different for each trial.
        rivals: the candidates to try, with estimated times, the best first. A rank tries those that all ranks have.
        ranges: the choices of the fusion. The trial replaces the choice for its range.
        sizes: the sizes of the call.
        execute: returns the executor of a candidate.
    """

    def __init__(
        self,
        name: str,
        rivals: Sequence[Timing],
        ranges: Ranges,
        sizes: Mapping[str, int],
        execute: Callable[[Candidate], RankExecutor],
    ) -> None:
        self.name, self.rivals, self.ranges, self.sizes, self.execute = name, rivals, ranges, sizes, execute
        self.before = ranges.choice(sizes)  # the choice before the trial
        self.estimates = {timing.candidate: timing.us for timing in rivals}
        # The seconds that the trial may take; those of rank 0 count. Without any, no candidates are tried.
        self.budget = 0.0 if torch.are_deterministic_algorithms_enabled() else ranges.budget
        first = execute(rivals[0].candidate)
        self.session, self.calls = first.session, first.calls
        self.device = "cuda" if first.machine == "cuda" else "cpu"
        self.progress = TrialState(rivals[0].candidate, rivals=len(rivals))
        self.trying = self.progress.best
        self.began = time.monotonic()
        self.seconds = 0.0  # the time that the trial has taken on the slowest rank, without the making of plans
        self.runs: dict[Candidate, Callable[[], object]] = {}  # runs each candidate that holds memory
        self.host: dict[Candidate, float] = {}  # the host's time for a call on the slowest rank, in microseconds

    def run(self, inputs: Sequence[Any], out: Any) -> None:
        """Try the candidates with the tensors of a call. All ranks call this, in the same call.

        If the first candidate refuses the call, raise its error.
        """
        first, program = self.execute(self.progress.best), self.ranges.first_program
        written = {i for i, value in enumerate(program.inputs) if value.name in written_inputs(program)}
        inputs = [x.clone() if i in written and isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
        with self.calls.lock, torch.no_grad():
            first.recover()
            if (result := self._posted_result()) is not None:
                self.progress.best = result
                self._conclude()
            else:
                first(*inputs)
                with self._together(first):
                    self._try_all(inputs, out)
            self._forget_result()

    @contextlib.contextmanager
    def _together(self, executor: RankExecutor) -> Iterator[None]:
        """Return a context manager for work that all ranks do together.

        If an exception ends the work, the other ranks get an error, too.
        """
        try:
            yield
        except BaseException as problem:
            self.runs.clear()
            self.ranges.choices[key(self.ranges.representative(self.sizes))] = self.before
            if isinstance(problem, Exception):
                self.ranges.failed.add(self.trying)
            executor.abandon(problem)
            raise

    def _try_all(self, inputs: Sequence[Any], out: Any) -> None:
        """Try the candidates, and post the winner."""
        waiting = self._agreed()
        if waiting:
            self.stopwatch = Stopwatch(self.device, self.session)
            best = self.progress.best
            if reason := self._begun(best, inputs, out):
                self.progress.refused[best] = reason
            else:
                self._duels(waiting, inputs, out)
        self._drop_losers()
        if (job := self._shared_session) is not None:  # for a rank that is interrupted now
            with job.asking(self._place):
                job.first_store.set(self._place, json.dumps(astuple(self.progress.best)))
        self._conclude()

    def _agreed(self) -> list[Candidate]:
        """Agree on the budget and on the challengers: those of rank 0, unless another rank lacks them."""
        mine = [astuple(candidate) for candidate in self.estimates]
        answers = self._exchange([self.budget, mine])
        self.budget, rivals = answers[0]
        shared = [Candidate(*each) for each in rivals if all(each in theirs for _, theirs in answers)]
        return [c for c in shared if c != self.progress.best] if self.budget else []

    def _duels(self, waiting: Sequence[Candidate], inputs: Sequence[Any], out: Any) -> None:
        """Let each challenger meet the champion."""
        for challenger in waiting:
            self.trying = challenger
            self.progress.tried += 1
            self._show(challenger)
            best = self.progress.best
            if reason := self._too_slow(challenger) or self._prepared(challenger, inputs, out):
                self.progress.refused[challenger] = reason
                self._drop_losers()
                continue
            medians = self._duel(best, challenger)
            if not all(us > 0 for us in medians.values()):  # NaN is not greater than 0 either
                self.progress.refused[challenger] = "its calls could not be timed"
            else:
                self._compare(best, challenger, medians)
            self._drop_losers()
            self._publish()

    def _begun(self, candidate: Candidate, inputs: Sequence[Any], out: Any) -> str:
        """Make the first calls of a candidate. Return the reason if a rank cannot make them, else an empty text."""
        executor, results = self.execute(candidate), list[Any]()

        def call() -> None:
            executor(*inputs, out=None if out is None else results)

        def calls() -> None:
            results[:] = executor(*inputs)
            for _ in range(WARM[self.device] - 1):
                call()
            executor.synchronize()
            if self.device == "cuda":
                self.host[candidate] = statistics.median(_timed(call) for _ in range(ISSUED))
                executor.synchronize()

        def record() -> None:
            graph = executor.record(inputs, results)

            def replay() -> list[Any]:
                graph.replay()
                return results  # so that the memory that the graph writes is not freed while the graph exists

            self.runs[candidate] = replay

        self.host[candidate] = 0.0
        if problem := self._attempted(calls):
            return problem
        if self.device == "cpu" or self._attempted(record):  # some cannot be captured: then calls are timed
            self.runs[candidate] = call
        return ""

    def _duel(self, *candidates: Candidate) -> dict[Candidate, float]:
        """Run two candidates in turn. Return their median times in microseconds.

        The time of a run is that of its slowest rank. The time of a candidate without times is NaN.
        """
        began = time.monotonic()
        laps: list[tuple[Candidate, Lap]] = []
        for n in range(ROUNDS[self.device]):
            for candidate in candidates if n % 2 == 0 else reversed(candidates):
                lap = self.stopwatch.start()
                self.runs[candidate]()
                lap.stop()
                laps.append((candidate, lap))
        for candidate in candidates:
            self.execute(candidate).synchronize()
        times = [us if isfinite(us := lap.us()) else None for _, lap in laps]
        host = [self.host[candidate] for candidate in candidates]
        answers = self._exchange([times, host, time.monotonic() - began])
        slowest: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
        for i, (candidate, _) in enumerate(laps):
            known = [us for by_rank, *_ in answers if (us := by_rank[i]) is not None]
            slowest[candidate] += [max(known)] if known else []
        for i, candidate in enumerate(candidates):
            self.host[candidate] = max(by_rank[i] for _, by_rank, _ in answers)
        self.seconds += max(seconds for *_, seconds in answers)
        return {candidate: statistics.median(us or [nan]) for candidate, us in slowest.items()}

    def _compare(self, champion: Candidate, challenger: Candidate, medians: Mapping[Candidate, float]) -> None:
        """Make the candidate with the smaller cost the champion.

        The champion's time differs a little from duel to duel. All times are relative to its time in the first duel.
        """
        times, replays = self.progress.times, self.progress.replays
        replays.setdefault(champion, medians[champion])
        replays[challenger] = medians[challenger] * replays[champion] / medians[champion]
        for candidate in (champion, challenger):
            times[candidate] = replays[candidate] + max(self.host[candidate] - replays[candidate], 0.0) / 2
        if times[challenger] < times[champion]:
            self.progress.best = challenger

    def _too_slow(self, challenger: Candidate) -> str:
        """Return a reason not to try a candidate, if this could exceed the budget; else an empty text."""
        best = self.progress.best
        us = self.progress.replays.get(best, self.estimates[best])
        runs = WARM[self.device] + ROUNDS[self.device]
        needed = (self.estimates[challenger] / self.estimates[best] * us + us) * runs / 1e6
        if self.seconds + needed <= self.budget:
            return ""
        return f"not tried: HOSTIR_TUNE allows trials {self.budget:g} s"

    def _prepared(self, candidate: Candidate, inputs: Sequence[Any], out: Any) -> str:
        """Get a candidate ready for timed runs. Return the reason if a rank cannot do this, else an empty text."""
        best = self.execute(self.progress.best)

        def prepare() -> None:
            self.execute(candidate).prepare(inputs, out)
            if not best.plans:  # each call would release the memory of the other candidate
                raise error(f"HOSTIR_SYMMETRIC_LIMIT has no room for it beside '{self.progress.best}'")

        problem = self._attempted(prepare) or self._begun(candidate, inputs, out)
        if not best.plans:
            self._drop_losers()
            best.prepare(inputs, out)
        return problem

    def _attempted(self, work: Callable[[], object]) -> str:
        """Do work that all ranks do together. Return the reason if a rank cannot do it, else an empty text."""
        problem = ""
        try:
            work()
        except MisalignedError:
            raise
        except Exception as refusal:  # any failure, for example of a compiler: the other ranks wait for the reason
            if self.session is not None and self.session.groups.abandoned:  # the call had begun
                raise
            problem = headline(refusal)
        return next(filter(None, self._exchange(problem)), "")

    def _drop_losers(self) -> None:
        """Release the memory of all candidates except the best. All ranks call this, and none uses the memory now."""
        best = self.progress.best
        for candidate in self.estimates:
            if candidate != best:
                self.runs.pop(candidate, None)
                with contextlib.suppress(HostIRError):  # it could not be made at all
                    self.execute(candidate).rest()
        if self.session is not None and self.session.groups.memory is not None:
            self.session.groups.memory.discard()

    def _exchange(self, mine: object) -> list[Any]:
        """Send data to all ranks, and return the data of all ranks."""
        text = json.dumps(mine)
        if self.session is None:
            return [json.loads(text)]
        where = f"the trial of {self.name}"
        return [json.loads(each) for each in self.session.exchange("trial", text, PATIENCE, where)]

    @property
    def _shared_session(self) -> Session | None:
        """The session, if other ranks take part in the trial; else None."""
        return self.session if self.session is not None and self.session.size > 1 else None

    @property
    def _place(self) -> str:
        """The place in the store at which the ranks post the winner."""
        return f"result of the trial of {self.name}"

    def _posted_result(self) -> Candidate | None:
        """Return the winner that a rank has posted; None if no rank has."""
        if (job := self._shared_session) is None:
            return None
        with job.asking(self._place):
            store = job.first_store
            return Candidate(*json.loads(store.get(self._place))) if store.check([self._place]) else None

    def _forget_result(self) -> None:
        """Count this rank among the ranks that have ended the trial. The last of them deletes the winner's place."""
        if (job := self._shared_session) is None:
            return
        with job.asking(self._place):
            store, count = job.first_store, f"ranks with the {self._place}"
            if store.add(count, 1) == job.size:
                store.delete_key(self._place)
                store.delete_key(count)

    def _conclude(self) -> None:
        """End the trial: its winner is the choice for the range."""
        self.runs.clear()
        self.execute(self.progress.best).unbind()
        self.progress.done = True
        self._publish()

    def _publish(self) -> None:
        first = self.session is None or self.session.rank == 0
        self.ranges.tried(self.sizes, self.before, self.rivals, first, self.progress)

    def _show(self, challenger: Candidate) -> None:
        """Print the progress at a terminal, if the trial takes long."""
        first = self.session is None or self.session.rank == 0
        if first and sys.stderr.isatty() and time.monotonic() - self.began > SHOWN_AFTER:
            count = f"{self.progress.tried} of {self.progress.rivals}"
            sys.stderr.write(f"hostir tries '{challenger}' for {self.name} ({count})\n")


def _timed(work: Callable[[], object]) -> float:
    """Return the time of the host for some work, in microseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e6
