"""Whether the checker notices what goes wrong: programs that are right, and the verdict on each of their mutants.

A mutant is guilty when the simulated ranks say so, who know nothing of the checker: over as many calls as the proof
looks at, some schedule that the memory model allows hangs, raises or gives NaN, or two of them give different bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import torch

import hostir as hi
from examples import ag_matmul, edit_a_dump, mlp_block, patterns, row_parallel, write_a_pass
from hostir import knobs
from hostir.check import check, check_structure
from hostir.check.proof import Finding, analyse_quickly
from hostir.ir.program import Program, format_program
from hostir.ir.source import Diagnostic, HostIRError
from hostir.ir.tensor_ops import ByBlocks
from hostir.lower import STRATEGIES, passes_of, run_passes
from hostir.lower.allreduces import AllReduceSteps
from hostir.lower.fused import Fused, Push
from hostir.lower.strategies import EXPLICIT, FINISH
from hostir.runtime.sharding import random_inputs
from hostir.runtime.simulated.machine import LocalMachine, rehearse
from tests.mutants import Mutant, mutants
from tests.reduce_scatters import FORMS, reduce_scatter

ONESIDED = Path(__file__).parent / "cases" / "onesided"
SENT = (  # rows that peers send one another by copies
    patterns.allgather_matmul,
    patterns.allgather_matmul_kept,
    patterns.column_parallel,
    patterns.gate_up,
    patterns.mlp,
    patterns.mlp_replicated,
    patterns.row_parallel_scattered,
)
SMALL = AllReduceSteps(min_rows=1, min_bytes=1)  # in one step, blocks as small as they like
TWO = AllReduceSteps(extra_bytes=-1, chunks=2, min_rows=1, min_bytes=1)  # in two
SUMMED = ((Fused(2, steps=SMALL), 2), (Fused(2, steps=TWO), 4), (Fused(1, steps=TWO), 3), (Push(TWO), 3))


# Programs that are right ------------------------------------------------------------------------------------------
@cache
def originals() -> tuple[Program, ...]:
    """What the compiler makes of every pattern and example on tiny tensors, and one-sided programs by hand."""
    programs = [*_lowered(), *_examples(), *(hi.parse(p.read_text(), p.name) for p in sorted(ONESIDED.glob("*.hir")))]
    programs += [hi.parse(reduce_scatter(form, *sizes)) for form in FORMS for sizes in ((2, 2), (3, 1), (4, 1))]
    return tuple({p.digest: p for p in programs}.values())


def _lowered() -> Iterator[Program]:
    for pattern in patterns.PATTERNS:
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
    for form, ranks in SUMMED:
        for pattern in (patterns.row_parallel, patterns.all_reduce):
            yield run_passes(tiny(pattern, ranks, 1, M=2 * ranks).program(), [*EXPLICIT, form, *FINISH])


def scaled() -> Iterator[Program]:
    """Every pattern of fp8 products: rows, and their scales or the largest of all, go ahead of what multiplies them."""
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
    """Programs on a mesh of two axes, on which ranks are alike: every strategy of an MLP, and some by hand."""
    numbers = range(dp * tp)
    rows = " ".join(f"({' '.join(map(str, numbers[n * tp : n * tp + tp]))})" for n in range(dp))
    sizes = {"DP": dp, "TP": tp, "OTHERS": dp - 1, "ALL": dp * tp, "GRID": rows, "FLAT": " ".join(map(str, numbers))}
    texts = [re.sub("[A-Z]{2,}", lambda name: str(sizes[name[0]]), text) for text in GRIDS]
    with knobs.scope(spec=0):
        lowered = [hi.lower(tiny(patterns.mlp_2d, dp * tp, 2, dp=dp), strategy) for strategy in STRATEGIES]
    return [*lowered, *(hi.parse(text) for text in texts)]


GRIDS = (  # rows go to all ranks along tp, then along dp; the ranks' flags are waited for by a stream, or by a matmul
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
    """The fusion with one row in each slice of each rank, and columns for each rank."""
    sizes = {"ranks": ranks, "S": slices, "M": ranks * slices, "K": ranks, "N": ranks * slices, "H": ranks, **more}
    known = fusion.__code__.co_varnames[: fusion.__code__.co_argcount]
    return fusion(**{name: value for name, value in sizes.items() if name in known})


def every_mutant(programs: Iterable[Program]) -> list[Mutant]:
    """The mutants of all these programs that are none of them, each text once."""
    known = {format_program(p, notes=False) for p in programs}
    found = {m.text: m for p in programs for m in mutants(p) if m.text not in known}
    return list(found.values())


def sample(found: Iterable[Mutant], most: int, seed: int = 0) -> list[Mutant]:
    """At most so many, as even over the kinds as there are, the same ones every time."""
    kinds: dict[str, list[Mutant]] = {}
    for mutant in found:
        kinds.setdefault(mutant.kind, []).append(mutant)
    random = Random(seed)
    for group in kinds.values():
        random.shuffle(group)
    turns = [(turn, kind, m) for kind, group in sorted(kinds.items()) for turn, m in enumerate(group)]
    return [m for _, _, m in sorted(turns, key=lambda x: x[:2])[:most]]


def edited_twice(found: Sequence[Mutant], most: int, seed: int = 0) -> list[Mutant]:
    """So many mutants of mutants: one fault may hide another, and what held a program together by luck may go."""
    random, pairs = Random(seed), dict[str, Mutant]()
    for first in random.sample(found, len(found)):
        program = _sound(first)
        more = mutants(program) if program else []
        for then in random.sample(more, min(len(more), 4)):
            pairs[then.text] = Mutant("two edits", first.of, f"{first.what}; {then.what}", then.text)
        if len(pairs) >= most:
            break
    return list(pairs.values())[:most]


def _sound(mutant: Mutant) -> Program | None:
    try:
        program = hi.parse(mutant.text, mutant.of)
    except HostIRError:
        return None
    return None if check_structure(program) else program


# Guilt and verdict ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict:
    """What the checker says of a mutant, and what the simulated ranks do with it.

    Fields:
        structure: what is wrong with its names and types, or with handles and lifetimes as issued; then nothing else
            was asked.
        findings: what the checker says.
        guilt: what convicts it, and under which seed; empty where no seed does.
        seen: what the simulated ranks see when they watch every access, which need not change a result.
    """

    mutant: Mutant
    structure: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    guilt: str = ""
    seen: str = ""

    @property
    def outcome(self) -> str:
        """One of `OUTCOMES`: benign is a true race, or a read of nothing, that no schedule lets show in a result."""
        if self.structure:
            return "structure"
        if self.guilt:
            return "caught" if self.findings else "missed"
        if self.findings:
            return "benign" if self.seen else "unfounded"
        return "innocent"


OUTCOMES = ("structure", "caught", "missed", "benign", "unfounded", "innocent")


def judge(mutant: Mutant, seeds: int) -> Verdict | None:
    """The verdict on a mutant; None where its text cannot be read, so that it is no program."""
    try:
        program = hi.parse(mutant.text, mutant.of)
    except HostIRError:
        return None
    found = [d for d in check(program) if d.level == "error"]
    if any(not isinstance(d, Finding) for d in found):
        return Verdict(mutant, structure=errors(found))
    findings, guilt = errors(found), convicted(program, seeds)
    seen = outcome(rehearsal(program), 0, watch=True) if not guilt else ""
    return Verdict(mutant, (), findings, guilt, seen if isinstance(seen, str) else "")


def convicted(program: Program, seeds: int) -> str:
    """What goes wrong under which of the first so many schedules; empty where nothing does."""
    machine, first = rehearsal(program), None
    for seed in range(seeds):
        found = outcome(machine, seed)
        if isinstance(found, str):
            return f"seed {seed}: {found}"
        first = first or found
        if found != first:
            return f"seed {seed}: other bits than under seed 0"
    return ""


def calls_of(program: Program) -> int:
    """As many calls as the proof looks at; where kernels wait, at least one for each rank."""
    waits = any(isinstance(s, ByBlocks) and s.ready is not None for s in program.walk())
    return max(analyse_quickly(program).calls, program.ranks if waits else 2)


def rehearsal(program: Program) -> LocalMachine | str:
    """The program's calls, each with inputs of its own; or why they cannot even be planned."""
    try:
        return rehearse(program, [random_inputs(program, {}, seed=call) for call in range(calls_of(program))])
    except HostIRError as wrong:
        return wrong.diagnostics[0].message


def outcome(machine: LocalMachine | str, seed: int, watch: bool = False) -> list[bytes] | str:
    """The bits of all outputs under one schedule, or what goes wrong."""
    if isinstance(machine, str):
        return machine
    try:
        calls = machine.run(seed, watch=watch)
    except HostIRError as wrong:
        return wrong.diagnostics[0].message
    parts = [part for outputs in calls for output in outputs for part in output if part is not None]
    if any(part.isnan().any() for part in parts):
        return "NaN in an output"
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]


def errors(found: Iterable[Diagnostic]) -> tuple[str, ...]:
    """The messages of what is wrong; warnings left out."""
    return tuple(d.message for d in found if d.level == "error")


def subject(message: str) -> str:
    """A finding without the names and numbers of the program: what kind of finding it is."""
    return re.sub(r"\d+", "N", re.sub(r"%\w+", "%x", re.sub(r"'[^']*'", "'...'", message)))
