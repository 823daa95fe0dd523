"""Compare random fusions, lowered by every strategy, with the unsharded result in float64, for many numbers of rows.

    python -m benchmarks.differential --cases 500                                            a first look
    python -m benchmarks.differential --cases 20000 --gloo 500 --out benchmarks/results/differential
    python -m benchmarks.differential --fp8 --cases 2400 --gloo 200                          fp8 matmuls only
    python -m benchmarks.differential --experts --cases 600 --gloo 100                       mixtures of experts only
    python -m benchmarks.differential --seed 0 --case 1234 [--gloo 1]                        one case again, in full

The cases cover all combinations of a pattern, a strategy, a number of ranks and a number of rows. The patterns are
those of examples/patterns.py and five sets of random fusions. There are 1, 2, 3, 4 or 8 ranks. The number of rows, M,
divides into the equal parts that the program needs, does not divide, is 0, or is 1. Each case has fresh random inputs,
slices, streams, dtypes and sizes; M is bound at run time. Simulated ranks run the case in a random legal order, in
memory that holds NaN. Half of the cases write to tensors passed as `out=`, which hold NaN before. With `--gloo` some of
the cases run on 4 real processes.

With `--fp8` the patterns are fp8 matmuls with every granularity of scales and along each axis. Of 2400 cases, 300 are
random fusions with fp8 matmuls. With `--experts` they are mixtures of experts. Of 600 cases, 300 are random fusions
with grouped matmuls, gradients of their matrices, permuted rows and combined rows. Sizes of groups and indices are
random, too: groups may be empty, or one group has all rows.

A case has one of four outcomes:

- `right`: the results are within the bound of `hostir run --compare`.
- `refused`: before anything ran, the case was refused with the message for sizes that do not divide, and M really does
  not fit. This benchmark computes independently which numbers of rows fit, with fractions of the program's extents.
- `wrong`: numbers are wrong, a size that fits is refused, the message names a wrong multiple, or a size that does not
  fit is accepted.
- `exception`: any other exception was raised.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import product
from math import lcm
from pathlib import Path
from random import Random
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import hostir as hi
from benchmarks.harness import table, write
from examples import patterns
from hostir import knobs
from hostir.call import bounds
from hostir.call.bounds import reductions, relative_error
from hostir.call.parts import assemble, shard
from hostir.call.random import random_inputs
from hostir.call.reference import reference
from hostir.ir.host_ops import Chunk
from hostir.ir.op import Codec, codecs_of
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.sizes import product as sizes_product
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import ByBlocks
from hostir.ir.types import TensorType
from hostir.kernels.dtypes import torch_dtype
from hostir.lower import STRATEGIES
from tests.launch import launch
from tests.lower.gathered import gathered
from tests.lower.mixtures import mixture
from tests.lower.scaled import scaled
from tests.lower.scattered import scattered
from tests.strategies import Drawn, fusions

RANKS = (1, 2, 3, 4, 8)
ROWS = ("divides", "does not", "M = 0", "M = 1")
FIXED = {pattern.__name__: pattern for pattern in (*patterns.PATTERNS, *patterns.EXPERTS)}
FP8: dict[str, tuple[Callable[..., hi.Fusion], dict[str, Any]]] = {  # patterns with their arguments
    f"{pattern.__name__}, {scales}{f', axis {axis}' if batch else ''}": (
        pattern,
        {"scales": scales, **({"axis": axis} if batch else {})},
    )
    for pattern in patterns.SCALED
    for batch in [pattern in (patterns.scaled_batch_gathered, patterns.scaled_batch_scattered)]
    for axis in ((0, 1) if batch else (0,))
    for scales in ("tensor", "rows", "blocks")
}
ROW_FUSIONS = {
    "random gathered rows": gathered,
    "random scattered rows": scattered,
    "random fp8 products": scaled,  # matmuls
    "random mixtures": mixture,  # of experts
}
RANDOM = ("random fusions", *ROW_FUSIONS)
RANDOM_FP8 = ("random fp8 products",) * 3  # 300 of 2400 cases
EXPERTS = (*(pattern.__name__ for pattern in patterns.EXPERTS), *("random mixtures",) * 3)  # 300 of 600 cases
OUTCOMES = ("right", "refused", "wrong", "exception")
BATCH = 60  # random fusions drawn in one batch
TRIES = 40  # random fusions that are tried until a strategy can lower one
MOST = 5000  # rows; a smaller number of rows must fit
PRIMES = (5, 7, 11, 13)
GLOO = 4  # processes
CHUNK = 25  # cases that a worker gets at a time
MULTIPLE = re.compile(r"error: .*fit.*: (\S+) must be a multiple of (?:\S+ = )?(\d+), because")


@dataclass(frozen=True)
class Cell:
    """A combination of properties. Each combination has the same number of cases."""

    pattern: str
    strategy: str
    ranks: int
    rows: str

    def __str__(self) -> str:
        return f"{self.pattern}, {self.strategy}, {self.ranks} ranks, {self.rows}"


CELLS = [Cell(*each) for each in product((*FIXED, *RANDOM), STRATEGIES, RANKS, ROWS)]
FP8_CELLS = [Cell(*each) for each in product((*FP8, *RANDOM_FP8), STRATEGIES, RANKS, ROWS)]
EXPERT_CELLS = [Cell(*each) for each in product(EXPERTS, STRATEGIES, RANKS, ROWS)]
SETS = CELLS, FP8_CELLS, EXPERT_CELLS  # the first cases of the second and the third set are numbered SPAN and 2 * SPAN
SPAN = 10**9
for cells in SETS:
    Random(0).shuffle(cells)  # so that any range of numbers is a fair sample


def cell_of(number: int) -> Cell:
    """Return the cell of a case."""
    chosen, place = divmod(number, SPAN)
    return SETS[chosen][place % len(SETS[chosen])]


@dataclass(frozen=True)
class Case:
    """A fusion, its lowered program, and the number of rows, `m`. It rounds at most `steps` times."""

    number: int
    cell: Cell
    fusion: Program
    program: Program
    m: int
    seed: int
    steps: int


@dataclass(frozen=True)
class Result:
    """The outcome of a case, one of OUTCOMES, with details."""

    number: int
    cell: Cell
    outcome: str
    details: str = ""


# Drawing ----------------------------------------------------------------------------------------------------------
def drawn(seed: int, number: int) -> Case | None:
    """Draw the case with this number; return None if its strategy can lower no fusion of its cell."""
    cell, random = cell_of(number), Random(f"{seed} {number}")
    for fusion in candidates(cell, random, 10_000 * seed + number // len(CELLS)):
        try:
            with knobs.scope(spec=0):
                program = hi.lower(fusion, cell.strategy, streams=random.randint(1, 4))
        except HostIRError as refused:
            if hasattr(refused, "__notes__"):  # a pass left a program that does not verify
                raise
            continue
        m, steps = rows(cell, program, random), len(fusion.body) if cell.pattern in RANDOM else 1
        if fits(fusion, m) or not fits(program, m):  # otherwise there is no reference result
            return Case(number, cell, fusion, program, m, random.randrange(1, 10**6), steps)
    return None


def candidates(cell: Cell, random: Random, batch: int) -> Iterator[Program]:
    """Yield fusions of a cell. The case uses the first fusion that can be lowered."""
    if cell.pattern in FIXED | FP8:
        yield from [fixed(cell, random)] if lowers(cell.pattern, cell.strategy, cell.ranks) else []
        return
    if draw := ROW_FUSIONS.get(cell.pattern):
        for _ in range(TRIES):
            width = random.choice([cell.ranks, max(cell.ranks // 2, 1)])
            fusion = draw(width, random.randrange(10**9), named=True)
            if fusion.ranks == cell.ranks and "M" in fusion.size_names:
                yield fusion
        return
    yield from random.sample(fusions := batch_of(cell.ranks, batch), min(TRIES, len(fusions)))


def fixed(cell: Cell, random: Random) -> Program:
    """Return a pattern of examples/patterns.py, with M as a symbol."""
    if cell.pattern in FP8:
        scaled_pattern, arguments = FP8[cell.pattern]
        each: dict[str, Any] = {"K": 128 * random.choice((1, 2)), "dtype": random.choice(("bf16", "f16", "f32"))}
        return scaled_pattern(cell.ranks, "M", **each, **arguments).program()
    slices, ranks = random.randint(1, 4), cell.ranks
    sizes: dict[str, Any] = {
        "ranks": ranks,
        "S": slices,
        "M": "M",
        "K": ranks * random.choice((1, 3, 4, 8)),
        "H": ranks * random.choice((2, 5, 8)),
        "N": ranks * slices * random.choice((1, 2, 5)),
        "dtype": random.choice(("f32", "f32", "bf16", "f16")),
    }
    pattern = FIXED[cell.pattern]
    known = pattern.__code__.co_varnames[: pattern.__code__.co_argcount]
    return pattern(**{name: size for name, size in sizes.items() if name in known}).program()


@cache
def lowers(pattern: str, strategy: str, ranks: int) -> bool:
    """Return True if the strategy can lower the pattern. It may refuse a pattern in which it can overlap nothing."""
    try:
        with knobs.scope(spec=0):
            hi.lower(fixed(Cell(pattern, strategy, ranks, ""), Random(0)), strategy)
    except HostIRError as refused:
        if "cannot overlap" not in str(refused):
            raise
        return False
    return True


@lru_cache(maxsize=16)
def batch_of(ranks: int, batch: int) -> list[Program]:
    """Return random fusions with the symbol M. The two arguments are the seed."""
    programs: list[Program] = []
    drawing = settings(phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck))

    @seeded(batch)
    @settings(drawing, max_examples=BATCH)
    @given(fusions(ranks, [{"M": 16}]))
    def every(one: Drawn | HostIRError) -> None:
        if isinstance(one, Drawn) and "M" in one.sizes:
            programs.append(one.fusion.program())

    every()
    return programs


def rows(cell: Cell, program: Program, random: Random) -> int:
    """Return a number of rows of the class `cell.rows`.

    For `does not`, it is a number that does not divide. If all numbers divide, it is a prime number.
    """
    if cell.rows in ("M = 0", "M = 1"):
        return int(cell.rows[-1])
    least = multiple_of(program)
    if cell.rows == "divides":
        return least * random.randint(1, max(1, 32 // least))
    odd = [m for m in range(2, 4 * least + 2) if not fits(program, m)]
    return random.choice(odd or PRIMES)


# Sizes that fit ---------------------------------------------------------------------------------------------------
def exact(size: Size, m: int) -> Fraction:
    """Return the value of a size for `m` rows, which may be a fraction."""
    powers = dict(size.symbols)
    assert powers.keys() <= {"M"}
    power = powers.get("M", 0)
    assert power >= 0
    return Fraction(size.num, size.den) * m**power


def cuts(program: Program) -> Iterator[tuple[Size, Size]]:
    """Yield each extent that a program cuts into equal parts, and the number of parts. Stream axes do not count."""
    for statement in program.walk():
        for name, codec in codecs_of(type(statement)).items():
            if codec is Codec.SIZE:
                yield getattr(statement, name), Size()
        if isinstance(statement, ByBlocks):
            for flags, value in ((statement.ready, statement.rows), (statement.done, statement.out)):
                if flags is not None:
                    yield sizes_product(value.tensor.local_shape[:-1]), flags.tensor.shape[0]
        if isinstance(statement, Chunk):
            yield statement.x.tensor.local_shape[statement.axis], statement.count
    values = [*program.inputs, *(v for statement in program.walk() for v in statement.named)]
    for lies in (v.tensor.host() for v in values if isinstance(v.type, TensorType)):
        for factor in (factor for axis in lies.axes for factor in axis.factors):
            yield factor.extent, Size(lies.mesh.size(factor.on) if lies.mesh and factor.on else 1)


def fits(program: Program, m: int) -> bool:
    """Return True if every extent that a program cuts into equal parts divides evenly for `m` rows."""
    values = ((exact(extent, m), exact(parts, m)) for extent, parts in cuts(program))
    return all((extent / parts if parts else extent).denominator == 1 for extent, parts in values)


def multiple_of(program: Program) -> int:
    """Return the smallest positive number of rows with which the program can run."""
    return next(m for m in range(1, MOST) if fits(program, m))


# Judging ----------------------------------------------------------------------------------------------------------
def outcome(case: Case, machine: str = "local") -> tuple[str, str]:
    """Run a case; return its outcome and details."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return judged(case, machine)
    except HostIRError as refused:
        return refusal(case, str(refused))
    except Exception:
        return "exception", traceback.format_exc(limit=-3)


