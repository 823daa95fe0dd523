"""Correct programs, their mutants, and the verdicts of the checker and of the simulated ranks on each mutant.

A mutant is guilty if the simulated ranks, which share no code with the checker, show it to be wrong: over as many calls
as the proof analyses, a schedule that the memory model allows hangs, raises or gives NaN, or two schedules give
different bits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import hostir as hi
from examples import ag_matmul, edit_a_dump, mlp_block, patterns, row_parallel, write_a_pass
from hostir import knobs
from hostir.check import check, check_structure
from hostir.check.findings import Finding
from hostir.ir.comm_ops import LOW_LATENCY
from hostir.ir.program import Program, format_program, with_hosts
from hostir.ir.source import HostIRError
from hostir.lower import STRATEGIES, passes_of, run_passes
from hostir.lower.allreduces import AllReduceSteps
from hostir.lower.fused import Fused, Push
from hostir.lower.strategies import EXPLICIT, FINISH
from tests.judging.mutants import Mutant, mutants
from tests.judging.reduce_scatters import FORMS, reduce_scatter
from tests.judging.simulated import errors, failure_of, outcome, rehearsal
from tests.launch import ROOT

ONESIDED = ROOT / "tests" / "cases" / "onesided"
SENT = (  # patterns that send rows to peers by copies
    patterns.allgather_matmul,
    patterns.allgather_matmul_kept,
    patterns.column_parallel,
    patterns.gate_up,
    patterns.mlp,
    patterns.mlp_replicated,
    patterns.row_parallel_scattered,
    patterns.expert_mlp,
    patterns.moe_layer,
    patterns.moe_layer_fp8,
)
SMALL = AllReduceSteps(min_rows=1, min_bytes=1)  # in one step, with blocks of any size
TWO = AllReduceSteps(extra_bytes=-1, chunks=2, min_rows=1, min_bytes=1)  # in two steps
SUMMED = ((Fused(2, steps=SMALL), 2), (Fused(2, steps=TWO), 4), (Fused(1, steps=TWO), 3), (Push(TWO), 3))


# Correct programs -------------------------------------------------------------------------------------------------
@cache
def originals() -> tuple[Program, ...]:
    """Return every pattern and example, lowered on tiny tensors, and hand-written one-sided programs."""
    programs = [*_lowered(), *_examples(), *(hi.parse(p.read_text(), p.name) for p in sorted(ONESIDED.glob("*.hir")))]
    programs += [hi.parse(reduce_scatter(form, *sizes)) for form in FORMS for sizes in ((2, 2), (3, 1), (4, 1))]
    programs += sums()
    return tuple({p.digest: p for p in programs}.values())


def _lowered() -> Iterator[Program]:
    for pattern in (*patterns.PATTERNS, *patterns.EXPERTS):
        for ranks, slices in ((2, 2), (2, 3), (4, 2)):
            fusion = tiny(pattern, ranks, slices)
            yield hi.lower(fusion, "sequential")
            yield from (hi.lower(fusion, "pipeline", streams) for streams in range(1, slices + 1))
    yield from (hi.lower(tiny(patterns.mlp, 2, 4), "pipeline", streams) for streams in (3, 4))
    for pattern in SENT:
        for ranks, slices in ((2, 1), (2, 2), (4, 1)):
            yield from (hi.lower(tiny(pattern, ranks, slices), strategy) for strategy in ("ring", "fused", "push"))
    for pattern in (patterns.reduce_scatter, patterns.all_gather):
        yield from (hi.lower(tiny(pattern, ranks, 1), strategy) for ranks, strategy in ((2, "ring"), (3, "push")))
    yield from scaled()
    yield from hierarchical()
    for form, ranks in SUMMED:
        for pattern in (patterns.row_parallel, patterns.all_reduce):
            yield run_passes(tiny(pattern, ranks, 1, M=2 * ranks).program(), [*EXPLICIT, form, *FINISH])


@cache
def sums() -> tuple[Program, ...]:
    """Return programs of the strategy `chain`, and programs with sums by `low_latency`."""
    chains = (
        (patterns.row_parallel_scattered, ((2, 4), (3, 3), (4, 8))),
        (patterns.row_parallel, ((2, 2), (3, 6))),
        (patterns.mlp, ((2, 2),)),
        (patterns.mlp_replicated, ((3, 3),)),
    )
    programs = [hi.lower(tiny(f, n, 1, M=m), "chain", 2) for f, sizes in chains for n, m in sizes]
    alone = (patterns.row_parallel_scattered, patterns.row_parallel, patterns.all_reduce, patterns.mlp_replicated)
    for pattern, ranks in itertools.product(alone, (2, 4)):
        programs.append(hi.lower(tiny(pattern, ranks, 1, M=4), f"sequential by {LOW_LATENCY}"))
    texts = [text.replace("RANKS", " ".join(map(str, range(n)))) for text in BY_LOW_LATENCY for n in (2, 3)]
    return (*programs, *(hi.parse(text) for text in texts))


BY_LOW_LATENCY = (  # slices on two streams, one buffer for the summands of all rounds, and what follows a sum
    """hostir 1
