"""Compares ours with the peers, row by row, on all ranks in step.

Every candidate first has to be right; then all are timed in turn, and have to be right again on other data. What fails
on one rank is left out on all, with the reason. Rows are written as they come. CPU processes, which have neither graphs
nor torch's symmetric memory, are there to find mistakes in a benchmark.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from benchmarks.scores import COMPILED, EAGER, GRAPH, KINDS, MODES, Result, Row, file_name, line, report, scored
from hostir.choice.candidates import candidates_of
from hostir.choice.platforms import CUDA, GLOO, Platform, platform_here
from hostir.ir.comm_ops import Communication
from hostir.lower import STRATEGIES
from hostir.lower.strategies import fusion_of
from hostir.runtime.session import Session, session

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
ALARM = 120  # seconds that a step may take before the process ends with a traceback of each thread
WARM_CALLS = 4  # of a new candidate; an executor replays its graph from the third on
PATIENCE = 20  # seconds that ours wait for another rank
LONGEST = 200  # characters of why a candidate was left out
SAMPLE = 256  # rows of the result that are held against float64
MARGIN = 1.1  # how much more than torch's a candidate's error may be
ROW_MARGIN = 4.0  # how many of torch's errors a single row may be away from torch's
PIECES = (1, 2, 4)  # that a matmul's rows are taken in, besides those of a rank
T = TypeVar("T")
Work = Callable[[], Any]


# Candidates -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Candidate:
    """Something to measure.

    Fields:
        name, mode: what it is called, and `eager` or `graph`.
        ours: or a peer.
        call: runs it, and gives the result.
        choice: what `hi.compile` chose, where a call with `out=` of what it gives is just this; else empty.
    """

    name: str
    mode: str
    ours: bool
    call: Callable[[], torch.Tensor]
    choice: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.mode}"


@dataclass(frozen=True)
class Variant:
    """A way to lower and run a fusion."""

    strategy: str
    kernels: str
    slices: int = 1
    streams: int = 1

    def __str__(self) -> str:
        slices = f" {self.slices} slices" if self.slices > 1 else ""
        streams = f" {self.streams} streams" if self.slices > 1 or self.told_apart else ""
        return f"{self.strategy}{slices}{streams} {self.kernels}"

    @property
    def told_apart(self) -> bool:
        """Whether its streams are more than those of another variant."""
        return self.streams > min(STRATEGIES[self.strategy].stream_counts)


@dataclass(frozen=True)
class Entrant:
    """A candidate to be; `make` raises where it is not possible."""

    name: str
    mode: str
    make: Callable[[], Candidate]


class Subject(ABC):
    """A row's tensors on this rank, and what is compared on them.

    Fields:
        row: what it is.
        rank, ranks: this rank, and all that share the row.
        device, dtype: of its tensors.
        slices: that pipelines have.
    """

    slices: tuple[int, ...] = ()

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session) -> None:
        self.row, self.dtype, self.device = row, dtype, joined.device
        self.rank, self.ranks = joined.rank, joined.size

    @property
    def dtype_name(self) -> str:
        """As a fusion has it."""
        return next(name for name, dtype in DTYPES.items() if dtype is self.dtype)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def shared(self, *shape: int) -> torch.Tensor:
        """New memory, which on GPUs is symmetric."""
        if not self.on_gpu:
            return torch.empty(shape, dtype=self.dtype)
        made = symm_mem.empty(*shape, dtype=self.dtype, device=self.device)
        symm_mem.rendezvous(made, dist.group.WORLD)
        return made

    def of_peer(self, x: torch.Tensor, peer: int) -> torch.Tensor:
        """A peer's part of what `shared` gave."""
        return symm_mem.rendezvous(x, dist.group.WORLD).get_buffer(peer, x.shape, x.dtype)

    @abstractmethod
    def renew(self) -> None:
        """New data on every rank, when nobody reads the old any more."""

    @abstractmethod
    def judge(self) -> Judge:
        """What results are held against, for the present data."""

    @abstractmethod
    def parts(self) -> Mapping[str, Work]:
        """What the floor is made of, each alone: `gemm` and collectives; and `triton`, its matmul beside cuBLAS's."""

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        """What a user of torch would call."""
        return {}

    @abstractmethod
    def fusion(self, slices: int) -> hi.Fusion | hi.Program:
        """What ours compile; with several slices, along a Stream axis."""

    @abstractmethod
    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        """This rank's parts of the fusion's inputs."""

    @abstractmethod
    def out(self, slices: int) -> torch.Tensor:
        """Where this rank's part of the result goes."""

    def about(self) -> Result:
        """What else there is to say of the row."""
        return {}

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        """All that may take part: peers, what `hi.compile` gives, and every way that it could choose."""
        yield from self.peers_in(modes)
        yield from self.compiled_in(modes)
        yield from self.candidates(modes, only, platform)

    def compiled_in(self, modes: Sequence[str]) -> Iterator[Entrant]:
        """What `hi.compile` gives."""
        yield from (Entrant(COMPILED, mode, partial(compiled, self, mode)) for mode in modes)

    def peers_in(self, modes: Sequence[str]) -> Iterator[Entrant]:
        for name, call in self.peers().items():
            for mode in modes:
                yield Entrant(name, mode, partial(peer, name, mode, call))

    def candidates_of(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        """Every strategy with its streams and kernels; one that refuses says why when it is made."""
        for slices in (1, *(n for n in self.slices if self.row.M % (n * self.ranks) == 0)):
            found = candidates_of(fusion_of(self.fusion(slices)), platform, for_testing=True)
            wanted = [name for name in only if slices == 1 or name == "pipeline"]
            for each in found.impossible:
                if each.candidate.strategy in wanted and slices == 1:
                    yield Entrant(each.candidate.strategy, EAGER, partial(_refuse, each.reason))
            for each, program in found.programs.items():
                variant = Variant(each.strategy, each.kernels, slices, each.streams)
                for mode in modes if each.strategy in wanted else ():
                    yield Entrant(str(variant), mode, partial(lowered, self, program, variant, mode))


def _refuse(reason: str) -> Candidate:
    raise NotPossibleError(reason)


class NotPossibleError(Exception):
    """A strategy does not lower the fusion, or does not run here."""


class WrongResultError(Exception):
    """A candidate computed something else."""


# How candidates are called ----------------------------------------------------------------------------------------
def warmed(make: Callable[[], Candidate], device: torch.device) -> Candidate:
    """A new candidate after some calls, each after the one before, so that the next tells what went wrong in it."""
    made = make()
    for _ in range(WARM_CALLS):
        made.call()
        synchronize(device)
    return made


def replayed(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same from a CUDA graph; every call gives the same tensor."""
    results: dict[str, torch.Tensor] = {}

    def keep() -> None:
        results["last"] = call()

    replay = graphed(keep)

    def again() -> torch.Tensor:
        replay()
        return results["last"]

    return again


def peer(name: str, mode: str, call: Callable[[], torch.Tensor]) -> Candidate:
    return Candidate(name, mode, False, replayed(call) if mode == GRAPH else call)


def lowered(of: Subject, program: hi.Program, variant: Variant, mode: str, name: str = "") -> Candidate:
    """A variant's program. Each mode has an executor of its own, which sees the same addresses every time."""
    name = name or str(variant)
    executor = hi.Executor(program, kernels=variant.kernels, timeout=PATIENCE)
    inputs, out = of.inputs(variant.slices), of.out(variant.slices)
    if mode == EAGER and not replayed_by_caller(executor):
        executor.watchdog = None  # a candidate that raises is left out, and does not end the job
        return Candidate(name, mode, True, lambda: executor(*inputs)[0])
    return with_out(name, executor, inputs, out, mode)


def compiled(of: Subject, mode: str) -> Candidate:
    """What `hi.compile` gives by estimates alone, called with `out=`: issued, and replayed by whoever captures it."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as empty, hi.knobs.scope(cache=Path(empty)):
        warnings.simplefilter("ignore", hi.FallbackWarning)  # the candidates that refuse say why
        executor = hi.compile(of.fusion(1), timeout=PATIENCE, graphs=mode == GRAPH)
    made = with_out(COMPILED, executor, of.inputs(1), of.out(1), mode)
    by_itself = of.on_gpu and not replayed_by_caller(executor)
    plain = (mode == GRAPH) == by_itself
    return replace(made, choice=str(executor.choice.taken).replace(",", "")) if plain else made


def with_out(
    name: str, executor: hi.Executor, inputs: Sequence[torch.Tensor], out: torch.Tensor, mode: str
) -> Candidate:
    """An executor's calls with `out=`; in a graph, its own or the caller's."""
    executor.watchdog = None

    def into() -> torch.Tensor:
        return executor(*inputs, out=out)[0]

    if mode == EAGER:
        return Candidate(name, mode, True, into)
    if replayed_by_caller(executor):
        return Candidate(name, mode, True, replayed(into))
    candidate = warmed(lambda: Candidate(name, mode, True, into), out.device)
    if executor.graph_refusal is not None:
        raise RuntimeError(f"no CUDA graph: {executor.graph_refusal}")
    return candidate


def replayed_by_caller(executor: hi.Executor) -> bool:
    """Whether only the caller can capture it, on all ranks together: it communicates through NCCL."""
    return any(isinstance(s, Communication) for s in executor.program.walk())


# Right or wrong ---------------------------------------------------------------------------------------------------
class Judge:
    """Holds results against float64 in a sample of rows, and against torch in all.

    Args:
        sample: rows of the result.
        exact: these in float64.
        unfused: the result as torch computes it step by step.
        alike: the same, with rows taken in other pieces: cuBLAS sums up otherwise then, and with half-precision inputs
            less exactly.
    """

    def __init__(
        self, sample: torch.Tensor, exact: torch.Tensor, unfused: torch.Tensor, alike: Sequence[torch.Tensor] = ()
    ) -> None:
        self.sample, self.exact, self.unfused = sample, exact, unfused
        errors = [self.error_of(c) for c in (unfused, *alike)]
        if not all(map(math.isfinite, errors)):  # nothing would be wrong beside it
            raise WrongResultError("torch's own result holds NaN or infinity")
        self.error, self.bound = errors[0], MARGIN * max(errors)

    def rows_of(self, c: torch.Tensor) -> torch.Tensor:
        """A candidate's result as rows in the order of `unfused`."""
        return c.reshape(self.unfused.shape)

    def spoil(self, c: torch.Tensor) -> None:
        """Overwrites a candidate's result."""
        c.fill_(float("nan"))

    def error_of(self, c: torch.Tensor) -> float:
        """Relative, in the sample."""
        off = torch.linalg.vector_norm(c[self.sample].double() - self.exact)
        return float(off / torch.linalg.vector_norm(self.exact))

    def check(self, candidate: Candidate) -> float:
        """Calls a candidate on memory that holds NaN; gives its error as a multiple of torch's.

        Raises WrongResultError where its result is not as good as torch's.
        """
        self.spoil(candidate.call())  # an eager one gets the same memory again from torch's allocator
        c = self.rows_of(candidate.call())
        if lost := int((~c.isfinite()).any(dim=1).sum()):
            raise WrongResultError(f"{lost} rows hold NaN or infinity")
        error = self.error_of(c)
        if not error <= self.bound:
            raise WrongResultError(f"error {error:.2e}, and torch's is {self.error:.2e}")
        away = (c - self.unfused).float().norm(dim=1) / self.unfused.float().norm(dim=1)
        if far := int((~(away <= ROW_MARGIN * self.bound)).sum()):
            furthest = f"row {int(away.argmax())} by {float(away.max()):.1e}"
            raise WrongResultError(f"{far} rows differ from torch's, {furthest}")
        return error / self.error if self.error else 1.0


def summed_rows(
    m: int, ranks: int, rank: int, exact: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample of this rank's rows of a result of `m` rows that is summed over ranks; and these rows in float64.

    Args:
        exact: what this rank adds to some rows of the whole result, in float64.
    """
    drawn = torch.randint(m, (SAMPLE,), generator=torch.Generator().manual_seed(m))  # the same on every rank
    ends = torch.arange(ranks) * (m // ranks)
    rows = torch.cat([ends, ends + m // ranks - 1, drawn]).unique()
    total = exact(rows.to(device))
    dist.all_reduce(total)
    mine = rows // (m // ranks) == rank
    return (rows[mine] - rank * (m // ranks)).to(device), total[mine.to(device)]


# In step ----------------------------------------------------------------------------------------------------------
class Bench:
    """Measures rows on all ranks in step: what fails on one rank is left out on all.

    Args:
        joined: the job.
        given: the command line.
        kind: of its rows, in `KINDS`.
        subject: what is compared on a row.
    """

    def __init__(
        self, joined: Session, given: argparse.Namespace, kind: str, subject: Callable[[Row], Subject]
    ) -> None:
        self.joined, self.given, self.kind, self.subject = joined, given, kind, subject
        self.begun = time.monotonic()
        self.row_ends = float("inf")
        self.clock = Clock(joined.device, given.repeats)
        self.modes = MODES if joined.device.type == "cuda" else (EAGER,)
        self.platform = platform_here(CUDA if joined.device.type == "cuda" else GLOO, joined.size)
        self.console = Console(quiet=joined.rank > 0, highlight=False, soft_wrap=True)
        self.failed: dict[str, str] = {}  # of the row being measured: why a candidate has no score

    def say(self, about: str, mine: str) -> list[str]:
        """What every rank says. The alarm starts anew."""
        faulthandler.dump_traceback_later(ALARM, exit=True)
        return self.joined.exchange(f"benchmark, {about}", mine, ALARM)

    def agree(self, about: str, mine: str) -> str:
        """What the first rank with something to say said; empty where none has."""
        return next((f"rank {rank}: {text}" for rank, text in enumerate(self.say(about, mine)) if text), "")

    def attempt(self, row: Row, what: str, step: str, work: Callable[[], T]) -> T | None:
        """What `work` gives where it raises on no rank; else None, and a line that says why."""
        made, problem = None, ""
        try:
            made = work()
            synchronize(self.joined.device)
        except Exception as raised:
            kind = "WRONG" if isinstance(raised, WrongResultError) else type(raised).__name__
            problem = f"{kind}: {next(iter(str(raised).strip().splitlines()), '')}"[:LONGEST]
        if said := self.agree(f"{row}, {what}, {step}", problem):
            self.failed[what] = f"{step}: {said}"
            self.console.print(f"{row}: {what}: {step}: {said}", markup=False, style="yellow")
            return None
        return made

    def over(self, row: Row, until: float, what: str) -> bool:
        """Whether a time has come on any rank."""
        return bool(self.agree(f"{row}, {what}", "over" if time.monotonic() > until else ""))

    # One row ----------------------------------------------------------------------------------------------------------
    def measure(self, row: Row) -> Result:
        """All figures of a row, times in microseconds."""
        torch.manual_seed(self.joined.rank)
        self.failed.clear()
        self.row_ends = time.monotonic() + self.given.row_seconds
        of = self.subject(row)
        parts = self.parts(row, of)
        found = self.right(row, "before timing", of.judge(), self.made(row, of))
        raced = self.clock.race(parts | {(c.name, c.mode): c.call for c in found})
        of.renew()
        errors = self.right(row, "after timing", of.judge(), found)
        found = [*errors]
        host = self.clock.host({(c.name, c.mode): c.call for c in found})
        times: dict[str, Result] = {}
        for c, error in self.worst(row, errors).items():
            entry = times.setdefault(c.name, {"ours": c.ours, "error": error})
            entry |= {c.mode: raced[c.name, c.mode], f"host_{c.mode}_us": host[c.name, c.mode]}
            entry["error"] = max(entry["error"], error)
        best = {part: [raced[part, mode] for mode in self.modes if (part, mode) in parts] for part in of.parts()}
        plain = [{"compiled": {"mode": c.mode, "choice": c.choice}} for c in found if c.choice]
        if any(what.startswith(COMPILED) for what in self.failed):  # no candidate is taken for it
            plain.append({"compiled": {"mode": self.modes[-1], "choice": "failed"}})
        done = scored(
            {
                **{"kind": self.kind, "model": row.model, "M": row.M, "N": row.N, "K": row.K},
                **{"ranks": of.ranks, "dtype": self.given.dtype},
                **{"device": self.joined.device.type, "shrunk": self.given.shrink},
                **{"gemm_us": None, **{f"{part}_us": min(us, default=None) for part, us in best.items()}},
                "parts": {f"{part}, {mode}": raced[part, mode] for part, mode in parts},
                "times": times,
                "failed": dict(self.failed),
                **of.about(),
                **(plain[0] if plain else {}),
            }
        )
        for c in found:
            if self.given.profile and str(c) in (done["best_ours"], done.get("best_candidate")):
                self.attempt(row, str(c), "profile", partial(self.profile, row, c))
        synchronize(self.joined.device)
        dist.barrier()  # nobody's symmetric memory goes while others use it
        return done

    def parts(self, row: Row, of: Subject) -> dict[tuple[str, str], Work]:
        """Those parts that run, by part and mode."""
        found: dict[tuple[str, str], Work] = {}
        for part, work in of.parts().items():
            for mode in self.modes:
                make = partial(graphed, work) if mode == GRAPH else partial(_called, work)
                if (made := self.attempt(row, f"{part}, {mode}", "made", make)) is not None:
                    found[part, mode] = made
        return found

    def made(self, row: Row, of: Subject) -> list[Candidate]:
        """The candidates that can be called, as many as there is time for."""
        found = []
        for each in of.entrants(self.modes, self.given.only, self.platform):
            what = f"{each.name}, {each.mode}"
            if self.over(row, self.row_ends, f"time for {what}"):
                self.failed[what] = f"made: no time left of {self.given.row_seconds:.0f} s a row"
                continue
            made = self.attempt(row, what, "made", partial(warmed, each.make, self.joined.device))
            found += [made] if made is not None else []
        return found

    def right(
        self, row: Row, when: str, judge: Judge, found: Sequence[Candidate] | Mapping[Candidate, float]
    ) -> dict[Candidate, float]:
        """Those whose results are right on every rank, and this rank's errors."""
        errors = {c: self.attempt(row, str(c), when, partial(judge.check, c)) for c in found}
        return {c: error for c, error in errors.items() if error is not None}

    def worst(self, row: Row, errors: Mapping[Candidate, float]) -> dict[Candidate, float]:
        """The largest error of any rank."""
        every = [json.loads(text) for text in self.say(f"{row}, errors", json.dumps([*errors.values()]))]
        return {c: round(max(each), 4) for c, *each in zip(errors, *every, strict=True)}

    def profile(self, row: Row, c: Candidate) -> None:
        """A trace of three calls on rank 0, which begin in step."""
        first = self.joined.rank == 0
        watched = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        with watched if first else nullcontext():
            for _ in range(3):
                synchronize(self.joined.device)
                dist.barrier()
                c.call()
            synchronize(self.joined.device)
        if first:
            self.given.profile.mkdir(parents=True, exist_ok=True)
            name = f"{row} {self.joined.size} ranks {c}".replace("=", "").replace(", ", " ").replace(" ", "-")
            watched.export_chrome_trace(str(self.given.profile / f"{name}.json"))

    # All rows ---------------------------------------------------------------------------------------------------------
    def measure_all(self, wanted: Sequence[Row], results: list[Result]) -> list[Row]:
        """Fills `results`, row by row; gives the rows that there was no time for."""
        left = list(wanted)
        while left and not self.over(left[0], self.begun + self.given.budget, "budget"):
            row = left.pop(0)
            done = self.attempt(row, "row", "measured", partial(self.measure, row))
            gc.collect()  # graphs and symmetric memory
            if self.joined.device.type == "cuda":
                torch.cuda.empty_cache()
            if done is None:
                continue
            results.append(done)
            style = {None: "", True: "green", False: "red"}[done["met"]]
            self.console.print(line(done), markup=False, style=style)
            self.save(results, left)
        return left

    def save(self, results: list[Result], left: list[Row]) -> None:
        out = self.given.out
        if out is None or self.joined.rank > 0:
            return
        name = file_name(out.name, results[0]["ranks"], self.given.dtype)
        data = {"rows": results, "not_measured": [str(row) for row in left]}
        missing = f"\n\nNot measured: {', '.join(map(str, left))}." if left else ""
        write(out.with_name(name), f"{KINDS[self.kind].title}: floor/time", report(results) + missing, data)


def _called(work: Work) -> Work:
    work()
    return work


# The command line -------------------------------------------------------------------------------------------------
def parser(about: str | None, kind: str, *, without: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options of every comparison; rows are those of a kind, all but some models unless they are named."""

    def rows(text: str) -> list[Row]:
        try:
            return KINDS[kind].rows(text, without)
        except ValueError as unknown:
            raise argparse.ArgumentTypeError(str(unknown)) from None

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md; other ranks than 8 add their number")
    parser.add_argument("--rows", type=rows, default="", help="such as 8B:2048,70B (default: all)")
    parser.add_argument(
        "--only", type=_strategies, default=(*STRATEGIES,), help="strategies of ours, such as fused,ring"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=240, help="start no row after so many seconds (%(default)s)")
    parser.add_argument(
        "--row-seconds", type=float, default=60, help="make no further candidate of a row after so many (%(default)s)"
    )
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write Chrome traces of our best of each row there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the benchmark itself")
    parser.add_argument("--shrink", type=int, default=1, help="divide all extents of a row by this (%(default)s)")
    return parser


def _strategies(text: str) -> tuple[str, ...]:
    if unknown := set(text.split(",")) - STRATEGIES.keys():
        raise argparse.ArgumentTypeError(f"no strategy {', '.join(unknown)}: there are {', '.join(STRATEGIES)}")
    return tuple(text.split(","))


def shrunk(row: Row, by: int, parts: int) -> Row:
    """A row of smaller extents, and of rows that still fall into so many parts."""
    if by == 1:
        return row
    return Row(row.model, max(row.M // by // parts, 1) * parts, row.N // by, row.K // by)


def compare(
    given: argparse.Namespace,
    kind: str,
    subject: Callable[[Row, torch.dtype, Session], Subject],
    *,
    finest: int = 1,
    ranks: int = 0,
    any_rows: bool = False,
) -> None:
    """Measures the rows that are asked for, prints a line for each, and writes table and figures on rank 0.

    Args:
        given: the command line, as `parser` reads it.
        kind: of the rows, in `KINDS`.
        subject: what is compared on a row.
        finest: the number of slices that rows of each rank have to fall into.
        ranks: how many there have to be, if that matters.
        any_rows: whether ranks need not divide the rows.
    """
    dtype = DTYPES[given.dtype]
    results: list[Result] = []
    with session(given.device) as joined, torch.no_grad():
        if joined is None:
            sys.exit("start it with torchrun, one process a GPU")
        if ranks and joined.size != ranks:
            sys.exit(f"start it with {ranks} processes, not {joined.size}")
        parts = 1 if any_rows else joined.size * finest
        wanted = [shrunk(row, given.shrink, parts) for row in given.rows]
        uneven = [row for row in wanted if row.M % parts]
        bench = Bench(joined, given, kind, lambda row: subject(row, dtype, joined))
        for row in uneven:
            bench.console.print(f"{row}: left out: {row.M} is not a multiple of {parts}, the ranks times the slices")
        left = bench.measure_all([row for row in wanted if row not in uneven], results) + uneven
        asked = [row for row in results if row["met"] is not None]
        told = f"{sum(row['met'] for row in asked)} of {len(asked)} rows reach what they must"
        bench.console.print(f"{told}; {time.monotonic() - bench.begun:.0f} s")
        if left:
            bench.console.print(f"not measured: {', '.join(map(str, left))}", style="yellow")
        faulthandler.cancel_dump_traceback_later()