def refusal(case: Case, text: str) -> tuple[str, str]:
    """Judge a refusal: its message must name a multiple that M is not, and the program must need this multiple."""
    required = [(Size.of(name), int(multiple)) for name, multiple in MULTIPLE.findall(text)]
    if not required:
        return "exception", text
    if fits(case.program, case.m):
        return "wrong", f"refuses what fits: {text}"
    if any(exact(size, case.m) % multiple == 0 for size, multiple in required):
        return "wrong", f"names a multiple that M={case.m} is: {text}"
    least = multiple_of(case.program)
    if all(size == Size.of("M") for size, _ in required) and lcm(*(multiple for _, multiple in required)) != least:
        return "wrong", f"names another multiple than {least}: {text}"
    return "refused", ""


def judged(case: Case, machine: str) -> tuple[str, str]:
    """Run a case and compare its result with the reference. Exceptions of the run are not caught."""
    if not fits(case.program, case.m):
        run_misfit(case, machine)
        return "wrong", f"runs with M={case.m}, which does not fit"
    sizes = {"M": case.m}
    inputs = random_inputs(case.fusion, sizes, case.seed)
    plain, true = reference(case.fusion, inputs, sizes, None), reference(case.fusion, inputs, sizes)
    got = run(case, inputs, machine)
    sums = case.steps - 1 + reductions(case.program)
    for value, g, p, t in zip(case.program.outputs, got, plain, true, strict=True):
        if g.shape != t.shape or (g.dtype != p.dtype and not value.tensor.partial):
            return "wrong", f"{value} is {g.dtype} of shape {list(g.shape)}, not {p.dtype} of {list(t.shape)}"
        error, most = relative_error(g, t), bounds.bound(p, t, sums, torch_dtype(value.tensor.dtype))
        if not error <= most:
            return "wrong", f"{value}: error {error:.2e}, at most {most:.2e} allowed"
    return "right", ""


