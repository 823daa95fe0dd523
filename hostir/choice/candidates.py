"""The ways to run a fusion on a platform, each with its host program or the reason why it cannot be taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hostir.choice.platforms import Platform
from hostir.choice.verdict import Candidate, Impossible
from hostir.described import described
from hostir.ir.onesided_ops import AllocateSymmetric, Barrier, Get, Put, Signal, WaitSignal
from hostir.ir.op import Phase, Statement
from hostir.ir.program import Program
from hostir.ir.sizes import binding
from hostir.ir.source import HostIRError, Span, error
from hostir.ir.tensor_ops import Linear, Matmul
from hostir.lower import STRATEGIES, lower
from hostir.lower.interleave import NOT_OVERLAPPED

STREAMS = {"sequential": (1,), "pipeline": (2, 4), "ring": (2, 4), "fused": (1, 2), "push": (1,)}
ONE_SIDED = (AllocateSymmetric, Barrier, Get, Put, Signal, WaitSignal)
SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class Candidates:
    """What can be taken, with the program of each, and what cannot, with the reasons.

    `whole` says of communications that no candidate overlaps with anything, each as a clause, why.
    """

    programs: dict[Candidate, Program]
    impossible: tuple[Impossible, ...]
    whole: tuple[str, ...] = ()


def uses_peers(program: Program) -> bool:
    """Whether ranks reach into each other's memory."""
    return any(isinstance(s, ONE_SIDED) for s in program.walk())


def candidates(fusion: Program, platform: Platform, kernels: str = "auto", *, all_that_run: bool = False) -> Candidates:
    """Lowers a fusion in every way.

    Args:
        fusion: a program in the fusion phase.
        platform: where it will run.
        kernels: `aten` or `triton` for these alone, `auto` for what makes sense there.
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
    """What every program but the sequential ones says of the same communication."""
    said = [left_whole(p) for c, p in programs.items() if c.strategy != SEQUENTIAL]
    return tuple(clause for place, clause in said[0].items() if all(place in of for of in said)) if said else ()


def left_whole(program: Program) -> dict[tuple[str, Span | None], str]:
    """Why communications are not overlapped, each as a clause, by its kind and where it comes from."""
    start = f"{NOT_OVERLAPPED}: "
    left = [s for s in program.walk() if s.note.startswith(start)]
    return {(s.keyword(), s.span): _clause(s, s.note.removeprefix(start)) for s in left}


def _clause(s: Statement, why: str) -> str:
    place = f" at {s.span}" if s.span else ""
    return f"the {s.keyword()}{place} is {NOT_OVERLAPPED}: {why}"


def _lowered(fusion: Program, platform: Platform, kernels: str) -> Iterator[tuple[Candidate, Program | HostIRError]]:
    """The program of each candidate, or why it does not lower."""
    for strategy, streams in [(s, n) for s in STRATEGIES for n in STREAMS[s]]:
        program: Program | HostIRError
        try:
            program = lower(fusion, strategy, streams)
        except HostIRError as refusal:
            program = refusal
        for each in _kernels(fusion, platform, kernels):
            yield Candidate(strategy, streams, each), program


def _kernels(fusion: Program, platform: Platform, kernels: str) -> Sequence[str]:
    if kernels != "auto":
        return (kernels,)
    contracts = any(isinstance(s, Matmul | Linear) for s in fusion.body)
    return ("aten", "triton") if platform.computes == "cuda" and contracts else ("aten",)


def _refused(
    candidate: Candidate,
    program: Program,
    known: dict[Candidate, Program],
    platform: Platform,
    all_that_run: bool,
) -> Impossible | bool:
    """Why a candidate cannot be taken; False for one that need not be looked at, True for one that can be taken.

    One that is the same as another need not be, nor one that is slower in any case.
    """
    same = [c for c, other in known.items() if c.kernels == candidate.kernels and _same(other, program)]
    if any(c.strategy == candidate.strategy for c in same):
        return False
    if same:
        return Impossible(candidate, _why_same(candidate, program))
    if candidate.kernels == "aten" and _signals_by_sms(program):
        return False  # cuBLAS's matmuls leave no SM to them: they would wait for a wave of tiles
    if uses_peers(program) and platform.refuses and not (all_that_run and platform.runs_all):
        return Impossible(candidate, platform.refuses, loud=True)
    return True


def _signals_by_sms(program: Program) -> bool:
    return any(isinstance(s, Signal) and s.sms for s in program.walk())


def _same(a: Program, b: Program) -> bool:
    return a.body == b.body


def _why_same(candidate: Candidate, program: Program) -> str:
    """Why a strategy comes to the same program as another."""
    if left := left_whole(program):
        return next(iter(left.values()))
    if candidate.strategy == "pipeline":
        return "no tensor has a Stream axis to slice communications along"
    return "no communication to overlap"


def _merged(found: Sequence[Impossible]) -> Iterator[Impossible]:
    """One of those that differ in streams or kernels only."""
    seen: set[tuple[str, str]] = set()
    for it in found:
        if (it.candidate.strategy, it.reason) not in seen:
            seen.add((it.candidate.strategy, it.reason))
            yield it


def fusion_of(given: object) -> Program:
    """The program of a `hostir.Fusion`, or a program that is a fusion. Raises for anything else."""
    build = getattr(given, "program", None)
    program = given if isinstance(given, Program) or not callable(build) or isinstance(given, type) else build()
    if not isinstance(program, Program):
        raise error(f"not a fusion: {described(given)}", expected="a hostir.Fusion")
    if program.phase is not Phase.FUSION:
        raise error(
            f"@{program.name} is a host program already",
            expected="a fusion, of which there is something to choose",
            hint="run it as it is: hi.Executor(program), or 'hostir run'",
        )
    return program


def check_ranks(fusion: Program, platform: Platform) -> None:
    """Raises where there are fewer ranks than the fusion's."""
    if platform.ranks < fusion.ranks:
        raise error(
            f"@{fusion.name} is for {fusion.ranks} ranks, and there are {platform.ranks}",
            hint="build it for fewer, or take a machine with as many",
        )


def check_sizes(fusion: Program, sizes: dict[str, int]) -> None:
    """Raises unless all sizes are known: a choice is made for sizes."""
    if missing := sorted(fusion.size_names - sizes.keys()):
        raise error(
            f"what is fastest depends on the size '{missing[0]}' of @{fusion.name}, which is not bound",
            expected=f"every size that it is chosen for: {', '.join(sorted(fusion.size_names))}",
            hint=binding(missing[0]),
        )
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise error(
                f"the size {name}={described(size)} of @{fusion.name}", expected="an integer that is not negative"
            )
    fusion.check_sizes(sizes)
