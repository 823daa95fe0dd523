"""Time candidates on this machine. They run in turn, on random inputs, with all ranks synchronized.

Every candidate must give the results of the sequential program, up to rounding. Otherwise it is not timed. Each rank
takes the median of many runs, and the slowest rank's median is the time of the candidate. On CUDA, L2 is flushed before
each run, and events measure eager calls and replays of a CUDA graph. On a CPU, the wall clock measures calls.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan, prod, sqrt
from typing import Any

import torch
import torch.distributed as dist

from hostir.call.bounds import SLACK, reductions, relative_error
from hostir.call.executor import Executor
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.choice.cache import Entry
from hostir.choice.choices import Candidate
from hostir.choice.laps import L2_FLUSH
from hostir.ir.program import Program, uses_nccl
from hostir.ir.source import HostIRError, error
from hostir.job.session import Session
from hostir.kernels.dtypes import torch_dtype, undefined
from hostir.machines.binding import Part
from hostir.machines.cuda.uses import capturing

RUNS = {"cpu": 7, "cuda": 30}
WARM = {"cpu": 1, "cuda": 4}
CHECKED = 2  # calls with different inputs: leftovers of the first must not make the second look right
PATIENCE = 600.0  # seconds that a rank waits for the others, which may be compiling and tuning kernels
Work = Callable[[], Any]
Progress = Callable[[str], None]


@dataclass
class Subject:
    """A candidate to measure, with its executor and its times.

    `failure` says why it cannot be measured. It is empty if the candidate can be measured.
    """

    candidate: Candidate
    program: Program
    executor: Executor | None = None
    failure: str = ""
    eager: float | None = None
    graph: float | None = None

    @property
    def entry(self) -> Entry:
        return Entry.measured(self.program, self.eager, self.graph, self.failure)


def measure(
    programs: Mapping[Candidate, Program],
    sizes: Mapping[str, int],
    session: Session,
    *,
    runs: int | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> dict[Candidate, Entry]:
    """Return the measurement of each candidate. All ranks call this with equal arguments, and get equal results.

    Args:
        programs: the programs by candidate. The first program must be sequential. The others must give its results.
        sizes: values of the programs' symbols.
        session: the job that runs the programs.
        runs: the number of timed runs of each program; by default 30 on CUDA and 7 on a CPU.
        seed: the seed of the random inputs.
        progress: called with a description of each step.
    """
    device = session.device.type
    count = runs or RUNS[device]
    subjects = [Subject(candidate, program) for candidate, program in programs.items()]
    for subject in subjects:
        progress(f"preparing {subject.candidate}")
        _prepare(subject, sizes, session)
    inputs = [random_parts(subjects[0].program, sizes, seed + call, session) for call in range(CHECKED)]
    if subjects[0].failure:
        raise error(f"there is no result to compare the candidates with: {subjects[0].failure}")
    allowed = closeness(subjects[0].program, sizes)
    _check(subjects, inputs, allowed, session, progress)
    works = {s.candidate: partial(_call, s.executor, inputs[0]) for s in subjects if not s.failure}
    clock = CudaClock(session.device) if device == "cuda" else WallClock()
    progress("timing")
    times = _run_in_turn(works, clock, session, count, WARM[device])
    for subject in subjects:
        subject.eager = times.get(subject.candidate)
    if device == "cuda":
        progress("timing replays")
        _replays(subjects, inputs[0], allowed, clock, session, count)
    _exchange(session, "")  # no rank frees memory while others may still access it
    return {subject.candidate: subject.entry for subject in subjects}


def steps(programs: int) -> int:
    """Return the number of times that `measure` calls `progress` for this number of programs."""
    return 2 * programs + 2


def _call(executor: Executor | None, inputs: Sequence[Part]) -> tuple[Part, ...]:
    assert executor is not None
    return executor(*inputs)


def _exchange(session: Session, text: str) -> list[str]:
    """Send a text to all ranks, and return the texts of all ranks, by rank."""
    return session.exchange("measuring", text, PATIENCE)


def _first_problem(session: Session, problem: str) -> str:
    """Return the problem of the first rank that has one; an empty string if no rank has one."""
    return next((text for text in _exchange(session, problem) if text), "")


def _prepare(subject: Subject, sizes: Mapping[str, int], session: Session) -> None:
    """Make the executor of a candidate. If one rank cannot make it, no rank measures the candidate."""
    problem = ""
    try:
        known = {name: size for name, size in sizes.items() if name in subject.program.size_names}
        subject.executor = Executor(subject.program, sizes=known, kernels=subject.candidate.kernels, check=False)
    except HostIRError as refusal:
        problem = refusal.diagnostics[0].message
    subject.failure = _first_problem(session, problem)


def random_parts(program: Program, sizes: Mapping[str, int], seed: int, session: Session) -> list[Part]:
    """Return this rank's parts of random inputs."""
    inputs = random_inputs(program, sizes, seed, session.device)
    return [shard(x, v.tensor, session.rank, sizes) for v, x in zip(program.inputs, inputs, strict=True)]


