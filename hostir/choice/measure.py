"""Time candidates on this machine: in turn, with all ranks synchronized, on random data, if their results are right.

The results of each candidate are compared with those of the sequential program; a wrong one is not timed. A time is
the median of many runs, and of the ranks' medians the largest. On CUDA the L2 is flushed before each run and times are
those of events, once for calls issued anew and once for the replays of a CUDA graph; on a CPU it is wall clock time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan, prod, sqrt
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hostir.choice.cache import Entry
from hostir.choice.choices import Candidate
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.runtime.executor import Executor
from hostir.runtime.reference import SLACK, reductions, relative_error
from hostir.runtime.session import Session
from hostir.runtime.sharding import Part, random_inputs, shard, torch_dtype

RUNS = {"cpu": 7, "cuda": 30}
WARM = {"cpu": 1, "cuda": 4}
CHECKED = 2  # calls, each with inputs of its own: what the first leaves behind must not carry the second
L2_FLUSH = 256 << 20  # bytes written before each run: more than the L2 holds
PATIENCE = 600.0  # seconds that a rank may wait for the others while kernels are compiled and tuned
Work = Callable[[], Any]
Progress = Callable[[str], None]


@dataclass
class Subject:
    """A candidate to measure: its program, its executor, and the reason if it cannot be measured."""

    candidate: Candidate
    program: Program
    executor: Executor | None = None
    failure: str = ""
    eager: float | None = None
    graph: float | None = None

    @property
    def entry(self) -> Entry:
        return Entry(self.program.digest, self.eager, self.graph, self.failure)


def measure(
    programs: Mapping[Candidate, Program],
    sizes: Mapping[str, int],
    session: Session,
    *,
    runs: int | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> dict[Candidate, Entry]:
    """Return the microseconds of each candidate. All ranks call it with equal arguments and get equal results.

    Args:
        programs: by candidate; the first is what the others' results are held against, and is to be sequential.
        sizes: of their symbols.
        session: the job whose ranks run them.
        runs: timed runs of each; left out, 30 on CUDA and 7 on a CPU.
        seed: of the inputs.
        progress: told of each step.
    """
    kind = session.device.type
    count = runs or RUNS[kind]
    subjects = [Subject(candidate, program) for candidate, program in programs.items()]
    for subject in subjects:
        progress(f"preparing {subject.candidate}")
        _prepare(subject, sizes, session)
    inputs = [_parts(subjects[0].program, sizes, seed + call, session) for call in range(CHECKED)]
    if subjects[0].failure:
        raise error(f"there is nothing to hold results against: {subjects[0].failure}")
    allowed = closeness(subjects[0].program, sizes)
    _check(subjects, inputs, allowed, session, progress)
    works = {s.candidate: partial(_call, s.executor, inputs[0]) for s in subjects if not s.failure}
    clock = CudaClock(session.device) if kind == "cuda" else WallClock()
    progress("timing")
    times = _run_in_turn(works, clock, session, count, WARM[kind])
    for subject in subjects:
        subject.eager = times.get(subject.candidate)
    if kind == "cuda":
        progress("timing replays")
        _replays(subjects, inputs[0], allowed, clock, session, count)
    _agree(session, "")  # nobody's memory goes while others may reach into it
    return {subject.candidate: subject.entry for subject in subjects}


def steps(programs: int) -> int:
    """Return how often `measure` reports progress."""
    return 2 * programs + 2


def _call(executor: Executor | None, inputs: Sequence[Part]) -> tuple[Part, ...]:
    assert executor is not None
    return executor(*inputs)


def _agree(session: Session, mine: str) -> list[str]:
    """Return what every rank gives."""
    number = next(_rounds.setdefault(session, itertools.count()))
    return session.exchange(f"measure {number}", mine, PATIENCE)


_rounds: WeakKeyDictionary[Session, itertools.count[int]] = WeakKeyDictionary()


# Correct results --------------------------------------------------------------------------------------------------
def _prepare(subject: Subject, sizes: Mapping[str, int], session: Session) -> None:
    """Make the executor of a candidate; if one rank cannot, no rank measures the candidate."""
    problem = ""
    try:
        known = {name: size for name, size in sizes.items() if name in subject.program.size_names}
        subject.executor = Executor(subject.program, sizes=known, kernels=subject.candidate.kernels, check=False)
    except HostIRError as refusal:
        problem = refusal.diagnostics[0].message
    subject.failure = next((said for said in _agree(session, problem) if said), "")


def _parts(program: Program, sizes: Mapping[str, int], seed: int, session: Session) -> list[Part]:
    """Return this rank's parts of random inputs."""
    whole = random_inputs(program, sizes, seed, session.device)
    return [shard(x, v.tensor, session.rank, sizes) for v, x in zip(program.inputs, whole, strict=True)]


