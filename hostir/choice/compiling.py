"""Compile a fusion to an executor, by a given strategy or by the chosen one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hostir.choice.candidates import asked_for
from hostir.choice.choices import ASKED_FOR, Choice
from hostir.choice.decision import choose, log_choice, machine_name, program_of, rank_here, warn_fallbacks
from hostir.choice.ranges import agreed_ranges, free_sizes
from hostir.ir.program import Program
from hostir.ir.source import did_you_mean, error, user_span
from hostir.knobs import KERNELS
from hostir.lower import AUTO, STREAMS, HasProgram
from hostir.lower import lower as lower_by
from hostir.lower.strategies import Watcher, check_strategy, fusion_of

if TYPE_CHECKING:
    import torch

    from hostir.runtime.executor import Executor


def lower_auto(
    fusion: HasProgram | Program, streams: int | None, watch: Watcher | None, sizes: Mapping[str, int] | None
) -> Program:
    """Lower a fusion by the strategy that `auto` chooses for these sizes."""
    _refuse_streams(streams)
    program = fusion_of(fusion)
    choice = choose(program, sizes=sizes)
    return lower_by(program, choice.strategy, choice.streams, watch)


def compile(
    fusion: HasProgram | Program,
    strategy: str = AUTO,
    *,
    streams: int | None = None,
    sizes: Mapping[str, int] | None = None,
    kernels: str | None = None,
    machine: str | None = None,
    group: Any = None,
    calls: str = "out",
    symmetric_limit: int | None = None,
    **options: Any,
) -> Executor:
    """Compile a fusion into an executor that runs it as fast as is known; its field `choice` says how and why.

    With `auto` the fastest of all strategies is taken: as measured, if `hostir tune` has filled the cache of this
    machine; else as a cost model estimates. Under torchrun rank 0 decides for all. A `hostir.FallbackWarning` names,
    once, strategies and overlaps that are not possible on this machine or for these sizes.

    If the fusion has symbols that are not in `sizes`, there is a program for each range of their values, made at the
    first call that needs it; `choice` has the ranges.

    Args:
        fusion: a `hostir.Fusion`, or a program in the fusion phase.
        strategy: `auto`, or one of those of `lower`.
        streams: as for `lower`; `auto` chooses it too.
        sizes: of the fusion's symbols: what the choice is made for. Calls may have others, where they follow from the
            shapes of the inputs. Symbols that are left out follow from them as well.
        kernels, machine, group: as for `Executor`; `auto` chooses among kernels as well, unless they are given.
        calls: how they are made on CUDA, and so which times count: `out` with `out=`, so that programs of one-sided
            copies are replayed from a CUDA graph; `eager` without; `graph` inside a graph that the caller captures.
        symmetric_limit: the most bytes of symmetric memory that the program may take on a rank; see the knob
            HOSTIR_SYMMETRIC_LIMIT. `auto` takes the fastest that takes no more.
        options: those of `Executor`: `seed`, `trace`, `check`, `timeout`, `graphs`, `compare_calls`.

    Raises HostIRError for sizes that neither are given nor follow from inputs, where there is something to choose.
    """
    from hostir.runtime.executor import Executor

    known = [name for name in inspect.signature(Executor).parameters if name != "program"]
    if unknown := next((name for name in options if name not in known), None):
        expected, hint = f"one of: {', '.join(known)}", did_you_mean(unknown, known)
        raise error(f"hi.compile has no option '{unknown}'", user_span(), expected=expected, hint=hint)
    return compiled(
        fusion,
        strategy,
        streams=streams,
        sizes=sizes,
        kernels=kernels,
        machine=machine,
        group=group,
        calls=calls,
        symmetric_limit=symmetric_limit,
        options=options,
    )


def compiled(
    fusion: HasProgram | Program,
    strategy: str,
    *,
    streams: int | None = None,
    sizes: Mapping[str, int] | None = None,
    kernels: str | None = None,
    machine: str | None = None,
    group: Any = None,
    calls: str = "out",
    symmetric_limit: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    warn: bool = True,
) -> Executor:
    """Return the executor of `compile`, whose arguments these are; without `warn` the caller says what falls back."""
    from hostir.runtime.executor import Executor

    program = fusion_of(fusion)
    check_strategy(strategy)
    given = program.given_sizes(sizes)

    def execute(host: Program, chosen_kernels: str) -> Executor:
        unknown = _unknown_to_inputs(host, given)
        limited: dict[str, Any] = {**options, "symmetric_limit": symmetric_limit}
        return Executor(host, sizes=unknown, kernels=chosen_kernels, machine=machine, group=group, **limited)

    if strategy == AUTO and free_sizes(program, given):
        from hostir.choice.ranged import RangedExecutor

        _refuse_streams(streams)
        ranges = agreed_ranges(program, given, kernels, machine, calls, symmetric_limit, group, warn)
        return RangedExecutor(ranges, rank_here(machine, group), execute)
    if strategy == AUTO:
        _refuse_streams(streams)
        how: dict[str, Any] = {"calls": calls, "symmetric_limit": symmetric_limit, "warn": warn}
        choice = choose(program, sizes=given, kernels=kernels, machine=machine, group=group, **how)
        host = program_of(program, choice)
    else:
        host = lower_by(program, strategy, STREAMS if streams is None else streams)
        taken, notes = asked_for(strategy, host, KERNELS.get(kernels))
        choice = Choice(program.name, taken, ASKED_FOR, machine_name(machine, group), notes=notes)
        log_choice(choice)
        if warn:
            warn_fallbacks(program, choice, group)
    executor = execute(host, choice.kernels)
    executor.choice = choice
    return executor


def chosen_for(
    fusion: HasProgram | Program,
    inputs: Sequence[torch.Tensor],
    streams: int | None,
    sizes: Mapping[str, int] | None,
    kernels: str | None,
    machine: str | None,
) -> tuple[Program, str]:
    """Return the program that `auto` lowers a fusion to, and its kernels, for the shapes of whole tensors."""
    from hostir.runtime.sharding import bind_sizes

    _refuse_streams(streams)
    program = fusion_of(fusion)
    choice = choose(
        program, sizes=bind_sizes(program, inputs, program.given_sizes(sizes)), kernels=kernels, machine=machine
    )
    return program_of(program, choice), choice.kernels


def _refuse_streams(streams: int | None) -> None:
    if streams is not None:
        raise error(f"streams={streams}: 'auto' chooses it too", user_span(), hint="leave it out, or name a strategy")


def _unknown_to_inputs(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that no input's shape gives; the executor takes the others from each call's inputs."""
    bound = {name for value in program.inputs for name in value.tensor.names}
    return {name: size for name, size in sizes.items() if name in program.size_names - bound}