def run(case: Case, inputs: Sequence[torch.Tensor], machine: str) -> Sequence[torch.Tensor]:
    """Run a case; return its unsharded outputs."""
    program, sizes, random = case.program, {"M": case.m}, Random(case.seed)
    if machine == "gloo":
        return hi.run(program, *inputs, sizes=sizes if random.random() < 0.5 else None)
    executor = hi.Executor(program, machine="local", seed=case.seed, sizes=sizes if random.random() < 0.5 else None)
    arguments: list[Any] = list(inputs)
    if random.random() < 0.5:
        arguments = [parts_of(x, v.tensor, program.ranks, sizes) for v, x in zip(program.inputs, inputs, strict=True)]
    out = None
    if random.random() < 0.5:
        nans = [torch.full(t.shape, float("nan"), dtype=torch_dtype(v.tensor.dtype)) for v, t in shapes(program, sizes)]
        out = [parts_of(x, v.tensor, program.ranks, sizes) for v, x in zip(program.outputs, nans, strict=True)]
        for x in (x for parts in out for x in parts if x is not None):
            x.fill_(float("nan"))
    outputs = executor(*arguments, out=out)
    ends = zip(program.outputs, outputs, strict=True)
    return [assemble(parts, v.tensor, sizes, rounded=False) for v, parts in ends]


