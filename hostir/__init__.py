"""hostir: sharded tensor programs become host programs of streams, collectives and matmuls, as text that reads back."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hostir import ir, knobs
from hostir.described import described
from hostir.ir import Diagnostic, HostIRError, Phase, Program
from hostir.ir.source import error, user_span

if TYPE_CHECKING:
    import torch

    from hostir.choice import Choice, FallbackWarning, compile
    from hostir.dsl import (
        DeviceMesh,
        Fusion,
        ParallelType,
        Tensor,
        add,
        cast,
        gelu,
        linear,
        matmul,
        mul,
        permute,
        relu,
        reshape,
        reshard,
        silu,
        sum,
        tensor,
    )
    from hostir.lower import HasProgram
    from hostir.lower.strategies import Watcher
    from hostir.runtime.executor import Executor
    from hostir.runtime.session import Session, session
    from hostir.runtime.trace import Trace

# What is loaded when it is first used: the choice of a strategy; the runtime, and with it torch; what users write.
_LATER = {
    "dsl": "hostir.dsl",
    **dict.fromkeys(("Choice", "FallbackWarning", "compile"), "hostir.choice"),
    "Executor": "hostir.runtime.executor",
    **dict.fromkeys(("Session", "session"), "hostir.runtime.session"),
    "Trace": "hostir.runtime.trace",
}
# The packages, before the functions below take the place of their names.
import_module("hostir.lower")
import_module("hostir.check")
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hostir' has no attribute '{name}'")
    module = import_module(_LATER[name])
    globals()[name] = module if name == "dsl" else getattr(module, name)  # found at once from then on
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def parse(text: str, file: str = "<text>") -> Program:
    """Reads a program from its text, as `print(program)` writes it; `file` is what mistakes say they are in.

    Raises HostIRError with file:line:col, a caret and what was expected.
    """
    if not isinstance(text, str):
        raise error(f"not a text: {described(text)}", user_span(), expected="a string, such as path.read_text()")
    if not isinstance(file, str):
        raise error(f"not a file's name: {described(file)}", user_span(), expected="a string")
    return ir.parse(text, file)


def lower(
    fusion: HasProgram | Program,
    strategy: str = "pipeline",
    streams: int | None = None,
    watch: Watcher | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
) -> Program:
    """Lowers a fusion to a host program.

    Raises HostIRError, at the user's line, for a fusion that the strategy cannot lower.

    Args:
        fusion: a `hostir.Fusion`, or a program in the fusion phase.
        strategy: `sequential` runs each communication and computation whole, on the caller's stream; `pipeline` runs
            what can be sliced along the Stream axis in a loop over worker streams. Three take apart what gathers the
            rows of a matmul, and run the rest whole: `ring` copies from one peer after another, and multiplies each
            shard as it comes; in `fused` and `push` every rank copies its shard to others, by copy engines or by a few
            SMs, and one matmul takes each as it comes. `auto` is the fastest of all, as `compile` chooses.
        streams: the most worker streams to use, 4 unless said; `auto` chooses it too.
        watch: called after each pass with its name and the program it returned.
        sizes: values of the fusion's symbols; `auto` chooses for them.
    """
    from hostir.lower.strategies import AUTO, STREAMS, check_strategy, fusion_of
    from hostir.lower.strategies import lower as lower_by

    check_strategy(strategy)
    watcher: object = watch
    if watcher is not None and not callable(watcher):
        expected = "a function of a pass's name and the program it returned"
        raise error(f"watch={described(watch)}", user_span(), expected=expected)
    if strategy != AUTO:
        fusion = fusion_of(fusion)
        fusion.check_whole(fusion.given_sizes(sizes))
        return lower_by(fusion, strategy, STREAMS if streams is None else streams, watch)
    from hostir.choice import lower_auto

    return lower_auto(fusion, streams, watch, sizes)


def check(
    program: Fusion | Program,
    ranks: int | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    calls: int | None = None,
) -> list[Diagnostic]:
    """Every finding about a fusion or a program, in program order, warnings last; empty for a sound one.

    A host program is looked at for races, deadlocks and misuse of memory as well (docs/memory-model.md): one without
    findings gives the same result in every order that its streams and ranks may take.

    Args:
        program: what to check.
        ranks: how many the caller reckons with; a finding where the program's meshes name others.
        sizes: of symbols, to unroll loops with; those left out get small values that fit.
        calls: how many calls follow each other; unless given, as many as show what any number would.

    Whatever is wrong with the program is a finding, also where a program built in Python holds what none can hold.
    Raises HostIRError for arguments that are none: no program, sizes or calls that are no numbers.
    """
    from hostir.check import check as check_program
    from hostir.check.structure import check_structure
    from hostir.dsl import Fusion

    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int)):
        raise error(f"ranks={described(ranks)}", user_span(), expected="an integer")
    if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or calls < 1):
        raise error(f"calls={described(calls)}", user_span(), expected="an integer of at least 1")
    try:
        built = program.program() if isinstance(program, Fusion) else program
    except HostIRError as unfinished:
        return list(unfinished.diagnostics)
    if not isinstance(built, Program):
        raise error(f"not a program: {described(program)}", user_span(), expected="a hostir.Fusion or a hostir.Program")
    if structure := check_structure(built):
        return structure
    if ranks is not None and ranks != built.ranks:
        message = f"@{built.name} is for {built.ranks} ranks, not {described(ranks)}"
        return [Diagnostic(message, expected=f"{built.ranks} ranks")]
    return check_program(built, sizes=built.given_sizes(sizes), calls=calls)


def run(
    fusion: Fusion | Program,
    *inputs: torch.Tensor,
    strategy: str = "pipeline",
    streams: int | None = None,
    sizes: Mapping[str, int] | None = None,
    kernels: str | None = None,
    seed: int = 0,
    machine: str | None = None,
    trace: Trace | None = None,
    check: bool = True,
    timeout: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Lowers a fusion (a host program runs as it is) and runs it once, on whole tensors, to whole tensors.

    Outside torchrun the ranks are simulated. Under torchrun every rank gives the same inputs and gets the same outputs;
    to run more than once, on parts, make an `Executor`. Returns one whole tensor for each output, in order. Raises
    HostIRError for what cannot be lowered, is not proved right, or does not fit the inputs.

    Args:
        fusion: what to run.
        inputs: one whole tensor an input, in order.
        strategy: as for `lower`.
        streams: as for `lower`.
        sizes, kernels, seed, machine, trace, check, timeout: as for `Executor`. The strategy `auto` chooses for these
            sizes and for the shapes of the inputs, among kernels as well unless they are given.
    """
    from hostir.choice import chosen_for
    from hostir.lower.strategies import AUTO, check_strategy
    from hostir.runtime.executor import run as run_program

    check_strategy(strategy)
    if isinstance(fusion, Program) and fusion.phase is Phase.HOST:
        program = fusion
    elif strategy == AUTO:
        program, kernels = chosen_for(fusion, inputs, streams, sizes, kernels, machine)
    else:
        program = lower(fusion, strategy, streams)
    return run_program(
        program,
        *inputs,
        sizes=sizes,
        kernels=kernels,
        seed=seed,
        machine=machine,
        trace=trace,
        check=check,
        timeout=timeout,
    )


__all__ = [
    "Choice",
    "DeviceMesh",
    "Diagnostic",
    "Executor",
    "FallbackWarning",
    "Fusion",
    "HostIRError",
    "ParallelType",
    "Program",
    "Session",
    "Tensor",
    "Trace",
    "add",
    "cast",
    "check",
    "compile",
    "gelu",
    "knobs",
    "linear",
    "lower",
    "matmul",
    "mul",
    "parse",
    "permute",
    "relu",
    "reshape",
    "reshard",
    "run",
    "session",
    "silu",
    "sum",
    "tensor",
]
_LATER |= dict.fromkeys(set(__all__) - globals().keys() - _LATER.keys(), "hostir.dsl")