mesh @mesh [didx] = RANKS
program @sums_on_two_streams(%x: f32[3, 4] partial(didx)) -> (%y) streams 2 {
  %user = current_stream
  %z: f32[3, 4] partial(didx) = allocate
  %y: f32[3, 4] = allocate
  for %s in 0..2 { set_stream %s   synchronize %user }
  for %i in 0..3 {
    set_stream %i % 2
    %x_i = select %x[%i]
    %z_i = select %z[%i]
    %y_i = select %y[%i]
    add %x_i, %x_i -> %z_i
    %h = allreduce %z_i -> %y_i over didx by low_latency
    wait %h
  }
  set_stream %user
  for %s in 0..2 { synchronize %s }
  free %z
}
""",
    """hostir 1
mesh @mesh [didx] = RANKS
program @summands_in_one_buffer(%x: f32[3, 4] partial(didx)) -> (%y) {
  %z: f32[4] partial(didx) = allocate
  %y: f32[3, 4] = allocate
  for %i in 0..3 {
    %x_i = select %x[%i]
    %y_i = select %y[%i]
    add %x_i, %x_i -> %z
    %h = allreduce %z -> %y_i over didx by low_latency
    wait %h
  }
  free %z
}
""",
    """hostir 1
mesh @mesh [didx] = RANKS
program @residual_and_norm(%x: f32[2, 4] partial(didx), %r: f32[2, 4], %w: f32[4]) -> (%normed, %added) {
  %sum: f32[2, 4] = allocate
  %added: f32[2, 4] = allocate
  %normed: f32[2, 4] = allocate
  %h = allreduce %x -> %sum over didx by low_latency
  wait %h
  add %sum, %r -> %added
  free %sum
  rms_norm %added eps 1e-06 times %w -> %normed
}
""",
)


def hierarchical() -> Iterator[Program]:
    """Yield programs for two hosts, of one and of two ranks."""
    for pattern in (*SENT, patterns.reduce_scatter, patterns.all_gather):
        for ranks in (2, 4) if pattern is not patterns.mlp_replicated else (4,):
            yield hi.lower(with_hosts(tiny(pattern, ranks, 2).program(), 2), "hierarchical", 2)
    yield hi.lower(with_hosts(tiny(patterns.row_parallel, 4, 2, M=8).program(), 2), "hierarchical", 2)


def scaled() -> Iterator[Program]:
    """Yield every pattern of fp8 products, with scales of rows and of tensors."""
    for pattern in patterns.SCALED:
        for scales, strategies in (("rows", ("ring", "fused", "push")), ("tensor", ("sequential",))):
            fusion = pattern(ranks=2, M=4, K=4, N=4, scales=scales)
            yield from (hi.lower(fusion, strategy) for strategy in strategies)


def _examples() -> Iterator[Program]:
    for fusion in (ag_matmul.ag_matmul, mlp_block.mlp_block, row_parallel.row_parallel, edit_a_dump.gathered):
        yield hi.lower(tiny(fusion, 2, 2), streams=2)
    ahead = tiny(write_a_pass.ag_matmul, 2, 3)
    yield run_passes(ahead.program(), [*passes_of("pipeline", streams=2), write_a_pass.GatherAhead()])


def on_grid(dp: int, tp: int) -> list[Program]:
    """Return programs with equal ranks on a mesh of two axes: an MLP by every strategy, and hand-written ones."""
    numbers = range(dp * tp)
    rows = " ".join(f"({' '.join(map(str, numbers[n * tp : n * tp + tp]))})" for n in range(dp))
    sizes = {"DP": dp, "TP": tp, "OTHERS": dp - 1, "ALL": dp * tp, "GRID": rows, "FLAT": " ".join(map(str, numbers))}
    texts = [re.sub("[A-Z]{2,}", lambda name: str(sizes[name[0]]), text) for text in GRIDS]
    with knobs.scope(spec=0):
        lowered = [hi.lower(tiny(patterns.mlp_2d, dp * tp, 2, dp=dp), strategy) for strategy in STRATEGIES]
    return [*lowered, *(hi.parse(text) for text in texts)]


GRIDS = (  # rows go to all ranks along tp, then along dp; a stream or a matmul waits for the flags
    """hostir 1