def shapes(program: Program, sizes: dict[str, int]) -> list[tuple[Any, torch.Tensor]]:
    """Return each output with a meta tensor that has the output's shape."""
    return [
        (v, torch.empty([e.bind(sizes) for e in v.tensor.shape], device="meta", dtype=torch_dtype(v.tensor.dtype)))
        for v in program.outputs
    ]


def parts_of(x: torch.Tensor, type: TensorType, ranks: int, sizes: dict[str, int]) -> list[torch.Tensor | None]:
    return [shard(x, type, rank, sizes) for rank in range(ranks)]


def run_misfit(case: Case, machine: str) -> None:
    """Run with `case.m` rows, which do not fit. If the extent of an input would be a fraction, pass M as a size."""
    shapes = [[exact(extent, case.m) for extent in v.tensor.shape] for v in case.program.inputs]
    inputs = [
        torch.randn([int(extent) for extent in shape]).to(torch_dtype(v.tensor.dtype))
        for v, shape in zip(case.program.inputs, shapes, strict=True)
    ]
    integral = all(extent.denominator == 1 for shape in shapes for extent in shape)
    hi.run(case.program, *inputs, sizes=None if integral else {"M": case.m}, machine=machine, seed=case.seed)


def tried(number: int, seed: int, machine: str = "local") -> Result | None:
    """Draw and run one case; return None if there is no case with this number."""
    cell = cell_of(number)
    try:
        case = drawn(seed, number)
    except Exception:
        return Result(number, cell, "exception", traceback.format_exc(limit=-3))
    if case is None:
        return None
    end, details = outcome(case, machine)
    return Result(number, cell, end, f"M={case.m}: {details}" if details else "")


