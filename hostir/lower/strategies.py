"""List the strategies with their passes, and lower a fusion by one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hostir.described import described
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import check_known, error, user_span
from hostir.lower.finish import AssignStreams, FreeBuffers, MakeDense, Stagger, Tidy
from hostir.lower.passes import Pass, Watcher, run_passes
from hostir.lower.pipeline import Pipeline, Sequential
from hostir.lower.propagate import Propagate
from hostir.lower.reshard import Communicate, MakeReshards
from hostir.lower.ring import Ring
from hostir.lower.transfers import Fused, Pushed

# By name: what makes the pass of a strategy, for a number of worker streams.
STRATEGIES: dict[str, Callable[[int], Pass]] = {
    "sequential": lambda _: Sequential(),
    "pipeline": lambda _: Pipeline(),
    "ring": Ring,
    "fused": Fused,
    "push": lambda _: Pushed(),
}
AUTO = "auto"  # the fastest of them; hostir.choice, which stands on this layer, says which that is
STREAMS = 4  # the most worker streams, unless said


def check_strategy(strategy: object) -> None:
    """Raise HostIRError unless the name is that of a strategy, or `auto`."""
    check_known("strategy", strategy, [*STRATEGIES, AUTO])


def passes_of(strategy: str = "pipeline", streams: int = STREAMS) -> list[Pass]:
    """Return the passes of a strategy, in order."""
    check_strategy(strategy)
    if strategy == AUTO:
        hint = "hi.lower and hi.compile choose one for a fusion"
        raise error(f"'{AUTO}' has no passes of its own", expected=f"one of: {', '.join(STRATEGIES)}", hint=hint)
    if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
        raise error(f"streams must be at least 1, not {described(streams)}")
    return [
        Propagate(),
        MakeReshards(),
        Communicate(),
        STRATEGIES[strategy](streams),
        AssignStreams(streams),
        Stagger(),
        FreeBuffers(),
        Tidy(),
        MakeDense(),
    ]


class HasProgram(Protocol):
    """Protocol of objects that hold a fusion, such as `hostir.Fusion`."""

    def program(self) -> Program:
        """The fusion as a program."""


def lower(
    fusion: HasProgram | Program, strategy: str = "pipeline", streams: int = STREAMS, watch: Watcher | None = None
) -> Program:
    """Lower a fusion to a host program; `hostir.lower` documents it, and handles `auto` as well."""
    return run_passes(fusion_of(fusion), passes_of(strategy, streams), watch)


def fusion_of(given: object) -> Program:
    """Return the program of a `hostir.Fusion`, or a program that is a fusion. Raise HostIRError for anything else."""
    known = isinstance(given, Program | type)  # a class has `program`, but nothing to call it on
    build = given if known else getattr(given, "program", None)
    program = build() if callable(build) and not known else build
    if not isinstance(program, Program):
        hint = "call it, and pass what it returns" if callable(given) else ""
        raise error(f"not a fusion: {described(given)}", user_span(), expected="a hostir.Fusion", hint=hint)
    if program.phase is not Phase.FUSION:
        hint = "run it as it is: hi.Executor(program), or 'hostir run'"
        raise error(f"@{program.name} is a host program already", user_span(), expected="a fusion", hint=hint)
    return program
