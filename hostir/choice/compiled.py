"""From a fusion to what runs it, by the strategy that is asked for or by the one that is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hostir.choice.candidates import SEQUENTIAL, fusion_of, left_whole
from hostir.choice.decision import choose, machine_name, program_of, tell, warn_fallbacks
from hostir.choice.verdict import ASKED_FOR, Candidate, Choice
from hostir.ir.program import Program
from hostir.ir.source import error
from hostir.knobs import KERNELS
from hostir.lower import AUTO, STREAMS, HasProgram
from hostir.lower import lower as lower_by
from hostir.lower.passes import Watcher
from hostir.lower.strategies import check_strategy

if TYPE_CHECKING:
    import torch

    from hostir.runtime.executor import Executor


def lower_auto(
    fusion: HasProgram | Program, streams: int | None, watch: Watcher | None, sizes: Mapping[str, int] | None
) -> Program:
    """What `auto` lowers a fusion to, for these sizes."""
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
    calls: str = "out",
    **options: Any,
) -> Executor:
    """An executor of a fusion, which runs as fast as is known: its field `choice` says how, and why so.

    With `auto` the fastest of all strategies is taken: as measured, where `hostir tune` has filled the cache of this
    machine; else as a cost model estimates. Under torchrun rank 0 decides for all. What does not run as one might have
    hoped, for the machine or for the sizes, is said in a `hostir.FallbackWarning`, once.

    Args:
        fusion: a `hostir.Fusion`, or a program in the fusion phase.
        strategy: `auto`, or one of those of `lower`.
        streams: as for `lower`; `auto` chooses it too.
        sizes: of the fusion's symbols: what the choice is made for. Calls may have others, where they follow from the
            shapes of the inputs.
        kernels, machine: as for `Executor`; `auto` chooses among kernels as well, unless they are given.
        calls: how they are made on CUDA, and so which times count: `out` with `out=`, so that programs of one-sided
            copies are replayed from a CUDA graph; `eager` without; `graph` inside a graph that the caller captures.
        options: those of `Executor`: `seed`, `trace`, `check`, `timeout`, `graphs`.

    Raises HostIRError for sizes that are not bound where there is something to choose.
    """
    from hostir.runtime.executor import Executor

    program = fusion_of(fusion)
    check_strategy(strategy)
    given = program.given_sizes(sizes)
    if strategy == AUTO:
        _refuse_streams(streams)
        choice = choose(program, sizes=given, kernels=kernels, machine=machine, calls=calls)
        host = program_of(program, choice)
    else:
        host = lower_by(program, strategy, STREAMS if streams is None else streams)
        taken = Candidate(strategy, STREAMS if streams is None else streams, KERNELS.get(kernels))
        notes = tuple(left_whole(host).values()) if strategy != SEQUENTIAL else ()
        choice = Choice(program.name, taken, ASKED_FOR, machine_name(machine), notes=notes)
        tell(choice)
        warn_fallbacks(program, choice)
    executor = Executor(host, sizes=_unknown_to_inputs(host, given), kernels=choice.kernels, machine=machine, **options)
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
    """What `auto` lowers a fusion to, and the kernels it takes, for the shapes of whole tensors."""
    from hostir.runtime.sharding import bind_sizes

    _refuse_streams(streams)
    program = fusion_of(fusion)
    choice = choose(
        program, sizes=bind_sizes(program, inputs, program.given_sizes(sizes)), kernels=kernels, machine=machine
    )
    return program_of(program, choice), choice.kernels


def _refuse_streams(streams: int | None) -> None:
    if streams is not None:
        raise error(f"streams={streams}: 'auto' chooses it too", hint="leave it out, or name a strategy")


def _unknown_to_inputs(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that no input's shape will give: with the others the executor is free."""
    told = {name for value in program.inputs for name in value.tensor.names}
    return {name: size for name, size in sizes.items() if name in program.size_names - told}
