"""Try candidates before the first call of a range of sizes, and keep the fastest.

The cost model proposes a few candidates. Before the first call in a range of sizes, all ranks try these candidates on
the inputs of the call, and in the way in which the caller calls. The results go to memory of the trial. Then the
fastest candidate makes the call, and all later plain calls in the range. So a range has one candidate for plain calls
from its first call on: recomputations run the same candidate as the first call.

A trial is a series of duels. The champion, at first the candidate with the shortest estimate, meets one challenger
after another. Both run in turn, in the order A B B A A B, and the one with the smaller cost stays. The loser gives up
its memory, so at most two candidates hold memory at a time.

On CUDA the timed runs are replays of a CUDA graph, and also calls, unless they take long. Before each run the device is
busy for half a millisecond, and then there is a barrier. So the time of a run contains no delays of the host, if the
host issues the run within that time. A call can be faster than its replay, or slower, by some 10 us: the time of a
candidate is the shorter of the two. The time in which the host issues a call is measured, too. The cost of a candidate
is the time of the device; if the host takes longer, a part of the difference is added. This lies between the cost of
replays, for which the host hardly counts, and the cost of calls for which the device must wait. If the costs of two
candidates are nearly equal, the time of replays counts once more: the caller may capture later calls.

If the executor itself can replay the caller's calls, the cost is the time of a replay, and 4 us more: a replay takes
that much longer between replays of other graphs, as in a model with many layers, than in a trial. But if a call takes
at least 5 % less than that, on the device and on the host, the longer of these two times is the cost, and the executor
replays no graphs: see `Choice.plain`.

If the fusion was compiled for calls in graphs, only replays are timed and count, and a candidate that cannot be
captured is left out. Calls that the caller captures may run another candidate: see `Choice.captured`.

Calls that are started asynchronously run the candidate that is the fastest in the trial. Their time is not measured,
because it depends on the work that they overlap.

Inputs of the first call may lie in the place that `Executor.places` has returned for the first candidate. Then this
candidate makes no copy of them. For the others they are tensors like any other. The times hold only for such calls, so
they are not kept.

If a challenger cannot be planned, or if a call of it fails on a rank, all ranks leave it out, and rank 0 warns. After
a failed call the other ranks may wait for the rest of the call. So all ranks renew their shared state, as they do after
any call that ended midway. The trial goes on, and the caller gets no error. If the champion fails, or if an interrupt
ends the trial on a rank, all ranks raise an error. Then the next call begins the trial anew.
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
from operator import itemgetter
from typing import Any

import torch

from hostir.call.arguments import unwritable, written_inputs
from hostir.call.rank import RankExecutor
from hostir.call.tensors import without_plain_memory
from hostir.choice.choices import NO_CAPTURE, Candidate, Timing, TrialState
from hostir.choice.laps import Lap, StartBarrier, Stopwatch
from hostir.choice.ranges import Ranges, key
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, logger, warn_once
from hostir.job.links import MisalignedError, headline
from hostir.job.session import Session
from hostir.kernels.pools import outside_pools
from hostir.knobs import SYMMETRIC_LIMIT
from hostir.machines.cuda.uses import release

LOG = logger(__name__)
WARM = {"cpu": 1, "cuda": 4}  # untimed calls; on CUDA, native code or a CUDA graph issues calls from the fourth on
ROUNDS = {"cpu": 5, "cuda": 15}  # timed runs of each candidate in a duel
NEAR = 0.05  # costs that differ by at most this share are nearly equal
ISSUED = 7  # calls on CUDA for which the time of the host is measured, if the timed runs contain no calls
HOST = 0.25  # the part of the time that counts if the host takes longer than the device; callers may capture calls
SHORT = 500.0  # microseconds; for runs that take longer, it does not matter whether they are replays or calls
QUEUED = 3  # rounds of a duel that the host may be ahead: if the device's queue were full, the host would wait for it
BEING_TIMED = "its calls are being timed"  # the reason why they are not replayed
OTHERS = 4.0  # microseconds by which a replay takes longer between replays of other graphs; seen on 2 H200
SLOWER = 0.05  # calls are replayed unless a plain call takes less time, on the host and on the device, by this share
LEAST = 0.01  # microseconds; the smallest difference of times in the cache
REPLAY, CALL = "replay", "call"  # ways to run a candidate
COMPILING = 20.0  # seconds that all trials of a fusion together may take to plan and compile challengers
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
        make: makes an executor from a program and the name of its kernels.
    """

    def __init__(
        self,
        name: str,
        rivals: Sequence[Timing],
        ranges: Ranges,
        sizes: Mapping[str, int],
        execute: Callable[[Candidate], RankExecutor],
        make: Callable[[Program, str], RankExecutor],
    ) -> None:
        self.name, self.rivals, self.ranges, self.sizes = name, rivals, ranges, sizes
        self.execute, self.make = execute, make
        self.before = ranges.choice(sizes)  # the choice before the trial
        self.estimates = {timing.candidate: timing.us for timing in rivals}
        # The seconds that the trial may take; those of rank 0 count. Without any, no candidates are tried.
        self.budget = 0.0 if torch.are_deterministic_algorithms_enabled() else ranges.budget
        first = execute(rivals[0].candidate)
        self.session, self.calls = first.session, first.calls
        self.device = "cuda" if first.machine == "cuda" else "cpu"
        self.progress = TrialState(rivals[0].candidate, rivals=len(rivals))
        self.began = time.monotonic()
        self.seconds = 0.0  # the time that the trial has taken on the slowest rank, without the making of plans
        self.runs: dict[Candidate, dict[str, Callable[[], object]]] = {}  # by way, of each candidate that holds memory
        self.in_graphs = ranges.decider.calls == "graph"  # the caller will capture the calls
        self.short = self.estimates[rivals[0].candidate] <= SHORT and not self.in_graphs
        self.fastest: dict[Candidate, float] = {}  # the device's time for the fastest way, in microseconds
        self.inputs: Sequence[Any] = ()  # the inputs of the calls in the trial
        self.host: dict[Candidate, float] = {}  # the host's time for a call on the slowest rank, in microseconds
        self.uncaptured: set[Candidate] = set()  # candidates that cannot be captured: their calls are timed
        self.replaying: set[Candidate] = set()  # candidates whose executors can replay the caller's calls
        self.in_places = False  # if a rank passes inputs in symmetric memory that it got by `Executor.places`
        # If the barrier may use flags. With a limit, the flags and the candidates would release each other's memory.
        self.by_flags = False

    def run(self, inputs: Sequence[Any], out: Any) -> None:
        """Try the candidates with the tensors of a call. All ranks call this, in the same call.

        If the first candidate refuses the call, raise its error.
        """
        first, self.inputs = self.execute(self.progress.best), inputs
        with self.calls.lock, first.on_device():
            first.recover()
            if self._takes_posted_result():
                self._conclude()
            else:
                with self._together(first):
                    self.inputs, out = self._separate(inputs, out)
                first(*self.inputs, out=out)
                with self._together(first), torch.no_grad():
                    self._try_all(self.inputs, out)
            self._forget_result()

    def _separate(self, inputs: Sequence[Any], out: Any) -> tuple[Sequence[Any], Any]:
        """Return the arguments of a call, with memory of the trial in the place of tensors that the call writes."""
        program = self.ranges.first_program
        written = {i for i, value in enumerate(program.inputs) if value.name in written_inputs(program)}
        copies = [x.clone() if i in written and isinstance(x, torch.Tensor) else x for i, x in enumerate(inputs)]
        return copies, [_memory_like(x) for x in out] if isinstance(out, list | tuple) else _memory_like(out)

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
            with contextlib.suppress(Exception):  # report the first failure
                self._answer(None)
            executor.abandon(problem)
            raise

    def _try_all(self, inputs: Sequence[Any], out: Any) -> None:
        """Try the candidates, and post the winner."""
        waiting = self._agreed()
        if waiting:
            self._set_up_laps()
            self._begin(self.progress.best, inputs, out)
            self._duels(waiting, inputs, out)
            if self.stopwatch.barrier is not None:
                self.stopwatch.barrier.end()
        self._drop_losers()
        self._finish_times()
        self._post_result()
        self._conclude()

    def _set_up_laps(self) -> None:
        """Make the stopwatch, with a barrier before each lap. All ranks call this.

        If a rank can run neither kind of barrier, there is no barrier. Then times contain the delays of late ranks.
        """
        barrier = None
        if self._shared_session is not None:
            barrier = (self._barrier(by_flags=True) if self.by_flags else None) or self._barrier(by_flags=False)
        self.stopwatch = Stopwatch(self.device, barrier)

    def _barrier(self, by_flags: bool) -> StartBarrier | None:
        """Return the barrier before each lap; None if a rank cannot run it. All ranks call this."""
        made: list[StartBarrier] = []
        ranks = self.session.size if self.session is not None else 1
        problem, _ = self._attempted(lambda: made.append(StartBarrier(ranks, self.make, by_flags)))
        if problem:
            LOG.info("trials have no barrier by %s: %s", "flags" if by_flags else "an all-reduce", problem)
        return None if problem else made[0]

    def _agreed(self) -> list[Candidate]:
        """Agree on the budget and on the challengers: those of rank 0, unless another rank lacks them."""
        mine = [astuple(candidate) for candidate in self.estimates]
        memory = self.session.groups.memory if self.session is not None else None
        digests = {self.ranges.program(candidate).digest for candidate in self.estimates}
        given = memory is not None and any(isinstance(x, torch.Tensor) and memory.gave(x, digests) for x in self.inputs)
        answers = self._exchange([self.budget, mine, given, SYMMETRIC_LIMIT.get() is None])
        self.budget, rivals, *_ = answers[0]
        self.in_places, self.by_flags = any(given for *_, given, _ in answers), all(free for *_, free in answers)
        shared = [Candidate(*each) for each in rivals if all(each in theirs for _, theirs, *_ in answers)]
        return [c for c in shared if c != self.progress.best] if self.budget else []

    def _duels(self, waiting: Sequence[Candidate], inputs: Sequence[Any], out: Any) -> None:
        """Let each challenger meet the champion."""
        for challenger in waiting:
            self.progress.tried += 1
            self._show(challenger)
            try:
                reason = self._too_long(challenger) or self._prepared(challenger, inputs, out)
                reason = reason or self._compared(challenger)
            except MisalignedError:
                raise
            except Exception as problem:  # any failure of a call: the other ranks wait for its rest
                reason = self._renewed(challenger, problem, inputs, out)
            if reason:
                self.progress.refused[challenger] = reason
            self._drop_losers()
            self._publish()

    def _renewed(self, challenger: Candidate, problem: Exception, inputs: Sequence[Any], out: Any) -> str:
        """Go on without a challenger after a call of it has failed on a rank. Return the reason of the failure.

        All ranks call this, because the other ranks get an error where they wait for the failed call. They renew what
        they share. If a rank leaves the trial, raise `problem`.
        """
        reason, best = headline(problem), self.progress.best
        if self.session is not None:
            self.execute(best).abandon(problem)
            reason = self._answers(self.session.groups.abandoned, problem)[0]
        self.runs.clear()
        self.ranges.failed.add(challenger)
        self.execute(best).recover()
        self.execute(best).prepare(inputs, out)  # memory without a plan may be released
        self._set_up_laps()  # what the ranks shared is gone
        self._warn(challenger, reason)
        self._drop_losers()
        self._begin(best, inputs, out)
        return reason

    def _answers(self, words: str, problem: Exception) -> list[str]:
        """Tell the other ranks that this rank goes on with the trial after a failed call, and return their texts.

        `words` is this rank's text. If a rank leaves the trial, raise `problem`.
        """
        if (job := self._shared_session) is None:
            return [words]
        self._answer(words)
        keys = [self._place_of_answer(rank) for rank in range(job.size)]
        with job.asking(self._place):
            job.wait(lambda ranks: job.first_store.check([keys[rank] for rank in ranks]), f"the trial of {self.name}")
            texts = [json.loads(job.first_store.get(key)) for key in keys]
        if None in texts:
            raise problem
        return texts

    def _answer(self, words: str | None) -> None:
        """Post that this rank goes on with the trial after a failed call. If `words` is None, it leaves the trial."""
        if (job := self._shared_session) is not None:
            with job.asking(self._place):
                job.first_store.set(self._place_of_answer(job.rank), json.dumps(words))

    def _place_of_answer(self, rank: int) -> str:
        """Return the place in the store of a rank's answer after a failed call."""
        assert self.session is not None
        return f"rank {rank} after renewal {self.session.watchdog.renewals}, in a trial"

    def _begin(self, candidate: Candidate, inputs: Sequence[Any], out: Any) -> None:
        """Make the first calls of a candidate, and prepare timed runs."""
        executor, results = self.execute(candidate), list[Any]()
        self.uncaptured.discard(candidate)

        def call() -> None:
            executor(*inputs, out=None if out is None else results)

        def record() -> None:
            graph = executor.record(inputs, results)

            def replay() -> list[Any]:
                graph.replay()
                return results  # so that the memory that the graph writes is not freed while the graph exists

            self.runs[candidate] = {REPLAY: replay, CALL: call} if self.short else {REPLAY: replay}

        results[:] = executor(*inputs, out=out)
        executor.issue_plainly(BEING_TIMED)
        for _ in range(WARM[self.device] - 1):
            call()
        executor.synchronize()
        self.replaying.discard(candidate)
        if out is not None and executor.graph_refusal == BEING_TIMED:
            self.replaying.add(candidate)
        self.host[candidate] = 0.0
        if self.device == "cuda" and not self.in_graphs:
            self.host[candidate] = statistics.median(_timed(call) for _ in range(ISSUED))
            executor.synchronize()
        if self.device == "cpu" or self._attempted(record)[0]:
            self.uncaptured.add(candidate)
            self.replaying.discard(candidate)
            self.runs[candidate] = {CALL: call}

    def _compared(self, challenger: Candidate) -> str:
        """Let a challenger meet the champion. Return a reason if there is no result, else an empty text."""
        best = self.progress.best
        medians = self._duel(best, challenger)
        if not all(us > 0 for by_way in medians.values() for us in by_way):  # NaN is not greater than 0 either
            return "its calls could not be timed"
        self._compare(best, challenger, medians)
        return ""

    def _duel(self, *candidates: Candidate) -> dict[Candidate, list[float]]:
        """Run two candidates in turn. Return their median times in microseconds, one for each way to run them.

        The slowest rank determines the time of a run. If a way has no times, its median is NaN.
        """
        began = time.monotonic()
        laps: list[tuple[Candidate, str, Lap]] = []
        issuing: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
        for n in range(ROUNDS[self.device]):
            for candidate in candidates if n % 2 == 0 else reversed(candidates):
                for way, run in self.runs[candidate].items():
                    lap = self.stopwatch.start()
                    us = _timed(run)
                    lap.stop()
                    laps.append((candidate, way, lap))
                    issuing[candidate] += [us] if way == CALL and self.device == "cuda" else []
            if n % QUEUED == 0 or n == ROUNDS[self.device] - 1:
                for candidate in candidates:
                    self.execute(candidate).synchronize()
        # The speed of a host changes within seconds: these times are better than those of `_begin`.
        self.host |= {candidate: statistics.median(us) for candidate, us in issuing.items() if us}
        times = [us if isfinite(us := lap.us()) else None for *_, lap in laps]
        host = [self.host[candidate] for candidate in candidates]
        replaying = [candidate in self.replaying for candidate in candidates]
        answers = self._exchange([times, host, replaying, time.monotonic() - began])
        slowest: dict[Candidate, dict[str, list[float]]] = {
            each: {way: [] for way in self.runs[each]} for each in candidates
        }
        for i, (candidate, way, _) in enumerate(laps):
            known = [us for by_rank, *_ in answers if (us := by_rank[i]) is not None]
            slowest[candidate][way] += [max(known)] if known else []
        for i, candidate in enumerate(candidates):
            self.host[candidate] = max(by_rank[i] for _, by_rank, *_ in answers)
            if not all(by_rank[i] for _, _, by_rank, _ in answers):  # the ranks must find the same winner
                self.replaying.discard(candidate)
        self.seconds += max(seconds for *_, seconds in answers)
        return {each: [statistics.median(us or [nan]) for us in by_way.values()] for each, by_way in slowest.items()}

    def _compare(
        self, champion: Candidate, challenger: Candidate, medians: Mapping[Candidate, Sequence[float]]
    ) -> None:
        """Make the candidate with the smaller cost the champion.

        The champion's time differs a little from duel to duel. All times are relative to its time in the first duel.
        """
        times, replays, fastest = self.progress.times, self.progress.replays, self.fastest
        for known, of in ((replays, itemgetter(0)), (fastest, min)):
            known.setdefault(champion, of(medians[champion]))
            known[challenger] = of(medians[challenger]) * known[champion] / of(medians[champion])
        costs: dict[Candidate, float] = {}
        for candidate in (champion, challenger):
            host = 0.0 if self.in_graphs else self.host[candidate]
            times[candidate] = costs[candidate] = fastest[candidate] + HOST * max(host - fastest[candidate], 0.0)
            self.progress.plain.discard(candidate)
            if candidate in self.replaying:
                times[candidate], costs[candidate] = replays[candidate], replays[candidate] + OTHERS
                replay, *call = medians[candidate]
                if call and max(*call, host) <= (replay + OTHERS) * (1 - SLOWER):
                    self.progress.plain.add(candidate)
                    us = max(call[0] * fastest[candidate] / min(medians[candidate]), host)
                    times[candidate] = costs[candidate] = us
        ratio = costs[challenger] / costs[champion]
        if abs(ratio - 1) <= NEAR:
            ratio *= replays[challenger] / replays[champion]
        if ratio < 1 or (self.in_graphs and champion in self.uncaptured):
            self.progress.best = challenger

    def _too_long(self, challenger: Candidate) -> str:
        """Return a reason not to try a candidate, if this could exceed a time limit; else an empty text.

        Compiling cannot be interrupted. So the longest time for a candidate with the same kernels must be left.
        """
        best, compiling = self.progress.best, self.ranges.compiling
        us = self.progress.replays.get(best, self.estimates[best])
        runs = WARM[self.device] + ROUNDS[self.device] * max(map(len, self.runs.values()), default=1)
        needed = (self.estimates[challenger] / self.estimates[best] * us + us) * runs / 1e6
        if self.seconds + needed > self.budget:
            return f"not tried: HOSTIR_TUNE allows trials {self.budget:g} s"
        compiled = sum(map(sum, compiling.values()))
        if compiled + max(compiling.get(challenger.kernels, ()), default=0.0) > COMPILING:
            return (
                f"not tried: compiling others has taken {compiled:.1f} s, and {COMPILING:g} s are allowed for a fusion"
            )
        return ""

    def _prepared(self, candidate: Candidate, inputs: Sequence[Any], out: Any) -> str:
        """Get a candidate ready for timed runs. Return the reason if a rank cannot do this, else an empty text."""
        best = self.execute(self.progress.best)

        def prepare() -> None:
            executor = self.execute(candidate)
            executor.prepare(inputs, out)
            if self.device == "cuda":  # a call must not fail on this rank while the others run it
                allocated = max((plan.unrolled.memory[0] for plan in executor.plans.values()), default=0)
                here = torch.device("cuda", torch.cuda.current_device())
                outside_pools(here, lambda: torch.empty(allocated, dtype=torch.uint8, device=here).data_ptr())

        problem, seconds = self._attempted(prepare)
        self.ranges.compiling.setdefault(candidate.kernels, []).append(seconds)
        self.progress.compiling += seconds
        if problem:
            self._warn(candidate, problem)
        if not best.has_plan(inputs):  # each call would release the memory of the other candidate
            problem = problem or f"HOSTIR_SYMMETRIC_LIMIT has no room for it beside '{self.progress.best}'"
            self._drop_losers()
            self.runs.pop(self.progress.best, None)  # a graph of the champion uses the memory that was released
            best.prepare(inputs, out)
            self._begin(self.progress.best, inputs, out)
        if not problem:
            self._begin(candidate, inputs, out)
            if self.in_graphs and candidate in self.uncaptured:
                problem = NO_CAPTURE
        return problem

    def _attempted(self, work: Callable[[], object]) -> tuple[str, float]:
        """Do work that all ranks do together.

        Return the reason if a rank cannot do it, else an empty text, and the seconds that the slowest rank takes.
        """
        began = time.monotonic()
        problem = ""
        try:
            work()
        except MisalignedError:
            raise
        except Exception as refusal:  # any failure, for example of a compiler: the other ranks wait for the reason
            if self.session is not None and self.session.groups.abandoned:  # a call has failed on a rank
                raise
            problem = headline(refusal)
        problems, seconds = zip(*self._exchange([problem, time.monotonic() - began]), strict=True)
        return next(filter(None, problems), ""), max(seconds)

    def _drop_losers(self) -> None:
        """Release the memory that the candidates except the best use for the calls of the trial.

        All ranks call this, and none uses the memory now. A candidate keeps its plans for other ranges of sizes.
        """
        best = self.progress.best
        for candidate in self.estimates:
            if candidate != best:
                self.runs.pop(candidate, None)
                with contextlib.suppress(HostIRError):  # it could not be made at all
                    self.execute(candidate).rest(self._in_range)
        if self.session is not None and self.session.groups.memory is not None:
            self.session.groups.memory.discard()
            release()

    def _in_range(self, sizes: Mapping[str, int]) -> bool:
        """Return True if sizes are in the range of the trial."""
        its, mine = ({**self.sizes, **each} for each in (sizes, self.sizes))
        return self.ranges.representative(its) == self.ranges.representative(mine)

    def _exchange(self, mine: object) -> list[Any]:
        """Send data to all ranks, and return the data of all ranks."""
        text = json.dumps(mine)
        if self.session is None:
            return [json.loads(text)]
        with self.calls.turn(self.ranges.fusion):  # so that a call in a signal handler is refused
            texts = self.session.exchange("trial", text, PATIENCE, f"the trial of {self.name}")
        return [json.loads(each) for each in texts]

    @property
    def _shared_session(self) -> Session | None:
        """The session, if other ranks take part in the trial; else None."""
        return self.session if self.session is not None and self.session.size > 1 else None

    @property
    def _place(self) -> str:
        """The place in the store at which the ranks post the winner."""
        return f"result of the trial of {self.name}"

    def _post_result(self) -> None:
        """Post the winner and the times of all candidates, for a rank that is interrupted now."""
        if (job := self._shared_session) is None:
            return
        times, replays = self.progress.times, self.progress.replays
        plain = self.progress.plain
        results = [[astuple(it), us, replays.get(it), it in plain] for it, us in times.items()]
        with job.asking(self._place):
            job.first_store.set(self._place, json.dumps([astuple(self.progress.best), results, self.in_places]))

    def _takes_posted_result(self) -> bool:
        """Take the result of the trial that the other ranks have posted, if they have. Return True if they have."""
        if (job := self._shared_session) is None:
            return False
        with job.asking(self._place):
            if not job.first_store.check([self._place]):
                return False
            best, results, self.in_places = json.loads(job.first_store.get(self._place))
        self.progress.best = Candidate(*best)
        for fields, us, replay, plain in results:
            candidate = Candidate(*fields)
            self.progress.times[candidate] = us
            self.progress.replays |= {} if replay is None else {candidate: replay}
            self.progress.plain |= {candidate} if plain else set()
        return True

    def _forget_result(self) -> None:
        """Count this rank among the ranks that have ended the trial. The last of them deletes the winner's place."""
        if (job := self._shared_session) is None:
            return
        with job.asking(self._place):
            store, count = job.first_store, f"ranks with the {self._place}"
            if store.add(count, 1) == job.size:
                store.delete_key(self._place)
                store.delete_key(count)

    def _finish_times(self) -> None:
        """Make the times ready for the cache, and remove those that are no times of replays.

        The next process takes the candidate with the shortest time. So the others get at least the time of the winner:
        theirs may be a little shorter, if its replays decided a duel, or if the host was slower in a later duel. The
        timed runs of candidates that cannot be captured were calls.
        """
        progress = self.progress
        for candidate in self.uncaptured:
            progress.replays.pop(candidate, None)
            if self.in_graphs:
                progress.times.pop(candidate, None)
                progress.refused.setdefault(candidate, NO_CAPTURE)
        if (shortest := progress.times.get(progress.best)) is not None:
            for candidate in progress.times.keys() - {progress.best}:
                progress.times[candidate] = max(progress.times[candidate], shortest + LEAST)

    def _conclude(self) -> None:
        """End the trial: its winner is the choice for the range."""
        self.runs.clear()
        self.execute(self.progress.best).unbind(self.inputs)
        self.progress.done, self.progress.seconds = True, time.monotonic() - self.began
        self._publish()

    def _publish(self) -> None:
        writes = not self.in_places and (self.session is None or self.session.rank == 0)
        self.ranges.tried(self.sizes, self.before, self.rivals, writes, self.progress)

    def _warn(self, challenger: Candidate, reason: str) -> None:
        """Warn once, on the first rank, that a challenger has failed."""
        first = self.session is None or self.session.rank == 0
        fusion = self.ranges.fusion
        message = f"@{fusion} is called without the candidate '{challenger}', which failed in its trial: {reason}."
        hint = "calls run another candidate; HOSTIR_TUNE=0 tries none"
        warn_once(("trial", fusion, challenger, reason), message, hint, RuntimeWarning, first)

    def _show(self, challenger: Candidate) -> None:
        """Print the progress at a terminal, if the trial takes long."""
        first = self.session is None or self.session.rank == 0
        if first and sys.stderr.isatty() and time.monotonic() - self.began > SHOWN_AFTER:
            count = f"{self.progress.tried} of {self.progress.rivals}"
            sys.stderr.write(f"hostir tries '{challenger}' for {self.name} ({count})\n")


def _memory_like(x: Any) -> Any:
    """Return memory like a tensor of `out=`. If a call cannot write to `x`, return `x`, which the call then refuses."""
    plain = isinstance(x, torch.Tensor) and not without_plain_memory(x) and x.is_contiguous() and not unwritable([x])
    return torch.empty_like(x) if plain else x


def _timed(work: Callable[[], object]) -> float:
    """Return the time of the host for some work, in microseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e6