mesh @grid [dp, tp] = GRID
program @along_both(%x: f32[DP@dp, TP@tp, 2]) -> (%y) {
  %p = rank of %x over dp
  %q = rank of %x over tp
  %all: f32[DP, TP, 2] = allocate_symmetric
  %there: flag[TP] = allocate_symmetric
  %rows_there: flag[DP] = allocate_symmetric
  barrier of %x over tp
  barrier of %x over dp
  %mine: f32[DP@dp, TP@tp, 2] = shard %all
  for %i in 0..TP {
    put %x -> %mine at (%q + %i) % TP over tp
    signal %there[%q] = 1 at (%q + %i) % TP over tp
  }
  for %i in 0..TP { wait_signal %there[(%q + %i) % TP] >= 1 }
  %rows: f32[DP@dp, TP, 2] = shard %all
  for %i in 0..DP {
    put %rows -> %rows at (%p + %i) % DP over dp
    signal %rows_there[%p] = 1 at (%p + %i) % DP over dp
  }
  for %i in 0..DP { wait_signal %rows_there[(%p + %i) % DP] >= 1 }
  %y: f32[DP, TP, 2] = allocate
  relu %all -> %y
}
""",
    """hostir 1
mesh @grid [dp, tp] = GRID
program @ready_of_both(%x: f32[DP@dp, TP@tp, 2], %b: f32[2, 3]) -> (%c) {
  %p = rank of %x over dp
  %q = rank of %x over tp
  %all: f32[DP, TP, 2] = allocate_symmetric
  %there: flag[ALL] = allocate_symmetric
  barrier of %x over tp
  barrier of %x over dp
  %mine: f32[DP@dp, TP@tp, 2] = shard %all
  for %i in 0..TP {
    put %x -> %mine at (%q + %i) % TP over tp
    signal %there[(%p * TP) + %q] = 1 at (%q + %i) % TP over tp
  }
  for %i in 0..TP { wait_signal %there[(%p * TP) + ((%q + %i) % TP)] >= 1 }
  %rows: f32[DP@dp, TP, 2] = shard %all
  for %i in 0..OTHERS {
    put %rows -> %rows at (%p + %i + 1) % DP over dp
    for %j in 0..TP { signal %there[(%p * TP) + ((%q + %j) % TP)] = 1 at (%p + %i + 1) % DP over dp }
  }
  %c: f32[DP, TP, 3] = allocate
  matmul %all, %b -> %c ready %there >= 1 from (%p * TP) + %q
}
""",
    """hostir 1