def _check(
    subjects: Sequence[Subject],
    inputs: Sequence[Sequence[Part]],
    allowed: float,
    session: Session,
    progress: Progress,
) -> None:
    """Compare the results of every candidate with the first one's, on different inputs in each call."""
    first = subjects[0]
    expected = [_kept(_call(first.executor, parts)) for parts in inputs]
    for subject in subjects:
        progress(f"checking {subject.candidate}")
        subject.failure = subject.failure or _refusal(subject.executor, inputs[0], session)
        if subject.failure:
            continue
        found = [_kept(_call(subject.executor, parts)) for parts in inputs]
        subject.failure = _mismatch(found, expected, allowed, session)


def _refusal(executor: Executor | None, inputs: Sequence[Part], session: Session) -> str:
    """Return why a rank refuses to run the program, as planning its first call reports; empty if all ranks can.

    Meanwhile the watchdog, for which a failure may be the end of the job, ignores it; a rank that stops here ends the
    others after `PATIENCE`.
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
    return next((said for said in _agree(session, problem) if said), "")


def _mismatch(
    found: Sequence[Sequence[Part]], expected: Sequence[Sequence[Part]], allowed: float, session: Session
) -> str:
    """Return why a result differs from the first candidate's, on whatever rank; empty if it does not."""
    errors = [_error(x, y) for got, right in zip(found, expected, strict=True) for x, y in zip(got, right, strict=True)]
    worst = max((float(text) for text in _agree(session, repr(max(errors, default=0.0)))), key=_badness)
    if worst <= allowed:
        return ""
    return f"it gives another result than the sequential program: off by {worst:.1e}, at most {allowed:.1e} allowed"


def _badness(error: float) -> tuple[bool, float]:
    """Order errors, with NaN worse than any number."""
    return error != error, error


def _error(found: Part, expected: Part) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else nan
    return relative_error(found.float(), expected.float())


def _kept(outputs: Sequence[Part]) -> list[Part]:
    """Return copies, as the next call may overwrite the results."""
    return [None if x is None else x.clone() for x in outputs]


def closeness(program: Program, sizes: Mapping[str, int]) -> float:
    """Return how far two correct results may be from each other, relative to their norm.

    As in `runtime.compare`, but without a reference in float64, which whole tensors of this size have no time for. Each
    step rounds to its dtype, by half a unit at the most, and sums `k` products in f32 or better in whatever order; both
    results have errors of their own.
    """
    once = 0.0
    for s in program.walk():
        if s.computed is not None:
            dtype = torch_dtype(s.computed.tensor.dtype)
            rounding = torch.finfo(dtype).eps / 2
            terms = prod(n.bind(sizes) for n in s.summed) if s.contracts else 0
            summed = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * sqrt(terms)
            once += (rounding + summed) ** 2
    return SLACK * 2 * sqrt(once * (1 + reductions(program, ring=True)))