def _check(
    subjects: Sequence[Subject],
    inputs: Sequence[Sequence[Part]],
    allowed: float,
    session: Session,
    progress: Progress,
) -> None:
    """Compare the results of every candidate with the results of the first one. Each call has different inputs."""
    first = subjects[0]
    expected = [_copied(_call(first.executor, parts)) for parts in inputs]
    for subject in subjects:
        progress(f"checking {subject.candidate}")
        subject.failure = subject.failure or _refusal(subject.executor, inputs[0], session)
        if subject.failure:
            continue
        results = [_copied(_call(subject.executor, parts)) for parts in inputs]
        subject.failure = _mismatch(results, expected, allowed, session)


def _refusal(executor: Executor | None, inputs: Sequence[Part], session: Session) -> str:
    """Make the first call of a program. Return the error of a rank that refuses the call; empty if all ranks run it.

    The watchdog would end the job at an error, so it is off during the call. If a rank hangs here, the other ranks end
    after `PATIENCE` seconds.
    """
    assert executor is not None
    watchdog, executor.watchdog = executor.watchdog, None
    problem = ""
    try:
        executor(*inputs)
    except HostIRError as refusal:
        problem = refusal.diagnostics[0].message
    finally:
        executor.watchdog = watchdog
    return _first_problem(session, problem)


def _mismatch(
    results: Sequence[Sequence[Part]], expected: Sequence[Sequence[Part]], allowed: float, session: Session
) -> str:
    """Return the reason why results are wrong on some rank; an empty string if they are right on all ranks."""
    calls = zip(results, expected, strict=True)
    errors = [_error(x, y) for outputs, right in calls for x, y in zip(outputs, right, strict=True)]
    worst = max((float(text) for text in _exchange(session, repr(max(errors, default=0.0)))), key=_badness)
    if worst <= allowed:
        return ""
    return f"it gives another result than the sequential program: off by {worst:.1e}, at most {allowed:.1e} allowed"


def _badness(error: float) -> tuple[bool, float]:
    """Return a key by which errors are sorted. NaN is worse than any number."""
    return error != error, error


def _error(result: Part, expected: Part) -> float:
    if result is None or expected is None:
        return 0.0 if result is expected else nan
    return relative_error(result.float(), expected.float())


def _copied(outputs: Sequence[Part]) -> list[Part]:
    """Return copies of a call's results, because the next call may overwrite them."""
    return [None if x is None else x.clone() for x in outputs]


def closeness(program: Program, sizes: Mapping[str, int]) -> float:
    """Return the largest difference that is allowed between the results of two programs, relative to their norm.

    `hostir.call.bounds` compares with a float64 reference, which would take too long for these sizes. Here both results
    have rounding errors. Each statement rounds its result to its dtype, with an error of at most half a unit. A
    contraction sums its products in f32 or better, in any order.
    """
    variance = 0.0
    for s in program.walk():
        dtype = None if s.computed is None else torch_dtype(s.computed.tensor.dtype)
        if dtype is not None and dtype.is_floating_point:
            rounding = torch.finfo(dtype).eps / 2
            terms = prod(n.bind(sizes) for n in s.summed) if s.contracts else 0
            summed = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * sqrt(terms)
            variance += (rounding + summed) ** 2
    return SLACK * 2 * sqrt(variance * (1 + reductions(program, ring=True)))