mesh @grid [dp, tp] = GRID
mesh @flat [didx] = FLAT
program @collectives_of_both(%x: f32[DP@dp, TP@tp, 2], %z: f32[2] partial(didx) on @flat) -> (%y, %sum) streams 2 {
  %user = current_stream
  %rows: f32[DP@dp, TP, 2] = allocate
  %y: f32[DP, TP, 2] = allocate
  %sum: f32[2] on @flat = allocate
  set_stream 0
  synchronize %user
  %h = allgather %x -> %rows over tp
  set_stream 1
  synchronize %user
  %s = allreduce %z -> %sum over didx
  set_stream 0
  wait %h
  %g = allgather %rows -> %y over dp
  wait %g
  set_stream %user
  synchronize 0
  wait %s
  free %rows
}
""",
)


def tiny(fusion: Callable[..., hi.Fusion], ranks: int, slices: int, **more: int) -> hi.Fusion:
    """Return the fusion with one row in each slice of each rank, and one column for each rank."""
    sizes = {"ranks": ranks, "S": slices, "M": ranks * slices, "K": ranks, "N": ranks * slices, "H": ranks, **more}
    known = fusion.__code__.co_varnames[: fusion.__code__.co_argcount]
    return fusion(**{name: value for name, value in sizes.items() if name in known})


def every_mutant(programs: Iterable[Program]) -> list[Mutant]:
    """Return the mutants of these programs, each text once, without the programs themselves."""
    known = {format_program(p, notes=False) for p in programs}
    by_text = {m.text: m for p in programs for m in mutants(p) if m.text not in known}
    return list(by_text.values())


def sample(mutants: Iterable[Mutant], most: int, seed: int = 0) -> list[Mutant]:
    """Return at most `most` mutants, about equally many of each operator. They depend only on `seed`."""
    groups: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault(mutant.operator, []).append(mutant)
    random = Random(seed)
    for group in groups.values():
        random.shuffle(group)
    turns = [(turn, operator, m) for operator, group in sorted(groups.items()) for turn, m in enumerate(group)]
    return [m for _, _, m in sorted(turns, key=lambda x: x[:2])[:most]]


def edited_twice(once: Sequence[Mutant], most: int, seed: int = 0) -> list[Mutant]:
    """Return mutants of mutants: one fault may hide another, and the second edit may expose it."""
    random, pairs = Random(seed), dict[str, Mutant]()
    for first in random.sample(once, len(once)):
        program = _sound(first)
        more = mutants(program) if program else []
        for then in random.sample(more, min(len(more), 4)):
            pairs[then.text] = Mutant("two edits", first.name, f"{first.change}; {then.change}", then.text)
        if len(pairs) >= most:
            break
    return list(pairs.values())[:most]


def _sound(mutant: Mutant) -> Program | None:
    try:
        program = hi.parse(mutant.text, mutant.name)
    except HostIRError:
        return None
    return None if check_structure(program) else program


def unreported(program: Program, operators: Collection[str]) -> list[str]:
    """Return the edits of `operators` that the checker accepts. There must be several edits."""
    edited = [mutant for mutant in mutants(program) if mutant.operator in operators]
    assert len(edited) > 2
    return [mutant.change for mutant in edited if not _reported(mutant)]


def _reported(mutant: Mutant) -> bool:
    try:
        return bool(hi.check(hi.parse(mutant.text)))
    except HostIRError as refused:
        return bool(refused.diagnostics)


# Guilt and verdict ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict:
    """Findings of the checker on a mutant, and failures of the simulated ranks.

    Fields:
        structure: errors in names, types, handles and lifetimes; any of them ends the check.
        findings: errors of the checker.
        guilt: the failure and its seed; empty if no seed fails.
        seen: a race that the simulated ranks see when they watch every access, which need not change a result.
    """

    mutant: Mutant
    structure: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    guilt: str = ""
    seen: str = ""

    @property
    def outcome(self) -> str:
        """One of `OUTCOMES`: "benign" is a true race, or a read of undefined data, that changes no result."""
        if self.structure:
            return "structure"
        if self.guilt:
            return "caught" if self.findings else "missed"
        if self.findings:
            return "benign" if self.seen else "unfounded"
        return "innocent"


OUTCOMES = ("structure", "caught", "missed", "benign", "unfounded", "innocent")


def judge(mutant: Mutant, seeds: int) -> Verdict | None:
    """Return the verdict on a mutant, or None if its text does not parse."""
    try:
        program = hi.parse(mutant.text, mutant.name)
    except HostIRError:
        return None
    diagnostics = [d for d in check(program) if d.level == "error"]
    if any(not isinstance(d, Finding) for d in diagnostics):
        return Verdict(mutant, structure=errors(diagnostics))
    findings, guilt = errors(diagnostics), failure_of(program, seeds)
    seen = outcome(rehearsal(program), 0, watch=True) if not guilt else ""
    return Verdict(mutant, (), findings, guilt, seen if isinstance(seen, str) else "")


def subject(message: str) -> str:
    """Return a finding without the names and numbers of the program."""
    return re.sub(r"\d+", "N", re.sub(r"%\w+", "%x", re.sub(r"'[^']*'", "'...'", message)))
