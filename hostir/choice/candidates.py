"""The candidates of a fusion on a platform. A candidate has a host program, or a reason why it is impossible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from hostir.choice.choices import Candidate, Impossible
from hostir.choice.platforms import CUDA, GLOO, Platform
from hostir.ir.comm_ops import Implemented
from hostir.ir.op import Statement
from hostir.ir.program import Program, shares_memory, stated_hosts
from hostir.ir.source import HostIRError, Span
from hostir.lower import STRATEGIES
from hostir.lower.pipeline import NOT_OVERLAPPED
from hostir.lower.strategies import ACROSS_HOSTS, BY, lower_unproved, proved

SEQUENTIAL = "sequential"
NOTHING_TO_OVERLAP = "no communication to overlap"


@dataclass(frozen=True)
class Candidates:
    """The candidates of a fusion.

    Fields:
        programs: the possible candidates, with their host programs.
        impossible: the impossible candidates, with the reasons.
        not_overlapped: a clause for each communication that no candidate overlaps. The clause says why.
    """

    programs: dict[Candidate, Program]
    impossible: tuple[Impossible, ...]
    not_overlapped: tuple[str, ...] = ()


def candidates_of(
    fusion: Program, platform: Platform, kernels: str | Sequence[str] = "auto", *, for_testing: bool = False
) -> Candidates:
    """Lower a fusion by every strategy that a platform allows, and return the candidates.

    Args:
        fusion: a program in the fusion phase.
        platform: the platform that the fusion will run on.
        kernels: the only kernels to consider: one or several of `aten`, `cublas` and `triton`. With `auto`, the kernels
            that suit the platform are considered.
        for_testing: True to include programs that the platform runs only for testing.
    """
    programs: dict[Candidate, Program] = {}
    impossible: list[Impossible] = []
    for candidate, program in _lowered(fusion, platform, kernels):
        if isinstance(program, HostIRError):
            impossible.append(Impossible(candidate, program.diagnostics[0].message))
            continue
        equal = [c.strategy for c, p in programs.items() if c.kernels == candidate.kernels and p.body == program.body]
        if candidate.strategy in equal:
            continue
        if equal:
            impossible.append(Impossible(candidate, _equal_reason(program, equal[0])))
        elif candidate.kernels in ("aten", "cublas") and _signals_by_sms(program):
            continue  # always slower: cuBLAS takes all SMs, so kernels that signal wait until a wave of tiles has ended
        elif unreachable := platform.unreachable(program):
            impossible.append(Impossible(candidate, unreachable, warn=True))
        elif shares_memory(program) and platform.refuses and not (for_testing and platform.runs_all):
            impossible.append(Impossible(candidate, platform.refuses, warn=True))
        else:
            try:
                programs[candidate] = proved(program)
            except HostIRError as wrong:
                impossible.append(Impossible(candidate, wrong.diagnostics[0].message))
    return Candidates(programs, tuple(_one_a_reason(impossible)), _never_overlapped(programs))


def _never_overlapped(programs: Mapping[Candidate, Program]) -> tuple[str, ...]:
    """Return a clause for each communication that no program overlaps.

    Programs of strategies that overlap nothing do not count.
    """
    clauses = [not_overlapped(p) for c, p in programs.items() if overlaps(c.strategy)]
    if not clauses:
        return ()
    return tuple(clause for place, clause in clauses[0].items() if all(place in others for others in clauses))


def not_overlapped(program: Program) -> dict[tuple[str, Span | None], str]:
    """Return a clause for each communication that a program does not overlap. The clause says why it does not overlap.

    The key of a clause is the keyword of the communication and its place in the source.
    """
    start = f"{NOT_OVERLAPPED}: "
    statements = [s for s in program.walk() if s.note.startswith(start)]
    return {(s.keyword(), s.span): _clause(s, s.note.removeprefix(start)) for s in statements}


def _clause(s: Statement, reason: str) -> str:
    place = f" at {s.span}" if s.span else ""
    return f"the {s.keyword()}{place} is {NOT_OVERLAPPED}: {reason}"


def _lowered(
    fusion: Program, platform: Platform, kernels: str | Sequence[str]
) -> Iterator[tuple[Candidate, Program | HostIRError]]:
    """Yield each candidate with its program, which is not proved yet, or with the error that its strategy raises."""
    usable = {**STRATEGIES, **(ACROSS_HOSTS if stated_hosts(fusion) > 1 else {})}
    strategies = [(name, n) for name, s in usable.items() for n in s.stream_counts]
    strategies += [(BY[by], 1) for by in _implementations(fusion, platform)]
    for strategy, streams in strategies:
        program: Program | HostIRError
        try:
            program = lower_unproved(fusion, strategy, streams)
        except HostIRError as refusal:
            program = refusal
        if isinstance(program, Program) and strategy not in ACROSS_HOSTS:  # there the number is one of slices
            streams = max(program.streams, 1)
        for family in _kernel_families(fusion, platform, kernels):
            yield Candidate(strategy, streams, family), program


def _implementations(fusion: Program, platform: Platform) -> list[str]:
    """Return the implementations, other than NCCL, of collectives in a fusion; empty for CPUs, where gloo runs all."""
    if platform.machine == GLOO:
        return []
    try:
        program = lower_unproved(fusion, SEQUENTIAL, 1)
    except HostIRError:
        return []
    named = {by for s in program.walk() if isinstance(s, Implemented) for by in s.implementations}
    return [by for by in BY if by in named]


def overlaps(strategy: str) -> bool:
    """Return True if a strategy overlaps communication: it is not `sequential`, with any implementation."""
    return strategy != SEQUENTIAL and strategy not in BY.values()


def _kernel_families(fusion: Program, platform: Platform, kernels: str | Sequence[str]) -> Sequence[str]:
    """Return the families of kernels to consider for a fusion."""
    if kernels != "auto":
        return (kernels,) if isinstance(kernels, str) else kernels
    if platform.computes != "cuda" or (platform.machine == CUDA and find_spec("triton") is None):
        return ("aten",)
    if any(s.contracts for s in fusion.body):
        return ("cublas", "triton")  # both compute sums in Triton: ATen's sums move several times as many bytes
    return ("triton",) if any(value.tensor.partial for value in fusion.inputs) else ("aten",)


def _signals_by_sms(program: Program) -> bool:
    return any(s.needs_reserved_sm for s in program.walk())


def _equal_reason(program: Program, strategy: str) -> str:
    """Return the reason to drop a candidate because its program equals the program of an earlier candidate.

    `program` is the program of both candidates, and `strategy` is the strategy of the earlier candidate.
    """
    if strategy == SEQUENTIAL:
        return next(iter(not_overlapped(program).values()), NOTHING_TO_OVERLAP)
    return f"it lowers to the same program as '{strategy}'"


def asked_for(strategy: str, program: Program, kernels: str) -> tuple[Candidate, tuple[str, ...]]:
    """Return the candidate for a strategy that the caller asked for, and notes on communications that do not overlap.

    `program` is the result of lowering by this strategy. If it uses neither worker streams nor the memory of peers, it
    is the sequential program, and the candidate gets the strategy `sequential`.
    """
    if not overlaps(strategy):
        return Candidate(strategy, 1, kernels), ()
    notes = tuple(not_overlapped(program).values())
    if program.streams or shares_memory(program):
        return Candidate(strategy, max(program.streams, 1), kernels), notes
    reason = "" if notes else f": {NOTHING_TO_OVERLAP}"
    return Candidate(SEQUENTIAL, 1, kernels), (*notes, f"'{strategy}' lowers to the sequential program{reason}")


def _one_a_reason(impossible: Sequence[Impossible]) -> Iterable[Impossible]:
    """Return only one impossible candidate for each pair of a strategy and a reason.

    The candidates that are left out differ only in streams or kernels.
    """
    first: dict[tuple[str, str], Impossible] = {}
    for refused in impossible:
        first.setdefault((refused.candidate.strategy, refused.reason), refused)
    return first.values()