class WallClock:
    """Times runs on a CPU. A run has ended when its function returns."""

    def run(self, work: Work) -> Callable[[], float]:
        """Run `work` once; all ranks start together. Return a function that returns the time in microseconds."""
        dist.barrier()
        begin = time.perf_counter()
        work()
        elapsed = (time.perf_counter() - begin) * 1e6
        return lambda: elapsed


class CudaClock:
    """Times runs on a GPU with two events.

    Before the first event, L2 is flushed and a collective synchronizes the ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.empty(L2_FLUSH, dtype=torch.uint8, device=device)
        self.line = torch.zeros(1, device=device)

    def run(self, work: Work) -> Callable[[], float]:
        """Run `work` once, as `WallClock.run` does. The host does not wait for the device."""
        start, end = _event(), _event()
        self.flush.zero_()
        dist.all_reduce(self.line)
        start.record()
        work()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3

        return elapsed


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


Timer = WallClock | CudaClock


def _run_in_turn(
    works: Mapping[Candidate, Work], clock: Timer, session: Session, runs: int, warm: int
) -> dict[Candidate, float]:
    """Return the time of each candidate.

    Candidates run in turn, so that drift and heat affect all candidates equally.
    """
    for work in works.values():
        for _ in range(warm):
            work()
    elapsed: dict[Candidate, list[Callable[[], float]]] = {candidate: [] for candidate in works}
    for _ in range(runs):
        for candidate, work in works.items():
            elapsed[candidate].append(clock.run(work))
    medians = [statistics.median(time_of() for time_of in times) for times in elapsed.values()]
    by_rank = [json.loads(text) for text in _exchange(session, json.dumps(medians))]
    slowest = [round(max(times), 2) for times in zip(*by_rank, strict=True)]
    return dict(zip(works, slowest, strict=True))


def _replays(
    subjects: Sequence[Subject],
    inputs: Sequence[Part],
    allowed: float,
    clock: Timer,
    session: Session,
    runs: int,
) -> None:
    """Time replays of candidates in CUDA graphs.

    These are the candidates that can be captured, and that give right results when they are replayed.
    """
    expected = _copied(_call(subjects[0].executor, inputs))
    with contextlib.ExitStack() as graphs:
        works: dict[Candidate, Work] = {}
        for subject in [s for s in subjects if not s.failure]:
            outputs = [None if x is None else torch.full_like(x, undefined(x.dtype)) for x in expected]
            replay = graphs.enter_context(_replay(subject, inputs, outputs))
            if any(_exchange(session, "" if replay else "no graph")) or replay is None:
                continue
            for x in [x for x in outputs if x is not None]:
                x.fill_(undefined(x.dtype))
            replay()
            if not _mismatch([_copied(outputs)], [expected], allowed, session):
                works[subject.candidate] = replay
        times = _run_in_turn(works, clock, session, runs, WARM["cuda"])
        torch.cuda.synchronize()
    for subject in subjects:
        subject.graph = times.get(subject.candidate)


@contextlib.contextmanager
def _replay(subject: Subject, inputs: Sequence[Part], outputs: Sequence[Part]) -> Iterator[Work | None]:
    """Return a context manager. It provides a function that replays a CUDA graph of a candidate.

    The function is None if the candidate cannot be captured. An executor itself captures calls with `out=`, unless they
    communicate through NCCL. In that case `_replay` captures the call, as a caller would. The graph is destroyed at the
    end of the block, because NCCL cannot shut down while the graph exists.
    """

    def call() -> None:
        assert subject.executor is not None
        subject.executor(*inputs, out=outputs)

    for _ in range(WARM["cuda"]):
        call()
    torch.cuda.synchronize()
    dist.barrier()  # ranks capture together
    if not uses_nccl(subject.program):
        yield call
        return
    graph = torch.cuda.CUDAGraph()
    replay: Work | None = graph.replay
    try:
        with capturing(graph), torch.cuda.graph(graph):
            call()
    except (HostIRError, RuntimeError):  # a candidate that cannot be captured has only an eager time
        replay = None
    torch.cuda.synchronize()
    yield replay
    graph.reset()
