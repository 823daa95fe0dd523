"""Install hostir as the implementation of torch's fused operators, and uninstall it."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch

from hostir.ir.source import error, user_span
from hostir.knobs import TUNE
from hostir.lower import AUTO
from hostir.lower.strategies import check_strategy
from hostir.machines.cuda import torchs
from hostir.torch import implementations
from hostir.torch.ops.all_gather_matmul import fused_all_gather_matmul
from hostir.torch.ops.all_gather_scaled_matmul import fused_all_gather_scaled_matmul
from hostir.torch.ops.collectives import (
    low_contention_all_gather,
    low_contention_reduce_scatter,
    one_shot_all_reduce,
    two_shot_all_reduce,
)
from hostir.torch.ops.matmul_reduce_scatter import fused_matmul_reduce_scatter
from hostir.torch.ops.running import SETTINGS
from hostir.torch.ops.scaled_matmul_reduce_scatter import fused_scaled_matmul_reduce_scatter

TAKEN_OVER = (
    fused_all_gather_matmul,
    fused_matmul_reduce_scatter,
    fused_all_gather_scaled_matmul,
    fused_scaled_matmul_reduce_scatter,
    low_contention_all_gather,
    low_contention_reduce_scatter,
    one_shot_all_reduce,
    two_shot_all_reduce,
)


class Installation:
    """The result of `install`. As a context manager, it calls `uninstall` at the end of the `with` block.

    Fields:
        operators: the names of torch's operators that hostir has taken over.
        functions: the names of torch's Python functions that hostir has taken over.
    """

    def __init__(self) -> None:
        self.operators = tuple(operator.name for operator in TAKEN_OVER)
        self.functions = implementations.taken()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        uninstall()

    def __repr__(self) -> str:
        if not _installed():
            return "torch's own functions run its operators: hostir has given them back"
        strict = f"{', strict' if SETTINGS.strict else ''}{', for CUDA graphs' if SETTINGS.graphs else ''}"
        return f"hostir runs {', '.join((*self.operators, *self.functions))} (strategy '{SETTINGS.strategy}'{strict})"


@cache
def _registrations() -> Any:
    """Register hostir's kernels for torch's operators, and return the library that holds the registrations.

    The registrations end when the library is destroyed.
    """
    library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():  # torch warns when a kernel is replaced for the first time in a process
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for operator in TAKEN_OVER:
            operator.register(library)
    return library


def _installed() -> bool:
    return _registrations.cache_info().currsize > 0


def install(
    *, strict: bool = False, strategy: str = AUTO, tune: float | None = None, graphs: bool = False
) -> Installation:
    """Make hostir run eight operators of `torch.ops.symm_mem`, on CUDA and on CPU. Torch has no kernels for the CPU.

    The operators are `fused_all_gather_matmul`, `fused_matmul_reduce_scatter`, `fused_all_gather_scaled_matmul`,
    `fused_scaled_matmul_reduce_scatter`, `_low_contention_all_gather`, `_low_contention_reduce_scatter`,
    `one_shot_all_reduce` and `two_shot_all_reduce_`. hostir runs every call of `torch.ops.symm_mem.NAME`, in eager code
    and in compiled graphs, with two exceptions: with the strategy `auto`, torch runs the all-reduces that its kernel is
    expected to compute faster, and torch.compile cannot trace `two_shot_all_reduce_`. The first six operators also get
    gradients, unless they have scales. If hostir cannot run a call, torch's function runs it, and a
    `hi.FallbackWarning` gives each reason once. `uninstall()`, or the end of `with install():`, gives the operators
    back to torch. Another call of `install` changes the settings.

    hostir also replaces two Python functions of `torch.distributed._symmetric_memory`, which vLLM calls with
    FlashInfer's matmul: `_fused_all_gather_matmul_impl` and `_fused_scaled_matmul_reduce_scatter_impl`. If one of these
    functions has other parameters in the installed torch, hostir does not replace the function, and warns. With
    `strict`, `install` raises HostIRError instead.

    Args:
        strict: True to raise HostIRError for calls that hostir cannot run. Otherwise torch runs them.
        strategy: `auto`, or a strategy of `hi.lower`. It also applies to the functions and layers of `hostir.torch`.
        tune: the seconds that trials of candidates may add to the calls of each range of sizes, as for `hi.compile`. It
            applies to fusions that are compiled later.
        graphs: True if you capture the calls in CUDA graphs, also by `torch.compile(mode="reduce-overhead")`. Then
            candidates are compared by the times of replays, as with `hi.compile(calls="graph")`. Plain calls then run
            the same candidates.
    """
    for name, value in (("strict", strict), ("graphs", graphs)):
        if not isinstance(value, bool):
            raise error(f"{name}={value!r}", user_span(), expected="True or False")
    check_strategy(strategy)
    TUNE.get(tune)  # checks it
    functions = implementations.check_signatures(strict)
    SETTINGS.change(strategy, strict, tune, graphs)
    if not _installed():
        _registrations()
        implementations.take_over(functions)
    return Installation()


def uninstall() -> None:
    """Give the operators and functions back to torch, and reset the settings. Does nothing if nothing is installed."""
    if _installed():
        _registrations()._destroy()
        torchs.drop()
    _registrations.cache_clear()
    implementations.give_back()
    SETTINGS.change(AUTO, strict=False, tune=None, graphs=False)