# Simulated ranks --------------------------------------------------------------------------------------------------
def several(numbers: Sequence[int], seed: int) -> list[Result]:
    """Run the cases with these numbers; return their results. Numbers without a case are left out."""
    return [result for n in numbers if (result := tried(n, seed))]


def simulated(cases: int, seed: int, workers: int, seconds: float, first: int = 0) -> Iterator[Result]:
    """Yield the results of at least `cases` cases, unless the time is up. Successive numbers are of different cells."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    spawn, last, remaining = multiprocessing.get_context("spawn"), time.monotonic() + seconds, cases
    with spawn.Pool(workers, torch.set_num_threads, (1,)) as pool, Progress(*columns) as progress:
        progress.disable = not progress.console.is_terminal
        bar = progress.add_task("cases", total=cases)
        while remaining > 0 and time.monotonic() < last:
            chunks = [range(n, n + CHUNK) for n in range(first, first + 8 * workers * CHUNK, CHUNK)]
            first = chunks[-1].stop
            for results in pool.imap_unordered(partial(several, seed=seed), chunks):
                remaining -= len(results)
                progress.update(bar, advance=len(results))
                yield from results


# Real ranks -------------------------------------------------------------------------------------------------------
def on_this_rank(cases: int, seed: int, first: int) -> None:
    """Run cases on this process of a job; print each case before it begins, and its outcome."""
    from hostir.job.session import session

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # this also fills new memory with NaN
    done, number, rank = 0, first, int(os.environ["RANK"])

    def tell(line: str) -> None:
        os.write(1, f"{line}\n".encode())  # in one write, as all ranks share a pipe

    with session("cpu"):
        while done < cases:
            if cell_of(number).ranks <= GLOO:
                if rank == 0:
                    tell(f"BEGIN {number}")
                if result := tried(number, seed, "gloo"):
                    done += 1
                    tell(f"END {json.dumps([rank, number, result.outcome, result.details[:2000]])}")
            number += 1


def real(cases: int, seed: int, seconds: float, first: int = 0) -> list[Result]:
    """Run cases in one job of gloo processes; if the job ends early, its last case has the outcome `exception`."""
    command = ["-m", "benchmarks.differential", "--on-this-rank", str(cases), "--seed", str(seed), "--case", str(first)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOSTIR_TIMEOUT": "60", "PYTHONPATH": os.pathsep.join(sys.path)}
    job = launch(GLOO, *command, env=env, timeout=seconds)
    worst: dict[int, Result] = {}
    for line in job.stdout.splitlines():
        if line.startswith("END "):
            rank, number, end, details = json.loads(line[4:])
            result = Result(number, cell_of(number), end, f"rank {rank}, {details}" if details else "")
            if number not in worst or OUTCOMES.index(end) > OUTCOMES.index(worst[number].outcome):
                worst[number] = result
    if job.returncode:
        begun = [int(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("BEGIN ")]
        last = begun[-1] if begun else 0
        worst[last] = Result(last, cell_of(last), "exception", f"the job ended: {job.stderr[-2000:]}")
    return list(worst.values())


# Reports ----------------------------------------------------------------------------------------------------------
def counts(results: Iterable[Result]) -> str:
    """Return the number of cases with each outcome, as text. Outcomes without cases are left out."""
    numbers = Counter(result.outcome for result in results)
    return ", ".join(f"{numbers[o]} {o}" for o in OUTCOMES if numbers[o]) or "-"


def grid(title: str, results: Sequence[Result], down: str, across: str) -> str:
    """Return a table of the numbers of cases. `down` and `across` are fields of a cell: the rows and the columns."""
    lines: dict[tuple[Any, Any], list[Result]] = {}
    for result in results:
        lines.setdefault((getattr(result.cell, down), getattr(result.cell, across)), []).append(result)
    known = {"pattern": [*FIXED, *FP8, *RANDOM], "strategy": [*STRATEGIES], "ranks": RANKS, "rows": ROWS}
    body = [
        [str(d), *(counts(lines.get((d, a), ())) for a in known[across])]
        for d in known[down]
        if any((d, a) in lines for a in known[across])
    ]
    return f"{title}\n\n" + table([down, *map(str, known[across])], body)


def report(results: Sequence[Result], on_gloo: Sequence[Result], duration: str) -> str:
    """Return the tables of a run."""
    parts = []
    if results:
        parts += [f"Simulated ranks: {len(results)} cases, {totals(results)}. {duration}"]
        parts += [grid("By pattern and strategy; - is what a strategy cannot overlap:", results, "pattern", "strategy")]
        parts += [grid("By ranks and number of rows:", results, "ranks", "rows")]
    if on_gloo:
        parts += [f"{GLOO} processes with gloo: {len(on_gloo)} of these cases, {totals(on_gloo)}."]
        parts += [grid("By strategy and number of rows:", on_gloo, "strategy", "rows")]
        parts += [grid("By pattern and strategy:", on_gloo, "pattern", "strategy")]
    return "\n\n".join(parts)


def by_cell(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    """Return the number of cases of each outcome, by pattern and strategy, and by ranks and number of rows."""
    numbers: dict[str, Counter[str]] = {}
    for result in results:
        cell = result.cell
        for key in (f"{cell.pattern}, {cell.strategy}", f"{cell.ranks} ranks, {cell.rows}"):
            numbers.setdefault(key, Counter())[result.outcome] += 1
    return {key: dict(sorted(numbers[key].items())) for key in sorted(numbers)}


def totals(results: Iterable[Result]) -> str:
    """Return the number of cases with each outcome, as text. Outcomes without cases are included."""
    numbers = Counter(result.outcome for result in results)
    return ", ".join(f"{numbers[o]} {o}" for o in OUTCOMES)


def complaint(result: Result, seed: int, machine: str) -> str:
    """Return the description of a failed case, with the command that reproduces it."""
    again = f"python -m benchmarks.differential --seed {seed} --case {result.number}"
    return f"{result.outcome}: {result.cell}: {again}{' --gloo 1' if machine == 'gloo' else ''}\n  {result.details}"


def again(number: int, seed: int) -> Result | None:
    """Print a case in full, and run it."""
    case = drawn(seed, number)
    if case is None:
        print(f"case {number}: {cell_of(number)}: nothing to overlap")
        return None
    print(f"case {number}: {case.cell}: M={case.m}, schedule seed {case.seed}\n{case.fusion}\n{case.program}")
    return Result(number, case.cell, *outcome(case))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print and write the tables; return 1 if any case is wrong or raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="the least number of cases on simulated ranks")
    parser.add_argument("--gloo", type=int, default=0, help=f"number of cases on {GLOO} gloo processes")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--fp8", action="store_true", help="fp8 matmuls only")
    only.add_argument("--experts", action="store_true", help="mixtures of experts only")
    parser.add_argument("--seed", type=int, default=0, help="seed of cases, inputs and schedules")
    parser.add_argument("--case", type=int, help="run only the case of this number, and print it in full")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no more cases after this time")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write .json and .md files with this name")
    parser.add_argument("--on-this-rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    first = SPAN * (options.fp8 + 2 * options.experts)
    if options.on_this_rank:
        on_this_rank(options.on_this_rank, options.seed, options.case or 0)
        return 0

    begun, bad = time.perf_counter(), list[str]()
    results, on_gloo = list[Result](), list[Result]()
    if options.case is not None and not options.gloo:
        results = [one for one in [again(options.case, options.seed)] if one]
    elif options.case is None:
        for result in simulated(options.cases, options.seed, options.workers, options.seconds, first):
            results.append(result)
            if result.outcome in ("wrong", "exception"):
                bad.append(complaint(result, options.seed, "local"))
                print(bad[-1], file=sys.stderr, flush=True)
    duration = f"{time.perf_counter() - begun:.0f} s with {options.workers} workers, seed {options.seed}."
    if options.gloo:
        on_gloo = real(options.gloo, options.seed, 60 + 2.0 * options.gloo, options.case or first)
        for result in on_gloo:
            if result.outcome in ("wrong", "exception"):
                bad.append(complaint(result, options.seed, "gloo"))
                print(bad[-1], file=sys.stderr, flush=True)
    if options.case is not None:
        (one,) = results or on_gloo or [None]
        print(f"{one.outcome}: {one.details}" if one else "")
        return int(one is not None and one.outcome in ("wrong", "exception"))
    text = report(results, on_gloo, duration)
    print(text)
    if options.out:
        data = {"simulated": by_cell(results), "gloo": by_cell(on_gloo), "wrong": bad}
        write(options.out, "Random fusions against the unsharded result", "\n\n".join([text, *bad]), data)
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