# Time -------------------------------------------------------------------------------------------------------------
class WallClock:
    """Times runs of CPU processes, which return when all is done."""

    def run(self, work: Work) -> Callable[[], float]:
        """Run once, with all ranks starting together; the time in microseconds is asked for afterwards."""
        dist.barrier()
        begin = time.perf_counter()
        work()
        took = (time.perf_counter() - begin) * 1e6
        return lambda: took


class CudaClock:
    """Times runs on a GPU: with a flushed L2, after a collective on the device, between two events."""

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.empty(L2_FLUSH, dtype=torch.uint8, device=device)
        self.line = torch.zeros(1, device=device)

    def run(self, work: Work) -> Callable[[], float]:
        """Run as `WallClock.run` does; the host does not wait."""
        start, end = _event(), _event()
        self.flush.zero_()
        dist.all_reduce(self.line)
        start.record()
        work()
        end.record()

        def took() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3

        return took


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


Timer = WallClock | CudaClock


def _run_in_turn(
    works: Mapping[Candidate, Work], clock: Timer, session: Session, runs: int, warm: int
) -> dict[Candidate, float]:
    """Time one run of each in turn, so that drifting clocks and heat affect all alike."""
    for work in works.values():
        for _ in range(warm):
            work()
    taken: dict[Candidate, list[Callable[[], float]]] = {candidate: [] for candidate in works}
    for _ in range(runs):
        for candidate, work in works.items():
            taken[candidate].append(clock.run(work))
    mine = [statistics.median(took() for took in runs_of) for runs_of in taken.values()]
    every = [json.loads(text) for text in _agree(session, json.dumps(mine))]
    slowest = [round(max(times), 2) for times in zip(*every, strict=True)]
    return dict(zip(works, slowest, strict=True))


# CUDA graphs ------------------------------------------------------------------------------------------------------
def _replays(
    subjects: Sequence[Subject],
    inputs: Sequence[Part],
    allowed: float,
    clock: Timer,
    session: Session,
    runs: int,
) -> None:
    """Time graph replays of the candidates that can be captured and give the same result from a graph."""
    expected = _kept(_call(subjects[0].executor, inputs))
    with contextlib.ExitStack() as graphs:
        works: dict[Candidate, Work] = {}
        for subject in [s for s in subjects if not s.failure]:
            outputs = [None if x is None else torch.full_like(x, nan) for x in expected]
            replay = graphs.enter_context(_replay(subject, inputs, outputs))
            if any(_agree(session, "" if replay else "no graph")) or replay is None:
                continue
            for x in [x for x in outputs if x is not None]:
                x.fill_(nan)
            replay()
            if not _mismatch([_kept(outputs)], [expected], allowed, session):
                works[subject.candidate] = replay
        times = _run_in_turn(works, clock, session, runs, WARM["cuda"])
        torch.cuda.synchronize()
    for subject in subjects:
        subject.graph = times.get(subject.candidate)


@contextlib.contextmanager
def _replay(subject: Subject, inputs: Sequence[Part], outputs: Sequence[Part]) -> Iterator[Work | None]:
    """Yield a call that replays a CUDA graph, captured by whoever captures it in practice; None if it cannot be.

    An executor captures calls with `out=` itself, unless they communicate through NCCL: these are their caller's to
    capture. The graph goes with the block: NCCL cannot shut down while it is alive.
    """

    def call() -> None:
        assert subject.executor is not None
        subject.executor(*inputs, out=outputs)

    for _ in range(WARM["cuda"]):
        call()
    torch.cuda.synchronize()
    dist.barrier()  # ranks capture together
    if not any(s.collective for s in subject.program.walk()):
        yield call
        return
    graph = torch.cuda.CUDAGraph()
    replay: Work | None = graph.replay
    try:
        with torch.cuda.graph(graph):
            call()
    except (HostIRError, RuntimeError):  # what a graph cannot hold is timed eagerly alone
        replay = None
    torch.cuda.synchronize()
    yield replay
    graph.reset()
