"""The candidates to run a fusion on a platform: each with its host program, or the reason why it is impossible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hostir.choice.choices import Candidate, Impossible
from hostir.choice.platforms import Platform
from hostir.ir.op import Statement
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, Span
from hostir.lower import STRATEGIES, lower
from hostir.lower.pipeline import NOT_OVERLAPPED

SEQUENTIAL = "sequential"
NOTHING_TO_OVERLAP = "no communication to overlap"


@dataclass(frozen=True)
class Candidates:
    """The candidates of a fusion that can be taken, with their programs, and those that cannot, with the reasons.

    `whole` has clauses that say why a communication is not overlapped by any candidate.
    """

    programs: dict[Candidate, Program]
    impossible: tuple[Impossible, ...]
    whole: tuple[str, ...] = ()


def uses_peers(program: Program) -> bool:
    """Whether a program accesses peers' memory."""
    return any(s.one_sided for s in program.walk())


def candidates(fusion: Program, platform: Platform, kernels: str = "auto", *, all_that_run: bool = False) -> Candidates:
    """Lower a fusion in every way that a platform allows.

    Args:
        fusion: a program in the fusion phase.
        platform: where it will run.
        kernels: `aten`, `cublas` or `triton` for these alone, `auto` for what makes sense there.
        all_that_run: also what runs on the platform but is there for testing, as a measurement may ask for.
    """
    programs: dict[Candidate, Program] = {}
    impossible: list[Impossible] = []
    for candidate, lowered in _lowered(fusion, platform, kernels):
        if isinstance(lowered, HostIRError):
            impossible.append(Impossible(candidate, lowered.diagnostics[0].message))
            continue
        refused = _refused(candidate, lowered, programs, platform, all_that_run)
        if isinstance(refused, Impossible):
            impossible.append(refused)
        elif refused:
            programs[candidate] = lowered
    return Candidates(programs, tuple(_merged(impossible)), _whole(programs))


def _whole(programs: Mapping[Candidate, Program]) -> tuple[str, ...]:
    """Return the reasons that every program but the sequential ones gives for the same communication."""
    said = [left_whole(p) for c, p in programs.items() if c.strategy != SEQUENTIAL]
    return tuple(clause for place, clause in said[0].items() if all(place in of for of in said)) if said else ()


def left_whole(program: Program) -> dict[tuple[str, Span | None], str]:
    """Return clauses that say why communications are not overlapped, by their kind and source line."""
    start = f"{NOT_OVERLAPPED}: "
    left = [s for s in program.walk() if s.note.startswith(start)]
    return {(s.keyword(), s.span): _clause(s, s.note.removeprefix(start)) for s in left}


def _clause(s: Statement, why: str) -> str:
    place = f" at {s.span}" if s.span else ""
    return f"the {s.keyword()}{place} is {NOT_OVERLAPPED}: {why}"


def _lowered(fusion: Program, platform: Platform, kernels: str) -> Iterator[tuple[Candidate, Program | HostIRError]]:
    """Yield the program of each candidate, or the error with which it does not lower."""
    for strategy, streams in [(name, n) for name, s in STRATEGIES.items() for n in s.stream_counts]:
        program: Program | HostIRError
        try:
            program = lower(fusion, strategy, streams)
        except HostIRError as refusal:
            program = refusal
        if isinstance(program, Program):
            streams = max(program.streams, 1)
        for each in _kernels(fusion, platform, kernels):
            yield Candidate(strategy, streams, each), program


def _kernels(fusion: Program, platform: Platform, kernels: str) -> Sequence[str]:
    if kernels != "auto":
        return (kernels,)
    if platform.computes != "cuda":
        return ("aten",)
    if any(s.contracts for s in fusion.body):
        return ("cublas", "triton")  # with cuBLAS sums are Triton's, too: ATen's read and write several times as much
    return ("triton",) if any(value.tensor.partial for value in fusion.inputs) else ("aten",)


def _refused(
    candidate: Candidate,
    program: Program,
    known: dict[Candidate, Program],
    platform: Platform,
    all_that_run: bool,
) -> Impossible | bool:
    """Return why a candidate cannot be taken, False to leave it out silently, or True if it can be taken.

    Left out are candidates that equal another one, or that are slower in any case.
    """
    same = [c for c, other in known.items() if c.kernels == candidate.kernels and _same(other, program)]
    if any(c.strategy == candidate.strategy for c in same):
        return False
    if same:
        other = same[0].strategy
        why = _why_sequential(program) if other == SEQUENTIAL else f"it lowers to the same program as '{other}'"
        return Impossible(candidate, why)
    if candidate.kernels in ("aten", "cublas") and _signals_by_sms(program):
        return False  # cuBLAS's matmuls leave no SM to them: they would wait for a wave of tiles
    if uses_peers(program) and platform.refuses and not (all_that_run and platform.runs_all):
        return Impossible(candidate, platform.refuses, warn=True)
    return True


def _signals_by_sms(program: Program) -> bool:
    return any(s.needs_reserved_sm for s in program.walk())


def _same(a: Program, b: Program) -> bool:
    return a.body == b.body


def _why_sequential(program: Program) -> str:
    """Return why a strategy lowers to the sequential program."""
    return next(iter(left_whole(program).values()), NOTHING_TO_OVERLAP)


def asked_for(strategy: str, program: Program, kernels: str) -> tuple[Candidate, tuple[str, ...]]:
    """Return what a program by a strategy that was asked for is, and notes on what it does not overlap.

    A program that uses neither worker streams nor peers' memory is the sequential one, whatever was asked for.
    """
    if strategy == SEQUENTIAL:
        return Candidate(SEQUENTIAL, 1, kernels), ()
    notes = tuple(left_whole(program).values())
    if program.streams or uses_peers(program):
        return Candidate(strategy, max(program.streams, 1), kernels), notes
    why = "" if notes else f": {NOTHING_TO_OVERLAP}"
    return Candidate(SEQUENTIAL, 1, kernels), (*notes, f"'{strategy}' lowers to the sequential program{why}")


def _merged(found: Sequence[Impossible]) -> Iterator[Impossible]:
    """Yield one of those that differ in streams or kernels only."""
    seen: set[tuple[str, str]] = set()
    for it in found:
        if (it.candidate.strategy, it.reason) not in seen:
            seen.add((it.candidate.strategy, it.reason))
            yield it
