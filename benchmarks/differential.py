"""Random fusions by every strategy, on any number of ranks and of rows, against the unsharded result in float64.

    python -m benchmarks.differential --cases 500                                            a first look
    python -m benchmarks.differential --cases 20000 --gloo 500 --out benchmarks/results/differential
    python -m benchmarks.differential --fp8 --cases 2400 --gloo 200                          fp8 products only
    python -m benchmarks.differential --seed 0 --case 1234 [--gloo 1]                        one case again, in full

Cases are even over the patterns (those of examples/patterns.py and four kinds of random fusions) x strategies x 1, 2,
3, 4 and 8 ranks x a number of rows M that divides, does not divide, is 0, or is 1. Each has fresh random inputs,
slices, streams, dtypes and sizes, where M is bound when it runs. Simulated ranks run it in a random legal order, in
memory that holds NaN, half of them into `out=` full of NaN. With `--gloo` some of the cases run on 4 real processes.

With `--fp8` the patterns are those of fp8 products, with each kind of scales and along each axis, and random ones; of
2400 cases these are 300.

A case ends in one of four ways. `right`: within the bound of `hostir run --compare`. `refused`: before anything ran,
with the message for sizes that something divides, and deservedly: which numbers of rows fit is reckoned here anew, from
the extents of the program, with fractions. `wrong`: other numbers, a refusal of what fits or with a wrong multiple, or
none of what does not fit. `exception`: anything else that was raised.
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
from tests.lower.scaled import scaled
from tests.lower.scattered import scattered
from tests.strategies import Drawn, fusions

RANKS = (1, 2, 3, 4, 8)
ROWS = ("divides", "does not", "M = 0", "M = 1")
FIXED = {pattern.__name__: pattern for pattern in patterns.PATTERNS}
FP8: dict[str, tuple[Callable[..., hi.Fusion], dict[str, Any]]] = {  # patterns, and what is given of them
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
    "random fp8 products": scaled,
}
RANDOM = ("random fusions", *ROW_FUSIONS)
RANDOM_FP8 = ("random fp8 products",) * 3  # of 2400 cases 300
OUTCOMES = ("right", "refused", "wrong", "exception")
BATCH = 60  # random fusions that are drawn at once
TRIES = 40  # of these, until a strategy takes one
MOST = 5000  # rows, among which some must fit
PRIMES = (5, 7, 11, 13)
GLOO = 4  # processes
CHUNK = 25  # cases that a worker gets at once
MULTIPLE = re.compile(r"error: .*fit.*: (\S+) must be a multiple of (?:\S+ = )?(\d+), because")


@dataclass(frozen=True)
class Cell:
    """What cases are even over."""

    pattern: str
    strategy: str
    ranks: int
    rows: str

    def __str__(self) -> str:
        return f"{self.pattern}, {self.strategy}, {self.ranks} ranks, {self.rows}"


CELLS = [Cell(*each) for each in product((*FIXED, *RANDOM), STRATEGIES, RANKS, ROWS)]
FP8_CELLS = [Cell(*each) for each in product((*FP8, *RANDOM_FP8), STRATEGIES, RANKS, ROWS)]
for cells in (CELLS, FP8_CELLS):
    Random(0).shuffle(cells)  # so that any stretch of numbers is a fair sample
FIRST_OF_FP8 = 10**9  # the number of the first case of these


def cell_of(number: int) -> Cell:
    """The cell of the case of this number."""
    if number < FIRST_OF_FP8:
        return CELLS[number % len(CELLS)]
    return FP8_CELLS[(number - FIRST_OF_FP8) % len(FP8_CELLS)]


@dataclass(frozen=True)
class Case:
    """A fusion, the program that it was lowered to, and a number of rows; `steps` is how often it may round."""

    number: int
    cell: Cell
    fusion: Program
    program: Program
    m: int
    seed: int
    steps: int


@dataclass(frozen=True)
class Result:
    """How a case ended, and what is to be said of it."""

    number: int
    cell: Cell
    outcome: str
    said: str = ""


# Drawing ----------------------------------------------------------------------------------------------------------
def drawn(seed: int, number: int) -> Case | None:
    """The case of this number; None where no fusion of its cell can be lowered by its strategy."""
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
        if fits(fusion, m) or not fits(program, m):  # else no reference says what it means
            return Case(number, cell, fusion, program, m, random.randrange(1, 10**6), steps)
    return None


def candidates(cell: Cell, random: Random, batch: int) -> Iterator[Program]:
    """Fusions of a cell, of which the first that can be lowered is taken."""
    if cell.pattern in FIXED | FP8:
        yield from [fixed(cell, random)] if lowers(cell.pattern, cell.strategy, cell.ranks) else []
        return
    if of_rows := ROW_FUSIONS.get(cell.pattern):
        for _ in range(TRIES):
            width = random.choice([cell.ranks, max(cell.ranks // 2, 1)])
            fusion = of_rows(width, random.randrange(10**9), named=True)
            if fusion.ranks == cell.ranks and "M" in fusion.size_names:
                yield fusion
        return
    yield from random.sample(found := batch_of(cell.ranks, batch), min(TRIES, len(found)))


def fixed(cell: Cell, random: Random) -> Program:
    """One of examples/patterns.py, with M as a symbol."""
    if cell.pattern in FP8:
        made, given = FP8[cell.pattern]
        each: dict[str, Any] = {"K": 128 * random.choice((1, 2)), "dtype": random.choice(("bf16", "f16", "f32"))}
        return made(cell.ranks, "M", **each, **given).program()
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
    """Whether a strategy can overlap anything of a pattern."""
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
    """Random fusions with M in them, the same for the same numbers."""
    found: list[Program] = []
    drawing = settings(phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck))

    @seeded(batch)
    @settings(drawing, max_examples=BATCH)
    @given(fusions(ranks, [{"M": 16}]))
    def every(one: Drawn | HostIRError) -> None:
        if isinstance(one, Drawn) and "M" in one.sizes:
            found.append(one.fusion.program())

    every()
    return found


def rows(cell: Cell, program: Program, random: Random) -> int:
    """A number of rows of the cell's kind; where all numbers fit, one that is prime stands for `does not`."""
    if cell.rows in ("M = 0", "M = 1"):
        return int(cell.rows[-1])
    least = multiple_of(program)
    if cell.rows == "divides":
        return least * random.randint(1, max(1, 32 // least))
    odd = [m for m in range(2, 4 * least + 2) if not fits(program, m)]
    return random.choice(odd or PRIMES)


# What fits --------------------------------------------------------------------------------------------------------
def exact(size: Size, m: int) -> Fraction:
    """A size for so many rows, whole or not."""
    powers = dict(size.symbols)
    assert powers.keys() <= {"M"}
    power = powers.get("M", 0)
    assert power >= 0
    return Fraction(size.num, size.den) * m**power


def cuts(program: Program) -> Iterator[tuple[Size, Size]]:
    """All that a program cuts in equal parts: an extent, and in how many. A slice of a Stream axis is none."""
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
    """Whether everything that a program cuts in equal parts comes out even."""
    both = ((exact(extent, m), exact(parts, m)) for extent, parts in cuts(program))
    return all((extent / parts if parts else extent).denominator == 1 for extent, parts in both)


def multiple_of(program: Program) -> int:
    """The smallest number of rows that fits, from 1."""
    return next(m for m in range(1, MOST) if fits(program, m))


# Judging ----------------------------------------------------------------------------------------------------------
def outcome(case: Case, machine: str = "local") -> tuple[str, str]:
    """Runs a case; how it ended, and what is to be said of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return judged(case, machine)
    except HostIRError as refused:
        return refusal(case, str(refused))
    except Exception:
        return "exception", traceback.format_exc(limit=-3)


def refusal(case: Case, text: str) -> tuple[str, str]:
    """Whether it says the rule for sizes, whether that holds, and whether these break it."""
    asked = [(Size.of(name), int(multiple)) for name, multiple in MULTIPLE.findall(text)]
    if not asked:
        return "exception", text
    if fits(case.program, case.m):
        return "wrong", f"refuses what fits: {text}"
    if any(exact(size, case.m) % multiple == 0 for size, multiple in asked):
        return "wrong", f"names a multiple that M={case.m} is: {text}"
    least = multiple_of(case.program)
    if all(size == Size.of("M") for size, _ in asked) and lcm(*(multiple for _, multiple in asked)) != least:
        return "wrong", f"names another multiple than {least}: {text}"
    return "refused", ""


def judged(case: Case, machine: str) -> tuple[str, str]:
    """Runs a case and compares; raises what running it raises."""
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
    """The whole outputs."""
    program, sizes, random = case.program, {"M": case.m}, Random(case.seed)
    if machine == "gloo":
        return hi.run(program, *inputs, sizes=sizes if random.random() < 0.5 else None)
    executor = hi.Executor(program, machine="local", seed=case.seed, sizes=sizes if random.random() < 0.5 else None)
    given: list[Any] = list(inputs)
    if random.random() < 0.5:
        given = [parts_of(x, v.tensor, program.ranks, sizes) for v, x in zip(program.inputs, inputs, strict=True)]
    out = None
    if random.random() < 0.5:
        nans = [torch.full(t.shape, float("nan"), dtype=torch_dtype(v.tensor.dtype)) for v, t in shapes(program, sizes)]
        out = [parts_of(x, v.tensor, program.ranks, sizes) for v, x in zip(program.outputs, nans, strict=True)]
        for x in (x for parts in out for x in parts if x is not None):
            x.fill_(float("nan"))
    outputs = executor(*given, out=out)
    ends = zip(program.outputs, outputs, strict=True)
    return [assemble(parts, v.tensor, sizes, rounded=False) for v, parts in ends]


def shapes(program: Program, sizes: dict[str, int]) -> list[tuple[Any, torch.Tensor]]:
    """Each output with a tensor of its shape that has no memory."""
    return [
        (v, torch.empty([e.bind(sizes) for e in v.tensor.shape], device="meta", dtype=torch_dtype(v.tensor.dtype)))
        for v in program.outputs
    ]


def parts_of(x: torch.Tensor, type: TensorType, ranks: int, sizes: dict[str, int]) -> list[torch.Tensor | None]:
    return [shard(x, type, rank, sizes) for rank in range(ranks)]


def run_misfit(case: Case, machine: str) -> None:
    """Calls with so many rows, and says that they are so many where no shape of an input can."""
    shapes = [[exact(extent, case.m) for extent in v.tensor.shape] for v in case.program.inputs]
    inputs = [
        torch.randn([int(extent) for extent in shape]).to(torch_dtype(v.tensor.dtype))
        for v, shape in zip(case.program.inputs, shapes, strict=True)
    ]
    whole = all(extent.denominator == 1 for shape in shapes for extent in shape)
    hi.run(case.program, *inputs, sizes=None if whole else {"M": case.m}, machine=machine, seed=case.seed)


def tried(number: int, seed: int, machine: str = "local") -> Result | None:
    """Draws and runs one case; None where there is none of this number."""
    cell = cell_of(number)
    try:
        case = drawn(seed, number)
    except Exception:
        return Result(number, cell, "exception", traceback.format_exc(limit=-3))
    if case is None:
        return None
    end, said = outcome(case, machine)
    return Result(number, cell, end, f"M={case.m}: {said}" if said else "")


# Simulated ranks --------------------------------------------------------------------------------------------------
def several(numbers: Sequence[int], seed: int) -> list[Result]:
    """What a worker does at once."""
    return [result for n in numbers if (result := tried(n, seed))]


def simulated(cases: int, seed: int, workers: int, seconds: float, first: int = 0) -> Iterator[Result]:
    """At least so many cases, unless time is up; a cell is tried in every round of as many numbers as there are."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    spawn, last, left = multiprocessing.get_context("spawn"), time.monotonic() + seconds, cases
    with spawn.Pool(workers, torch.set_num_threads, (1,)) as pool, Progress(*columns) as progress:
        progress.disable = not progress.console.is_terminal
        bar = progress.add_task("cases", total=cases)
        while left > 0 and time.monotonic() < last:
            chunks = [range(n, n + CHUNK) for n in range(first, first + 8 * workers * CHUNK, CHUNK)]
            first = chunks[-1].stop
            for results in pool.imap_unordered(partial(several, seed=seed), chunks):
                left -= len(results)
                progress.update(bar, advance=len(results))
                yield from results


# Real ranks -------------------------------------------------------------------------------------------------------
def on_this_rank(cases: int, seed: int, first: int) -> None:
    """What each process of a job does: tells each case before it begins, and how it ended."""
    from hostir.job.session import session

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
    done, number, rank = 0, first, int(os.environ["RANK"])

    def tell(line: str) -> None:
        os.write(1, f"{line}\n".encode())  # at once, as all ranks have one pipe

    with session("cpu"):
        while done < cases:
            if cell_of(number).ranks <= GLOO:
                if rank == 0:
                    tell(f"BEGIN {number}")
                if result := tried(number, seed, "gloo"):
                    done += 1
                    tell(f"END {json.dumps([rank, number, result.outcome, result.said[:2000]])}")
            number += 1


def real(cases: int, seed: int, seconds: float, first: int = 0) -> list[Result]:
    """So many cases in one job of gloo processes; a job that ends early is an exception of the case it was at."""
    command = ["-m", "benchmarks.differential", "--on-this-rank", str(cases), "--seed", str(seed), "--case", str(first)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOSTIR_TIMEOUT": "60", "PYTHONPATH": os.pathsep.join(sys.path)}
    job = launch(GLOO, *command, env=env, timeout=seconds)
    worst: dict[int, Result] = {}
    for line in job.stdout.splitlines():
        if line.startswith("END "):
            rank, number, end, said = json.loads(line[4:])
            told = Result(number, cell_of(number), end, f"rank {rank}, {said}" if said else "")
            if number not in worst or OUTCOMES.index(end) > OUTCOMES.index(worst[number].outcome):
                worst[number] = told
    if job.returncode:
        begun = [int(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("BEGIN ")]
        last = begun[-1] if begun else 0
        worst[last] = Result(last, cell_of(last), "exception", f"the job ended: {job.stderr[-2000:]}")
    return list(worst.values())


# Reports ----------------------------------------------------------------------------------------------------------
def counts(results: Iterable[Result]) -> str:
    """The cases by how they ended, without what did not happen."""
    found = Counter(result.outcome for result in results)
    return ", ".join(f"{found[o]} {o}" for o in OUTCOMES if found[o]) or "-"


def grid(title: str, results: Sequence[Result], down: str, across: str) -> str:
    """A table of the cases by two fields of their cells."""
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


def report(results: Sequence[Result], on_gloo: Sequence[Result], around: str) -> str:
    """Tables of what was run."""
    parts = []
    if results:
        parts += [f"Simulated ranks: {len(results)} cases, {totals(results)}. {around}"]
        parts += [grid("By pattern and strategy; - is what a strategy cannot overlap:", results, "pattern", "strategy")]
        parts += [grid("By ranks and number of rows:", results, "ranks", "rows")]
    if on_gloo:
        parts += [f"{GLOO} processes with gloo: {len(on_gloo)} of these cases, {totals(on_gloo)}."]
        parts += [grid("By strategy and number of rows:", on_gloo, "strategy", "rows")]
        parts += [grid("By pattern and strategy:", on_gloo, "pattern", "strategy")]
    return "\n\n".join(parts)


def by_cell(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    """How many cases ended in each way, by pattern and strategy, and by ranks and number of rows."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        cell = result.cell
        for key in (f"{cell.pattern}, {cell.strategy}", f"{cell.ranks} ranks, {cell.rows}"):
            found.setdefault(key, Counter())[result.outcome] += 1
    return {key: dict(sorted(found[key].items())) for key in sorted(found)}


def totals(results: Iterable[Result]) -> str:
    """How many cases ended in each way, also where that is none."""
    found = Counter(result.outcome for result in results)
    return ", ".join(f"{found[o]} {o}" for o in OUTCOMES)


def complaint(result: Result, seed: int, machine: str) -> str:
    """One case that went wrong, and how to see it again."""
    again = f"python -m benchmarks.differential --seed {seed} --case {result.number}"
    return f"{result.outcome}: {result.cell}: {again}{' --gloo 1' if machine == 'gloo' else ''}\n  {result.said}"


def again(number: int, seed: int) -> Result | None:
    """One case, with all that belongs to it."""
    case = drawn(seed, number)
    if case is None:
        print(f"case {number}: {cell_of(number)}: nothing to overlap")
        return None
    print(f"case {number}: {case.cell}: M={case.m}, schedule seed {case.seed}\n{case.fusion}\n{case.program}")
    return Result(number, case.cell, *outcome(case))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all, prints the tables and writes them; 1 where a case is wrong or raises."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=500, help="on simulated ranks, at least")
    options.add_argument("--gloo", type=int, default=0, help=f"on {GLOO} gloo processes")
    options.add_argument("--fp8", action="store_true", help="cases of fp8 products only")
    options.add_argument("--seed", type=int, default=0, help="of everything")
    options.add_argument("--case", type=int, help="only the case of this number, in full")
    options.add_argument("--seconds", type=float, default=float("inf"), help="after which no more are begun")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--out", type=Path, help="writes .json and .md there")
    options.add_argument("--on-this-rank", type=int, default=0, help=argparse.SUPPRESS)
    chosen = options.parse_args(arguments)
    torch.set_num_threads(1)
    first = FIRST_OF_FP8 if chosen.fp8 else 0
    if chosen.on_this_rank:
        on_this_rank(chosen.on_this_rank, chosen.seed, chosen.case or 0)
        return 0

    begun, bad = time.perf_counter(), list[str]()
    results, on_gloo = list[Result](), list[Result]()
    if chosen.case is not None and not chosen.gloo:
        results = [one for one in [again(chosen.case, chosen.seed)] if one]
    elif chosen.case is None:
        for result in simulated(chosen.cases, chosen.seed, chosen.workers, chosen.seconds, first):
            results.append(result)
            if result.outcome in ("wrong", "exception"):
                bad.append(complaint(result, chosen.seed, "local"))
                print(bad[-1], file=sys.stderr, flush=True)
    around = f"{time.perf_counter() - begun:.0f} s with {chosen.workers} workers, seed {chosen.seed}."
    if chosen.gloo:
        on_gloo = real(chosen.gloo, chosen.seed, 60 + 2.0 * chosen.gloo, chosen.case or first)
        for result in on_gloo:
            if result.outcome in ("wrong", "exception"):
                bad.append(complaint(result, chosen.seed, "gloo"))
                print(bad[-1], file=sys.stderr, flush=True)
    if chosen.case is not None:
        (one,) = results or on_gloo or [None]
        print(f"{one.outcome}: {one.said}" if one else "")
        return int(one is not None and one.outcome in ("wrong", "exception"))
    text = report(results, on_gloo, around)
    print(text)
    if chosen.out:
        data = {"simulated": by_cell(results), "gloo": by_cell(on_gloo), "wrong": bad}
        write(chosen.out, "Random fusions against the unsharded result", "\n\n".join([text, *bad]), data)
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
