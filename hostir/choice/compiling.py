"""Compile a fusion to an executor. The caller names the strategy, or lets `auto` choose it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hostir.choice.candidates import asked_for
from hostir.choice.choices import ASKED_FOR, Choice
from hostir.choice.decision import choose, log_choice, machine_name, program_of, rank_here, warn_fallbacks
from hostir.choice.ranges import agreed_ranges
from hostir.ir.program import Program
from hostir.ir.source import did_you_mean, error, user_span
from hostir.knobs import KERNELS, TUNE
from hostir.lower import AUTO, STREAMS, HasProgram
from hostir.lower import lower as lower_by
from hostir.lower.strategies import Watcher, check_strategy, fusion_of

if TYPE_CHECKING:
    import torch

    from hostir.call.executor import Executor


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
    tune: float | None = None,
    **options: Any,
) -> Executor:
    """Compile a fusion into an executor. The executor's field `choice` says which strategy it runs, and why.

    The strategy `auto` takes the fastest strategy. A cost model estimates which strategies are fast, and the first
    calls try the best of them (docs/choosing.md). The measurements are kept for later processes, and `hostir tune`
    makes them in advance. Under torchrun rank 0 chooses for all ranks.

    A `hostir.FallbackWarning` names, once, the strategies and overlaps that are not possible on this machine or
    for these sizes.

    If the fusion has symbols that are not in `sizes`, `auto` chooses a program for each range of their values, when a
    call first needs it. Then `choice` has the ranges.

    Args:
        fusion: a `hostir.Fusion`, or a program in the fusion phase.
        strategy: `auto`, or a strategy of `lower`.
        streams: the same as in `lower`. Leave it out with `auto`, which also chooses the number of streams.
        sizes: values of the fusion's symbols, for which the choice is made. In calls, symbols in the shapes of inputs
            may have other values. Symbols that are left out must be in the shapes of inputs.
        kernels, machine, group: the same as in `Executor`. `auto` also chooses the kernels, unless `kernels` names
            them.
        calls: how you will make calls on CUDA. `auto` compares candidates by their times when they are called in this
            way. `out`: you pass `out=`, so the executor replays programs without collectives from a CUDA graph.
            `eager`: you do not pass `out=`. `graph`: you capture the calls in a CUDA graph. First make one plain call
            with the same sizes: it tries the candidates. If the ranks differ, rank 0 decides.
        symmetric_limit: the maximum number of bytes of symmetric memory that the program may use on a rank. By default
            the knob HOSTIR_SYMMETRIC_LIMIT decides. `auto` chooses the fastest program within the limit.
        tune: the seconds that trials of candidates may add to the calls of each range of sizes; 0 for no trials. By
            default the knob HOSTIR_TUNE decides.
        options: further options of `Executor`: `seed`, `trace`, `check`, `timeout`, `graphs`, `compare_calls`.

    Raises HostIRError if `auto` cannot choose because a size has no value and does not follow from the inputs.
    """
    from hostir.call.executor import Executor

    valid = [name for name in inspect.signature(Executor).parameters if name != "program"]
    if unknown := next((name for name in options if name not in valid), None):
        expected, hint = f"one of: {', '.join(valid)}", did_you_mean(unknown, valid)
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
        tune=tune,
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
    tune: float | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    warn: bool = True,
) -> Executor:
    """Compile as `compile` does, with the same arguments. If `warn` is False, give no fallback warnings.

    `options` holds further options of `Executor`.
    """
    import torch

    from hostir.call.executor import Executor

    program = fusion_of(fusion)
    check_strategy(strategy)
    bound = program.given_sizes(sizes)

    def execute(host: Program, chosen_kernels: str) -> Executor:
        fixed = _sizes_without_inputs(host, bound)
        limited: dict[str, Any] = {**options, "symmetric_limit": symmetric_limit}
        return Executor(host, sizes=fixed, kernels=chosen_kernels, machine=machine, group=group, **limited)

    rank, budget = rank_here(machine, group), TUNE.get(tune)
    if rank is None or options.get("trace") is not None or torch.are_deterministic_algorithms_enabled():
        budget = 0.0  # simulated ranks have no speed; a trace shows one program; times differ from process to process
    if strategy == AUTO:
        from hostir.choice.ranged import RangedExecutor

        _refuse_streams(streams)
        ranges = agreed_ranges(program, bound, kernels, machine, calls, symmetric_limit, group, warn, budget)
        if ranges.budget or ranges.free:
            return RangedExecutor(ranges, rank, execute)
        choice = ranges.choice(ranges.fixed)
        host = ranges.program(choice.taken)
    else:
        host = lower_by(program, strategy, STREAMS if streams is None else streams)
        candidate, notes = asked_for(strategy, host, KERNELS.get(kernels))
        choice = Choice(program.name, candidate, ASKED_FOR, machine_name(machine, group), notes=notes)
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
    """Return the program and the kernels that `auto` chooses for the shapes of these unsharded inputs."""
    from hostir.call.sizes import bind_sizes

    _refuse_streams(streams)
    program = fusion_of(fusion)
    choice = choose(
        program, sizes=bind_sizes(program, inputs, program.given_sizes(sizes)), kernels=kernels, machine=machine
    )
    return program_of(program, choice), choice.kernels


def _refuse_streams(streams: int | None) -> None:
    if streams is not None:
        raise error(f"streams={streams}: 'auto' chooses it too", user_span(), hint="leave it out, or name a strategy")


def _sizes_without_inputs(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that are in the shape of no input.

    Executors take all other sizes from the inputs of each call.
    """
    in_shapes = {name for value in program.inputs for name in value.tensor.names}
    return {name: size for name, size in sizes.items() if name in program.size_names - in_shapes}
