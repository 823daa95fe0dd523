"""Compare hostir with its peers, row by row, on all ranks in step.

The result of every candidate is checked; then all candidates are timed in turn, and their results are checked again on
other data. A candidate that fails on one rank is left out on all ranks, with the reason. Each row is written as soon as
it is measured. CPU processes have neither CUDA graphs nor torch's symmetric memory; they only serve to find mistakes in
a benchmark.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

import hostir as hi
from benchmarks.harness import Clock, graphed, synchronize, write
from benchmarks.scores import (
    BENCHMARKS,
    CAPTURED,
    COMPILED,
    EAGER,
    GRAPH,
    MODES,
    Result,
    Row,
    file_name,
    line,
    report,
    scored,
)
from hostir.choice.candidates import candidates_of
from hostir.choice.platforms import CUDA, GLOO, Platform, platform_here
from hostir.ir.comm_ops import Communication
from hostir.job.session import Session, session
from hostir.lower import STRATEGIES
from hostir.lower.strategies import fusion_of, strategies

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
ALARM = 120  # seconds that a step may take before the process ends with a traceback of each thread
WARM_CALLS = 4  # calls of a new candidate before it is timed; an executor replays its graph from the third call on
PATIENCE = 20  # seconds that an executor waits for another rank
BUDGET = 2.0  # seconds that the trial of `hi.compile` may take longer than calls of its choice
LONGEST = 200  # the most characters of the reason why a candidate was left out
SAMPLE = 256  # rows of the result that are compared with float64
MARGIN = 1.1  # the largest error of a candidate, as a multiple of torch's error
ROW_MARGIN = 4.0  # the largest difference of a single row from torch's row, as a multiple of torch's error
PIECES = (1, 2, 4)  # numbers of pieces into which the rows of a matmul are cut, besides one for each rank
T = TypeVar("T")
Work = Callable[[], Any]


@dataclass(frozen=True)
class Candidate:
    """A candidate to measure.

    Fields:
        name: its name in the tables.
        mode: `eager` or `graph`.
        ours: True for hostir, False for a peer.
        call: runs it, and returns the result.
        choice: the text of the candidate that `hi.compile` has chosen, if a plain call of its executor with `out=` runs
            in this mode; else empty.
        estimate: the candidate that `hi.compile` would choose by its estimate alone, if `choice` is not empty.
        tried: the times of the trial, by candidate: of a call, and of a replay or None, if `choice` is not empty.
        runs: the candidate of hostir that it runs, if `hi.compile` has chosen it; else empty.
        executor: the executor of hostir that it calls, if there is a single one.
    """

    name: str
    mode: str
    ours: bool
    call: Callable[[], torch.Tensor]
    choice: str = ""
    estimate: str = ""
    tried: Mapping[str, tuple[float, float | None]] = field(default_factory=dict, hash=False)
    runs: str = ""
    executor: hi.Executor | None = None

    def __str__(self) -> str:
        return f"{self.name}, {self.mode}"

    def memory(self, device: torch.device) -> int:
        """Return the bytes that a call takes beside its operands, with its symmetric buffers."""
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.call()
        synchronize(device)
        symmetric = self.executor.symmetric_bytes if self.executor is not None else None
        return torch.cuda.max_memory_allocated() - before + (symmetric or 0)


@dataclass(frozen=True)
class Variant:
    """A way to lower and run a fusion."""

    strategy: str
    kernels: str
    slices: int = 1
    streams: int = 1

    def __str__(self) -> str:
        slices = f" {self.slices} slices" if self.slices > 1 else ""
        streams = f" {self.streams} streams" if self.slices > 1 or self.has_more_streams else ""
        return f"{self.strategy}{slices}{streams} {self.kernels}"

    @property
    def has_more_streams(self) -> bool:
        """True if another variant of the strategy has fewer streams."""
        return self.strategy in STRATEGIES and self.streams > min(STRATEGIES[self.strategy].stream_counts)


@dataclass(frozen=True)
class Entrant:
    """A candidate that does not exist yet. `make` returns it, or raises if it is impossible."""

    name: str
    mode: str
    make: Callable[[], Candidate]


class Subject(ABC):
    """A row's tensors on this rank, and the candidates that are compared on them.

    Fields:
        row: the row.
        rank, ranks: the number of this rank, and the number of all ranks.
        device, dtype: the device and the dtype of the tensors.
        slices: the numbers of slices that pipelines have.
        by_compile: the executor of the choice of `hi.compile`, and the candidate that its estimate alone picks.
    """

    slices: tuple[int, ...] = ()
    by_compile: tuple[hi.Executor, str] | None = None

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        self.row, self.dtype, self.device = row, dtype, job.device
        self.rank, self.ranks = job.rank, job.size

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in a fusion."""
        return next(name for name, dtype in DTYPES.items() if dtype is self.dtype)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def shared(self, *shape: int) -> torch.Tensor:
        """Return a new tensor; on GPUs it is in symmetric memory."""
        if not self.on_gpu:
            return torch.empty(shape, dtype=self.dtype)
        tensor = symm_mem.empty(*shape, dtype=self.dtype, device=self.device)
        symm_mem.rendezvous(tensor, dist.group.WORLD)
        return tensor

    def of_peer(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """Return a peer's tensor that corresponds to a tensor from `shared`."""
        return symm_mem.rendezvous(x, dist.group.WORLD).get_buffer(peer, x.shape, x.dtype)

    @abstractmethod
    def renew(self) -> None:
        """Write new random data on every rank, after all ranks have finished reading the old data."""

    @abstractmethod
    def judge(self) -> Judge:
        """Return the judge of results for the current data."""

    @abstractmethod
    def parts(self) -> Mapping[str, Work]:
        """Return the work of the floor: `gemm` and collectives. `triton`, the Triton matmul, is only shown."""

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        """Return the calls that a user of torch would make instead, by name."""
        return {}

    @abstractmethod
    def fusion(self, slices: int) -> hi.Fusion | hi.Program:
        """Return the fusion that hostir compiles; with several slices it has a Stream axis."""

    @abstractmethod
    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        """Return this rank's parts of the fusion's inputs."""

    def inputs_of(self, executor: hi.Executor, slices: int) -> Sequence[torch.Tensor]:
        """Return the inputs for an executor: those of `inputs`, or copies of them in memory of the executor."""
        return self.inputs(slices)

    @abstractmethod
    def out(self, slices: int) -> torch.Tensor | Sequence[torch.Tensor]:
        """Return the tensor for this rank's part of the result, or a tensor for each output of the fusion."""

    def about(self) -> Result:
        """Return further entries for the result of the row."""
        return {}

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        """Yield all candidates: the peers, the choice of `hi.compile`, and every candidate that it could choose."""
        yield from self.peers_in(modes)
        yield from self.compiled_in(modes)
        yield from self.strategies_in(modes, only, platform)

    def compiled_in(self, modes: Sequence[str]) -> Iterator[Entrant]:
        """Yield the choice of `hi.compile` in each mode, and the choice that a capture of the second call finds."""
        yield from (Entrant(COMPILED, mode, partial(compiled, self, mode)) for mode in modes)
        if GRAPH in modes:
            yield Entrant(CAPTURED, GRAPH, partial(captured, self))

    def peers_in(self, modes: Sequence[str]) -> Iterator[Entrant]:
        """Yield each peer in each mode."""
        for name, call in self.peers().items():
            for mode in modes:
                yield Entrant(name, mode, partial(peer, name, mode, call))

    def strategies_in(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        """Yield every strategy with its streams and kernels. For an impossible strategy, `make` raises the reason."""
        for slices in (1, *(n for n in self.slices if self.row.M % (n * self.ranks) == 0)):
            candidates = candidates_of(fusion_of(self.fusion(slices)), platform, for_testing=True)
            strategies = [name for name in only if slices == 1 or name == "pipeline"]
            for impossible in candidates.impossible:
                strategy = impossible.candidate.strategy
                if strategy in strategies and slices == 1:
                    yield Entrant(strategy, EAGER, partial(_refuse, impossible.reason))
            for candidate, program in candidates.programs.items():
                variant = Variant(candidate.strategy, candidate.kernels, slices, candidate.streams)
                for mode in modes if candidate.strategy in strategies else ():
                    yield Entrant(str(variant), mode, partial(lowered, self, program, variant, mode))


def _refuse(reason: str) -> Candidate:
    raise NotPossibleError(reason)


class NotPossibleError(Exception):
    """Raised if a strategy does not lower the fusion, or does not run on this machine."""


class WrongResultError(Exception):
    """Raised if the result of a candidate is wrong."""


def warmed(make: Callable[[], Candidate], device: torch.device) -> Candidate:
    """Make a candidate and call it WARM_CALLS times. Synchronize after each call, so that errors are raised here."""
    candidate = make()
    for _ in range(WARM_CALLS):
        candidate.call()
        synchronize(device)
    return candidate


def replayed(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture a call in a CUDA graph; return a function that replays it. Every replay returns the same tensor."""
    results: dict[str, torch.Tensor] = {}

    def keep() -> None:
        results["last"] = call()

    replay = graphed(keep)

    def replay_call() -> torch.Tensor:
        replay()
        return results["last"]

    return replay_call


def peer(name: str, mode: str, call: Callable[[], torch.Tensor]) -> Candidate:
    return Candidate(name, mode, False, replayed(call) if mode == GRAPH else call)


def lowered(subject: Subject, program: hi.Program, variant: Variant, mode: str, name: str = "") -> Candidate:
    """Return the candidate of a variant. Each mode has a separate executor, so that addresses stay the same."""
    name = name or str(variant)
    executor = hi.Executor(program, kernels=variant.kernels, timeout=PATIENCE)
    inputs, out = subject.inputs_of(executor, variant.slices), subject.out(variant.slices)
    if mode == EAGER and not replayed_by_caller(executor):
        executor.watchdog = None  # so that a candidate that raises is left out instead of ending the job
        return Candidate(name, mode, True, lambda: executor(*inputs)[0], executor=executor)
    return with_out(name, executor, inputs, out, mode)


def compiled(subject: Subject, mode: str) -> Candidate:
    """Return the choice of `hi.compile` after its trial, called with `out=`, eagerly or from a CUDA graph.

    What plain calls of the executor run is the choice of the row: replays of its own graph, or eager calls. For the
    other mode, the caller captures its calls, or an executor without graphs makes a choice of its own.
    """
    out = subject.out(1)

    def call(executor: hi.Executor) -> object:
        return executor(*subject.inputs_of(executor, 1), out=out)

    if subject.by_compile is None:
        subject.by_compile = settled(subject.fusion(1), GRAPH, call)
        for _ in range(WARM_CALLS):  # an executor that makes few driver calls notices it now, and replays no graph
            call(subject.by_compile[0])
    executor, estimate = subject.by_compile
    replays_itself = on_all_ranks(executor.graph_refusal is None, subject.device)
    if mode == EAGER and replays_itself:
        executor, _ = settled(subject.fusion(1), EAGER, call)
    choice = executor.choice
    candidate = with_out(COMPILED, executor, subject.inputs_of(executor, 1), out, mode)
    candidate = replace(candidate, runs=name_of(choice.taken if replays_itself or mode == EAGER else choice.captured))
    if (mode == GRAPH) != replays_itself:
        return candidate
    tried = {str(timing.candidate): (timing.us, timing.graph) for timing in choice.timings}
    return replace(candidate, choice=name_of(choice.taken), estimate=estimate, tried=tried)


def on_all_ranks(here: bool, device: torch.device) -> bool:
    """Return True if something is true on all ranks. All ranks call this."""
    everywhere = torch.tensor(int(here), device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)


def captured(subject: Subject) -> Candidate:
    """Return a CUDA graph that captures the second call of an executor of `hi.compile`, with an empty cache."""
    out = subject.out(1)
    with compiled_with_empty_cache(subject.fusion(1), graphs=False) as executor:
        executor(*subject.inputs_of(executor, 1), out=out)
        inputs = subject.inputs_of(executor, 1)  # the trial may have chosen a candidate with other places
        replay = replayed(lambda: executor(*inputs, out=out)[0])
        return Candidate(CAPTURED, GRAPH, True, replay, runs=name_of(executor.choice.captured))


@contextmanager
def compiled_with_empty_cache(fusion: hi.Fusion | hi.Program, **options: Any) -> Iterator[hi.Executor]:
    """Return a context manager in which a fusion is compiled, and tried with an empty cache of measurements."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as empty, hi.knobs.scope(cache=Path(empty)):
        warnings.simplefilter("ignore", hi.FallbackWarning)  # impossible candidates have entries of their own
        yield hi.compile(fusion, timeout=PATIENCE, tune=BUDGET, **options)


def settled(
    fusion: hi.Fusion | hi.Program, mode: str, call: Callable[[hi.Executor], object]
) -> tuple[hi.Executor, str]:
    """Compile a fusion with an empty cache, and make a call, which tries the candidates.

    Return the executor of the chosen candidate, and the name of the candidate that the estimate alone picks.
    """
    with compiled_with_empty_cache(fusion, graphs=mode == GRAPH) as executor:
        estimate = name_of(executor.choice.taken)
        call(executor)
    chosen: hi.Executor = executor.current  # type: ignore[attr-defined]
    chosen.choice = executor.choice
    return chosen, estimate


def name_of(candidate: object) -> str:
    """Return the name of a candidate of hostir as the tables write it."""
    return str(candidate).replace(",", "")


def with_out(
    name: str,
    executor: hi.Executor,
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor | Sequence[torch.Tensor],
    mode: str,
) -> Candidate:
    """Return a candidate that calls an executor with `out=`.

    In mode `graph`, the executor captures the call, or the caller does if the executor cannot.
    """
    executor.watchdog = None

    def call() -> torch.Tensor:
        return executor(*inputs, out=out)[0]

    if mode == EAGER:
        return Candidate(name, mode, True, call, executor=executor)
    if replayed_by_caller(executor):
        return Candidate(name, mode, True, replayed(call))
    candidate = warmed(lambda: Candidate(name, mode, True, call), inputs[0].device)
    return candidate if executor.graph_refusal is None else Candidate(name, mode, True, replayed(call))


def replayed_by_caller(executor: hi.Executor) -> bool:
    """Return True if the program uses NCCL: then only the caller can capture it, on all ranks together."""
    return any(isinstance(s, Communication) for s in executor.program.walk())


class Judge:
    """Judge of results: compares a sample of the rows with float64, and all rows with torch.

    Args:
        sample: the numbers of the sampled rows.
        exact: the sampled rows in float64.
        unfused: the result as torch computes it, step by step.
        in_pieces: the same results with the rows of matmuls cut in pieces. Then cuBLAS sums in another order, which
            is less exact with half-precision inputs.
    """

    def __init__(
        self, sample: torch.Tensor, exact: torch.Tensor, unfused: torch.Tensor, in_pieces: Sequence[torch.Tensor] = ()
    ) -> None:
        self.sample, self.exact, self.unfused = sample, exact, unfused
        errors = [self.error_of(c) for c in (unfused, *in_pieces)]
        if not all(map(math.isfinite, errors)):  # otherwise every result would be accepted
            raise WrongResultError("torch's own result holds NaN or infinity")
        self.error, self.bound = errors[0], MARGIN * max(errors)

    def rows_of(self, c: torch.Tensor) -> torch.Tensor:
        """Return a candidate's result as rows in the order of `unfused`."""
        return c.reshape(self.unfused.shape)

    def lengths(self) -> torch.Tensor:
        """Return the length of each row of `unfused`. The difference of a row is relative to it."""
        return self.unfused.float().norm(dim=1)

    def spoil(self, c: torch.Tensor) -> None:
        """Overwrite a candidate's result with NaN."""
        c.fill_(float("nan"))

    def error_of(self, c: torch.Tensor) -> float:
        """Return the relative error of the sampled rows."""
        difference = torch.linalg.vector_norm(c[self.sample].double() - self.exact)
        return float(difference / torch.linalg.vector_norm(self.exact))

    def check(self, candidate: Candidate) -> float:
        """Call a candidate with NaN in the memory of its result; return its error as a multiple of torch's error.

        Raises WrongResultError if the error exceeds MARGIN times torch's error, or if a row differs too much from
        torch's.
        """
        self.spoil(candidate.call())  # an eager call gets the same memory again from torch's allocator
        c = self.rows_of(candidate.call())
        if count := int((~c.isfinite()).any(dim=1).sum()):
            raise WrongResultError(f"{count} rows hold NaN or infinity")
        error = self.error_of(c)
        if not error <= self.bound:
            raise WrongResultError(f"error {error:.2e}, and torch's is {self.error:.2e}")
        distances = (c - self.unfused).float().norm(dim=1) / self.lengths()
        if count := int((~(distances <= ROW_MARGIN * self.bound)).sum()):
            worst = f"row {int(distances.argmax())} by {float(distances.max()):.1e}"
            raise WrongResultError(f"{count} rows differ from torch's, {worst}")
        return error / self.error if self.error else 1.0


def summed_rows(
    m: int, ranks: int, rank: int, exact: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample this rank's rows of a result of `m` rows that is summed over the ranks.

    Return the numbers of the sampled rows, and these rows in float64.

    Args:
        exact: a function that returns this rank's addend for some of the `m` rows, in float64.
    """
    random_rows = torch.randint(m, (SAMPLE,), generator=torch.Generator().manual_seed(m))  # the same on every rank
    starts = torch.arange(ranks) * (m // ranks)
    rows = torch.cat([starts, starts + m // ranks - 1, random_rows]).unique()
    total = exact(rows.to(device))
    dist.all_reduce(total)
    local = rows // (m // ranks) == rank
    return (rows[local] - rank * (m // ranks)).to(device), total[local.to(device)]


class Bench:
    """Measures rows on all ranks in step. A candidate that fails on one rank is left out on all ranks.

    Args:
        job: the job of the ranks.
        options: the command line.
        benchmark: the name of the benchmark, in `BENCHMARKS`.
        subject: returns the subject of a row.
    """

    def __init__(
        self, job: Session, options: argparse.Namespace, benchmark: str, subject: Callable[[Row], Subject]
    ) -> None:
        self.job, self.options, self.benchmark, self.subject = job, options, benchmark, subject
        self.start = time.monotonic()
        self.row_deadline = float("inf")
        self.clock = Clock(job.device, options.repeats)
        self.modes = MODES if job.device.type == "cuda" else (EAGER,)
        self.platform = platform_here(CUDA if job.device.type == "cuda" else GLOO, job.size)
        self.console = Console(quiet=job.rank > 0, highlight=False, soft_wrap=True)
        self.failed: dict[str, str] = {}  # reasons why candidates of the current row have no score

    def exchange(self, topic: str, text: str) -> list[str]:
        """Send a text to all ranks, and return the texts of all ranks, by rank. Restart the alarm."""
        faulthandler.dump_traceback_later(ALARM, exit=True)
        return self.job.exchange(f"benchmark, {topic}", text, ALARM)

    def first_text(self, topic: str, text: str) -> str:
        """Return the first text that is not empty, with the number of its rank; an empty string if there is none."""
        texts = enumerate(self.exchange(topic, text))
        return next((f"rank {rank}: {rank_text}" for rank, rank_text in texts if rank_text), "")

    def attempt(self, row: Row, name: str, step: str, work: Callable[[], T]) -> T | None:
        """Return the result of `work`. If it raises on any rank, print the reason and return None."""
        result, problem = None, ""
        try:
            result = work()
            synchronize(self.job.device)
        except Exception as raised:
            label = "WRONG" if isinstance(raised, WrongResultError) else type(raised).__name__
            problem = f"{label}: {next(iter(str(raised).strip().splitlines()), '')}"[:LONGEST]
        if reason := self.first_text(f"{row}, {name}, {step}", problem):
            self.failed[name] = f"{step}: {reason}"
            self.console.print(f"{row}: {name}: {step}: {reason}", markup=False, style="yellow")
            return None
        return result

    def is_over(self, row: Row, deadline: float, topic: str) -> bool:
        """Return True if a deadline has passed on any rank."""
        return bool(self.first_text(f"{row}, {topic}", "over" if time.monotonic() > deadline else ""))

    def measure(self, row: Row) -> Result:
        """Return all figures of a row; times are in microseconds."""
        torch.manual_seed(self.job.rank)
        self.failed.clear()
        self.row_deadline = time.monotonic() + self.options.row_seconds
        subject = self.subject(row)
        parts = self.parts(row, subject)
        candidates = self.correct(row, "before timing", subject.judge(), self.candidates(row, subject))
        raced = self.clock.race(parts | {(c.name, c.mode): c.call for c in candidates})
        subject.renew()
        errors = self.correct(row, "after timing", subject.judge(), candidates)
        host = self.clock.host({(c.name, c.mode): c.call for c in errors})
        times: dict[str, Result] = {}
        for c, error in self.worst(row, errors).items():
            entry = times.setdefault(c.name, {"ours": c.ours, "error": error})
            entry |= {c.mode: raced[c.name, c.mode], f"host_{c.mode}_us": host[c.name, c.mode]}
            entry |= {f"{c.mode}_runs": c.runs} if c.runs else {}
            if c.mode == EAGER and self.job.device.type == "cuda":
                entry["MiB"] = round(c.memory(self.job.device) / 2**20, 1)
            entry["error"] = max(entry["error"], error)
        fastest = {
            part: [raced[part, mode] for mode in self.modes if (part, mode) in parts] for part in subject.parts()
        }
        result = scored(
            {
                **{"kind": self.benchmark, "model": row.model, "M": row.M, "N": row.N, "K": row.K},
                **{"ranks": subject.ranks, "dtype": self.options.dtype},
                **{"device": self.job.device.type, "shrunk": self.options.shrink},
                **{"gemm_us": None, **{f"{part}_us": min(us, default=None) for part, us in fastest.items()}},
                "parts": {f"{part}, {mode}": raced[part, mode] for part, mode in parts},
                "times": times,
                "failed": dict(self.failed),
                **subject.about(),
                **self.compiled(errors),
            }
        )
        for c in errors:
            if self.options.profile and str(c) in (result["best_ours"], result.get("best_candidate")):
                self.attempt(row, str(c), "profile", partial(self.profile, row, c))
        synchronize(self.job.device)
        dist.barrier()  # no rank frees symmetric memory while others use it
        return result

    def compiled(self, candidates: Iterable[Candidate]) -> Result:
        """Return the entry for the choice of `hi.compile` in a row's result; {} if `hi.compile` was not measured."""
        for c in candidates:
            if c.choice:
                entry = {"mode": c.mode, "choice": c.choice, "estimate": c.estimate, "tried": c.tried}
                return {"compiled": entry}
        if any(name.startswith(COMPILED) for name in self.failed):  # no other candidate may take its place
            return {"compiled": {"mode": self.modes[-1], "choice": "failed"}}
        return {}

    def parts(self, row: Row, subject: Subject) -> dict[tuple[str, str], Work]:
        """Return the parts of the floor that run on this machine, by part and mode."""
        parts: dict[tuple[str, str], Work] = {}
        for part, work in subject.parts().items():
            for mode in self.modes:
                make = partial(graphed, work) if mode == GRAPH else partial(_called, work)
                if (call := self.attempt(row, f"{part}, {mode}", "made", make)) is not None:
                    parts[part, mode] = call
        return parts

    def candidates(self, row: Row, subject: Subject) -> list[Candidate]:
        """Return the candidates that run. Candidates that come after the row's deadline are left out."""
        candidates = []
        for entrant in subject.entrants(self.modes, self.options.only, self.platform):
            name = f"{entrant.name}, {entrant.mode}"
            if self.is_over(row, self.row_deadline, f"time for {name}"):
                self.failed[name] = f"made: no time left of {self.options.row_seconds:.0f} s a row"
                continue
            candidate = self.attempt(row, name, "made", partial(warmed, entrant.make, self.job.device))
            candidates += [candidate] if candidate is not None else []
        return candidates

    def correct(self, row: Row, step: str, judge: Judge, candidates: Iterable[Candidate]) -> dict[Candidate, float]:
        """Return the candidates whose results are correct on every rank, each with its error on this rank."""
        errors = {c: self.attempt(row, str(c), step, partial(judge.check, c)) for c in candidates}
        return {c: error for c, error in errors.items() if error is not None}

    def worst(self, row: Row, errors: Mapping[Candidate, float]) -> dict[Candidate, float]:
        """Return the error of each candidate on the rank where it is largest."""
        by_rank = [json.loads(text) for text in self.exchange(f"{row}, errors", json.dumps([*errors.values()]))]
        return {c: round(max(rank_errors), 4) for c, *rank_errors in zip(errors, *by_rank, strict=True)}

    def profile(self, row: Row, c: Candidate) -> None:
        """Profile three calls, and write a trace on rank 0. The ranks start each call together."""
        first = self.job.rank == 0
        profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        with profiler if first else nullcontext():
            for _ in range(3):
                synchronize(self.job.device)
                dist.barrier()
                c.call()
            synchronize(self.job.device)
        if first:
            self.options.profile.mkdir(parents=True, exist_ok=True)
            name = f"{row} {self.job.size} ranks {c}".replace("=", "").replace(", ", " ").replace(" ", "-")
            profiler.export_chrome_trace(str(self.options.profile / f"{name}.json"))

    def measure_all(self, rows: Sequence[Row], results: list[Result]) -> list[Row]:
        """Append the result of each row to `results`; return the rows for which no time was left.

        With several runs, the results of the first run are appended, and each run has a folder of its own.
        """
        left = list(rows)
        runs = [results, *(list[Result]() for _ in range(self.options.runs - 1))]
        while left and not self.is_over(left[0], self.start + self.options.budget, "budget"):
            row = left.pop(0)
            for number, run in enumerate(runs, 1):
                result = self.attempt(row, "row", "measured", partial(self.measure, row))
                gc.collect()  # frees graphs and symmetric memory
                if self.job.device.type == "cuda":
                    torch.cuda.empty_cache()
                if result is None:
                    continue
                run.append(result)
                style = {None: "", True: "green", False: "red"}[result["met"]]
                self.console.print(line(result), markup=False, style=style)
                self.save(run, left, f"run{number}" if len(runs) > 1 else "")
        return left

    def save(self, results: list[Result], left: list[Row], folder: str = "") -> None:
        """Write the results so far, on rank 0. If `folder` is not empty, write them to this folder next to `out`."""
        out = self.options.out
        if out is None or self.job.rank > 0:
            return
        out = out.parent / folder / out.name
        name = file_name(out.name, results[0]["ranks"], self.options.dtype)
        data = {"rows": results, "not_measured": [str(row) for row in left]}
        missing = f"\n\nNot measured: {', '.join(map(str, left))}." if left else ""
        write(out.with_name(name), f"{BENCHMARKS[self.benchmark].title}: floor/time", report(results) + missing, data)


def _called(work: Work) -> Work:
    work()
    return work


def options_parser(description: str | None, benchmark: str, *, without: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of the options of every comparison. Models in `without` are measured only if they are named."""

    def rows(text: str) -> list[Row]:
        try:
            return BENCHMARKS[benchmark].rows(text, without)
        except ValueError as unknown:
            raise argparse.ArgumentTypeError(str(unknown)) from None

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="write OUT.json and OUT.md; the name gets the number of ranks unless it is 8"
    )
    parser.add_argument("--rows", type=rows, default="", help="the rows, such as 8B:2048,70B (default: all)")
    parser.add_argument(
        "--only", type=_strategies, default=(*strategies(),), help="the strategies of hostir, such as fused,ring"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each candidate (default: %(default)s)")
    parser.add_argument(
        "--runs", type=int, default=1, help="runs of each row, in folders run1, run2, ... next to OUT (%(default)s)"
    )
    parser.add_argument("--budget", type=float, default=240, help="seconds after which no row is started (%(default)s)")
    parser.add_argument(
        "--row-seconds", type=float, default=60, help="seconds after which no candidate of a row is made (%(default)s)"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="write Chrome traces of hostir's best candidate of each row to this folder",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the benchmark")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide all extents of a row by this number (%(default)s)"
    )
    return parser


def _strategies(text: str) -> tuple[str, ...]:
    if unknown := set(text.split(",")) - {*strategies()}:
        raise argparse.ArgumentTypeError(
            f"no strategy {', '.join(unknown)}: expected some of {', '.join(strategies())}"
        )
    return tuple(text.split(","))


def shrunk(row: Row, divisor: int, parts: int) -> Row:
    """Return a row with its extents divided, but with M still a multiple of `parts`."""
    if divisor == 1:
        return row
    return Row(row.model, max(row.M // divisor // parts, 1) * parts, row.N // divisor, row.K // divisor)


def compare(
    options: argparse.Namespace,
    benchmark: str,
    subject: Callable[[Row, torch.dtype, Session], Subject],
    *,
    finest: int = 1,
    ranks: int = 0,
    any_rows: bool = False,
) -> None:
    """Measure the rows of the command line, print a line for each, and write the table and the figures on rank 0.

    Args:
        options: the command line, as `options_parser` reads it.
        benchmark: the name of the benchmark, in `BENCHMARKS`.
        subject: returns the subject of a row.
        finest: the largest number of slices; it must divide the rows of each rank.
        ranks: the required number of ranks; 0 for any.
        any_rows: True if the number of ranks need not divide the rows.
    """
    dtype = DTYPES[options.dtype]
    results: list[Result] = []
    with session(options.device) as job, torch.no_grad():
        if job is None:
            sys.exit("start it with torchrun, one process a GPU")
        if ranks and job.size != ranks:
            sys.exit(f"start it with {ranks} processes, not {job.size}")
        parts = 1 if any_rows else job.size * finest
        rows = [shrunk(row, options.shrink, parts) for row in options.rows]
        uneven = [row for row in rows if row.M % parts]
        bench = Bench(job, options, benchmark, lambda row: subject(row, dtype, job))
        for row in uneven:
            bench.console.print(f"{row}: left out: {row.M} is not a multiple of {parts}, the ranks times the slices")
        left = bench.measure_all([row for row in rows if row not in uneven], results) + uneven
        targets = [row["met"] for row in results if row["met"] is not None]
        summary = f"{sum(targets)} of {len(targets)} rows reach their targets"
        bench.console.print(f"{summary}; {time.monotonic() - bench.start:.0f} s")
        if left:
            bench.console.print(f"not measured: {', '.join(map(str, left))}", style="yellow")
        faulthandler.cancel_dump_traceback_later()
