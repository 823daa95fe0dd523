"""List the strategies with their passes, and lower a fusion by one of them.

The program is verified after each pass. The final host program is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from pathlib import Path
from typing import Protocol

from hostir import knobs
from hostir.check import prove, verify
from hostir.ir import parse
from hostir.ir.comm_ops import COPY_ENGINE, LOW_LATENCY, ONE_SHOT, TWO_SHOT
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import UNCHECKED, HostIRError, check_known, described, error, user_span, warn_once
from hostir.lower import Pass
from hostir.lower.chain import Chain
from hostir.lower.finish import AssignStreams, FreeBuffers, MakeDense, Stagger, Tidy
from hostir.lower.fused import Fused, Push
from hostir.lower.hierarchical import Hierarchical
from hostir.lower.levels import Levels
from hostir.lower.pipeline import Pipeline, Sequential
from hostir.lower.propagate import Propagate
from hostir.lower.reshard import Communicate, MakeReshards
from hostir.lower.ring import Ring


@dataclass(frozen=True)
class Strategy:
    """A way to lower a fusion.

    `passes` is a function that returns the passes for a given number of worker streams. `stream_counts` holds the
    numbers of worker streams that `auto` tries.
    """

    passes: Callable[[int], Sequence[Pass]]
    stream_counts: tuple[int, ...] = (1,)


# EXPLICIT runs before a strategy's passes: it makes every communication explicit. FINISH runs after them.
EXPLICIT: tuple[Pass, ...] = (Propagate(), MakeReshards(), Communicate())
FINISH: tuple[Pass, ...] = (FreeBuffers(), Tidy(), MakeDense())

STRATEGIES: dict[str, Strategy] = {
    "sequential": Strategy(lambda _: (*EXPLICIT, Sequential(), *FINISH)),
    "pipeline": Strategy(lambda n: (*EXPLICIT, Pipeline(n), AssignStreams(n), Stagger(), *FINISH), (2, 4)),
    "ring": Strategy(lambda n: (*EXPLICIT, Ring(n), *FINISH), (2, 4)),
    "chain": Strategy(lambda n: (*EXPLICIT, Chain(n), *FINISH), (2, 4)),
    "fused": Strategy(lambda n: (*EXPLICIT, Fused(n), *FINISH), (1, 2)),
    "push": Strategy(lambda _: (*EXPLICIT, Push(), *FINISH)),
}
# Strategies for ranks on several hosts.
ACROSS_HOSTS: dict[str, Strategy] = {
    "hierarchical": Strategy(lambda n: (*EXPLICIT, Levels(), Hierarchical(n), *FINISH), (2, 4, 8)),
}
# Strategies that name an implementation of collectives instead of NCCL, by this implementation.
BY: dict[str, str] = {by: f"sequential by {by}" for by in (LOW_LATENCY, ONE_SHOT, TWO_SHOT, COPY_ENGINE)}
AUTO = "auto"  # the fastest strategy; hostir.choice, which builds on this layer, chooses it
# The ways to call a program; `AUTO` ranks strategies by the time of one of them. With `out=` an executor captures and
# replays a CUDA graph itself, except for programs that communicate through NCCL, which only their caller can capture.
CALLS = ("out", "eager", "graph")
STREAMS = 4  # the default maximum number of worker streams


def strategies() -> list[str]:
    """Return the names of all strategies."""
    return [*STRATEGIES, *ACROSS_HOSTS, *BY.values()]


def check_strategy(strategy: object) -> None:
    """Raise HostIRError unless `strategy` is the name of a strategy, or `auto`."""
    check_known("strategy", strategy, [*strategies(), AUTO])


def passes_of(strategy: str = "pipeline", streams: int = STREAMS) -> list[Pass]:
    """Return the passes of a strategy for `streams` worker streams, in order."""
    check_strategy(strategy)
    if strategy == AUTO:
        hint = "hi.lower and hi.compile choose one for a fusion"
        expected = f"one of: {', '.join(strategies())}"
        raise error(f"'{AUTO}' has no passes", user_span(), expected=expected, hint=hint)
    if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
        raise error(f"streams must be at least 1, not {described(streams)}", user_span())
    by = next((by for by, name in BY.items() if name == strategy), None)
    return [*EXPLICIT, Sequential(by), *FINISH] if by else [*{**STRATEGIES, **ACROSS_HOSTS}[strategy].passes(streams)]


class HasProgram(Protocol):
    """Protocol of objects that hold a fusion, such as `hostir.Fusion`."""

    def program(self) -> Program:
        """Return the fusion as a program."""


def lower(
    fusion: HasProgram | Program, strategy: str = "pipeline", streams: int = STREAMS, watch: Watcher | None = None
) -> Program:
    """Lower a fusion to a host program. See `hostir.lower`, which also accepts the strategy `auto`."""
    return run_passes(fusion_of(fusion), passes_of(strategy, streams), watch)


def lower_unproved(fusion: Program, strategy: str, streams: int) -> Program:
    """Lower a fusion to a host program, and leave its proof to the caller. A program that will not run needs none."""
    return run_unproved(fusion, passes_of(strategy, streams))


def fusion_of(fusion: object) -> Program:
    """Return the program of a `hostir.Fusion`. Return a program in the fusion phase as it is.

    Raise HostIRError for anything else.
    """
    known = isinstance(fusion, Program | type)  # a class has a method `program`, but no instance to call it on
    build = fusion if known else getattr(fusion, "program", None)
    program = build() if callable(build) and not known else build
    if not isinstance(program, Program):
        hint = "call it, and pass its result" if callable(fusion) else ""
        raise error(f"not a fusion: {described(fusion)}", user_span(), expected="a hostir.Fusion", hint=hint)
    if program.phase is not Phase.FUSION:
        hint = "run it as it is: hi.Executor(program), or 'hostir run'"
        raise error(f"@{program.name} is a host program already", user_span(), expected="a fusion", hint=hint)
    return program


Watcher = Callable[[str, Program], None]


@dataclass(frozen=True, eq=False)
class _Fusion:
    """A fusion as the key of a cache. Two keys are equal only if they hold the same fusion object.

    Equal programs may come from different lines of the user's code, and errors must point at the right line.
    """

    program: Program

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fusion) and self.program is other.program

    def __hash__(self) -> int:
        return id(self.program)


def run_passes(program: Program, passes: Sequence[Pass], watch: Watcher | None = None) -> Program:
    """Run the passes in order, verify the result of each pass, and return the host program.

    The final host program is proved free of races, deadlocks and misuse of memory. If HOSTIR_DUMP is set, the program
    before and after every pass is written to a numbered file, which can be parsed again. HOSTIR_SPEC=0 verifies only
    the final program. HOSTIR_SPEC=1 verifies the program after every pass. HOSTIR_SPEC=2 also prints and parses it
    after every pass, and requires an equal program.
    """
    return proved(run_unproved(program, passes, watch))


def run_unproved(program: Program, passes: Sequence[Pass], watch: Watcher | None = None) -> Program:
    """Run the passes as `run_passes` does, without the proof of the host program."""
    spec, folder, done = knobs.SPEC.get(), knobs.DUMP.get(), 0
    verify(program)
    _dump(folder, 0, "fusion", program)
    if folder is None and watch is None and tuple(passes[: len(EXPLICIT)]) == EXPLICIT:
        program, done = _explicit(_Fusion(program), spec), len(EXPLICIT)
    for number, each in enumerate(passes[done:], done + 1):
        program = _run(each, program, spec)
        _dump(folder, number, each.name, program)
        if watch:
            watch(each.name, program)
    return verify(program, explicit=program.phase is Phase.HOST)


@lru_cache(maxsize=1)  # strategies run one after another on the same fusion
def _explicit(fusion: _Fusion, spec: int) -> Program:
    """Return a fusion transformed by the passes of EXPLICIT."""
    return reduce(lambda program, each: _run(each, program, spec), EXPLICIT, fusion.program)


def proved(program: Program) -> Program:
    """Prove the program for small sizes, and return it. Raise HostIRError if it is wrong.

    Only warn if the program could not be checked.
    """
    try:
        return prove(program)
    except HostIRError as findings:
        if any(finding.category != UNCHECKED for finding in findings.diagnostics):
            raise
        for finding in findings.diagnostics:
            warn_once((program.name, finding.message), finding.message, finding.hint, RuntimeWarning)
        return program


def _run(each: Pass, program: Program, spec: int) -> Program:
    """Run a pass, and verify its result. `spec` is the value of HOSTIR_SPEC, which says what to verify."""
    program = each.run(program)
    if not spec:
        return program
    try:
        verify(program, explicit=each.explicit_reshards)
        if spec > 1 and parse(str(program)) != program:
            raise AssertionError(f"the text after {each.name} does not parse back to the same program:\n{program}")
    except HostIRError as wrong:
        wrong.add_note(f"after the pass '{each.name}', which left:\n{program}")
        raise
    return program


def _dump(folder: Path | None, number: int, name: str, program: Program) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{program.name}-{number:02}-{name}.hir").write_text(str(program))
    except OSError as problem:
        expected = "a folder that can be created and written to"
        raise error(f"HOSTIR_DUMP='{folder}': {problem.strerror}", expected=expected) from None
