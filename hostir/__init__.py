"""A compiler from sharded tensor programs to host programs.

A host program is a schedule of streams, collectives and matmuls. It is a text that can be read, changed, checked and
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hostir import ir, knobs
from hostir.ir import Diagnostic, HostIRError, Phase, Program
from hostir.ir.source import described, did_you_mean, error, user_span

if TYPE_CHECKING:
    import torch

    from hostir.call.executor import Executor
    from hostir.call.started import Started
    from hostir.choice import Choice, FallbackWarning, Ranges, compile
    from hostir.choice.timeline import PredictedTimeline, timeline
    from hostir.dsl import (
        DeviceMesh,
        Fusion,
        ParallelType,
        Tensor,
        add,
        cast,
        combine_rows,
        gelu,
        grouped_matmul,
        grouped_outer,
        linear,
        matmul,
        mul,
        permute,
        permute_rows,
        quantize,
        relu,
        reshape,
        reshard,
        rms_norm,
        scaled_matmul,
        silu,
        sum,
        tensor,
    )
    from hostir.job.session import Session, session
    from hostir.lower import HasProgram
    from hostir.lower.strategies import Watcher
    from hostir.machines.trace import Trace

# The module of each name that is loaded at its first use. Some of these modules load torch.
_LAZY = {
    "dsl": "hostir.dsl",
    **dict.fromkeys(("Choice", "FallbackWarning", "Ranges", "compile"), "hostir.choice"),
    "Executor": "hostir.call.executor",
    **dict.fromkeys(("Session", "session"), "hostir.job.session"),
    "Started": "hostir.call.started",
    "Trace": "hostir.machines.trace",
    **dict.fromkeys(("PredictedTimeline", "timeline"), "hostir.choice.timeline"),
}
# Import the packages before the functions below hide their names.
import_module("hostir.lower")
import_module("hostir.check")
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(_unknown(name), name=name, obj=None)  # with `obj`, Python would add another suggestion
    module = import_module(_LAZY[name])
    globals()[name] = module if name == "dsl" else getattr(module, name)
    return globals()[name]


def _unknown(name: str) -> str:
    """Return the error message for a name that hostir does not have.

    The message lists the public names, unless the unknown name is private: tools often look up private names.
    """
    message = f"module 'hostir' has no attribute '{name}'"
    if name.startswith("_"):
        return message
    if find_spec(f"hostir.{name}") is not None:
        return f"{message}; write 'import hostir.{name}' first"
    hint = did_you_mean(name, __all__)
    return f"{message}; {f'{hint} ' if hint else ''}it has {', '.join(__all__)}"


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def parse(text: str, file: str = "<text>") -> Program:
    """Parse the text that `print(program)` writes, and return the program.

    Raises HostIRError with file:line:col, a caret and what was expected. The message names `file`.
    """
    if not isinstance(text, str):
        raise error(f"not a text: {described(text)}", user_span(), expected="a string, such as path.read_text()")
    if not isinstance(file, str):
        raise error(f"not a file name: {described(file)}", user_span(), expected="a string")
    return ir.parse(text, file)


def lower(
    fusion: HasProgram | Program,
    strategy: str = "pipeline",
    streams: int | None = None,
    watch: Watcher | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
) -> Program:
    """Lower a fusion to a host program.

    Raises HostIRError, at the user's line, for a fusion that the strategy cannot lower.

    Args:
        fusion: a `hostir.Fusion`, or a program in the fusion phase.
        strategy: `sequential` runs each communication and computation unsliced, on the caller's stream. `pipeline`
            slices statements along the Stream axis and runs the slices in a loop over worker streams. `ring`, `fused`
            and `push` replace an all-gather, reduce-scatter or all-reduce of a matmul's rows by copies, and cut the
            rows into blocks. In an all-gather with `ring`, a rank copies from one peer after another, and multiplies
            each shard. With `fused` and `push`, every rank copies its shard to all other ranks, and one matmul computes
            each shard when the shard has arrived. In `fused`, copy engines copy. In `push`, a few SMs copy. With
            `chain`, the matmul of a rank adds to the rows of a reduce-scatter that the rank before it has computed.
            `hierarchical` is for ranks on several hosts, which the mesh must state. Collectives move slices of rows
            between hosts, and copies move them inside each host, while matmuls compute on complete slices.
            `sequential by low_latency`, `sequential by one_shot`, `sequential by two_shot` and `sequential by
            copy_engine` are `sequential` with collectives by symmetric memory instead of NCCL. `auto` takes the fastest
            strategy, as `compile` does.
        streams: the maximum number of worker streams; 4 by default. Leave it out with `auto`, which chooses it.
        watch: called after each pass with the name of the pass and the program that it returned.
        sizes: values of the fusion's symbols, for which `auto` chooses.
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
    """Return all findings about a fusion or a program: first errors, then warnings, both in program order.

    The list is empty for a correct program.

    A host program is also checked for races, deadlocks and misuse of memory (docs/memory-model.md). A host program
    without findings gives the same result in every order in which its streams and ranks may run.

    Args:
        program: the program to check.
        ranks: the expected number of ranks. If the program has another number of ranks, this is a finding.
        sizes: values of symbols. Symbols that are left out get small values that fit.
        calls: the number of consecutive calls to check, up to 32. The default is large enough to represent any number
            of calls.

    Every error in the program is a finding, even if the program was built in Python. Raises HostIRError only for wrong
    arguments, such as an object that is not a program, or sizes or calls that are not integers.
    """
    from hostir.check import check as check_program
    from hostir.check import check_calls
    from hostir.check.structure import check_structure
    from hostir.dsl import Fusion

    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int)):
        raise error(f"ranks={described(ranks)}", user_span(), expected="an integer")
    check_calls(calls, f"calls={described(calls)}")
    try:
        checked = program.program() if isinstance(program, Fusion) else program
    except HostIRError as unfinished:
        return list(unfinished.diagnostics)
    if not isinstance(checked, Program):
        raise error(f"not a program: {described(program)}", user_span(), expected="a hostir.Fusion or a hostir.Program")
    if structure := check_structure(checked):
        return structure
    if ranks is not None and ranks != checked.ranks:
        message = f"@{checked.name} is for {checked.ranks} ranks, not {described(ranks)}"
        return [Diagnostic(message, expected=f"{checked.ranks} ranks")]
    return check_program(checked, sizes=checked.given_sizes(sizes), calls=calls)


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
    """Lower a fusion and run it once on unsharded tensors. A host program runs without being lowered.

    Outside torchrun the ranks are simulated. Under torchrun every rank passes the same inputs and gets the same
    outputs. Make an `Executor` to run a program more than once, or on parts of tensors. Returns one unsharded tensor
    for each output, in order. Raises HostIRError for a fusion that cannot be lowered, a program that cannot be proved
    correct, and inputs that do not fit.

    Args:
        fusion: the fusion or host program to run.
        inputs: one unsharded tensor for each input, in order.
        strategy, streams: as for `lower`.
        sizes, kernels, seed, machine, trace, check, timeout: as for `Executor`. The strategy `auto` chooses for these
            sizes and the shapes of the inputs. It chooses the kernels as well, unless `kernels` names them.
    """
    from hostir.call.executor import run as run_program
    from hostir.choice import chosen_for
    from hostir.lower.strategies import AUTO, check_strategy

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
    "PredictedTimeline",
    "Program",
    "Ranges",
    "Session",
    "Started",
    "Tensor",
    "Trace",
    "add",
    "cast",
    "check",
    "combine_rows",
    "compile",
    "gelu",
    "grouped_matmul",
    "grouped_outer",
    "knobs",
    "linear",
    "lower",
    "matmul",
    "mul",
    "parse",
    "permute",
    "permute_rows",
    "quantize",
    "relu",
    "reshape",
    "reshard",
    "rms_norm",
    "run",
    "scaled_matmul",
    "session",
    "silu",
    "sum",
    "tensor",
    "timeline",
]
_LAZY |= dict.fromkeys(set(__all__) - globals().keys() - _LAZY.keys(), "hostir.dsl")
