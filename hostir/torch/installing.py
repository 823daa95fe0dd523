"""Take over torch's operators by name, and two functions behind them, and give all back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives  # registers what the fallbacks call
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.distributed_c10d import _get_group_size_by_name

from hostir.ir.source import error, user_span
from hostir.lower import AUTO
from hostir.torch import implementations, library, operators, scaled
from hostir.torch.operators import SETTINGS, operator
from hostir.torch.programs import LEDGER, Report, check_taken
from hostir.torch.recording import needs_no_dispatcher, register_gradients

FUSED_GATHER, FUSED_SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
GATHER, SCATTER = "_low_contention_all_gather", "_low_contention_reduce_scatter"


# Kernels --------------------------------------------------------------------------------------------------------------
# With the arguments of torch's schemas. `torchs` are torch's own functions for a key.


def _fused_all_gather_matmul(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        library.check_gather(A, Bs, gather_dim)
        fallback = lambda: torchs(A, Bs, gather_dim, group_name, return_A=return_A)  # noqa: E731
        op = operator(f"symm_mem::{FUSED_GATHER}", group_name, fallback)
        return op.run(lambda: operators.all_gather_matmul(op, A, Bs, gather_dim, return_A))

    return kernel


def _fused_matmul_reduce_scatter(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
        library.check_scatter(A, B, reduce_op, scatter_dim)
        op = operator(
            f"symm_mem::{FUSED_SCATTER}", group_name, lambda: torchs(A, B, reduce_op, scatter_dim, group_name)
        )
        return op.run(lambda: operators.matmul_reduce_scatter(op, A, B, reduce_op == "avg", scatter_dim))

    return kernel


NUMBERED = {23: torch.float8_e5m2, 24: torch.float8_e4m3fn}  # which torch's own function leaves out


def _dtype_numbered(given: Any) -> torch.dtype | None:
    """Return a dtype of a list, in which the dispatcher gives them as numbers."""
    if given in NUMBERED:
        return NUMBERED[given]
    found: list[torch.dtype | None] = symm_mem._maybe_convert_scalar_types_to_dtypes([given])
    return found[0]


def _fused_all_gather_scaled_matmul(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        A: Tensor,
        Bs: list[Tensor],
        A_scale: Tensor,
        B_scales: list[Tensor],
        gather_dim: int,
        group_name: str,
        biases: list[Tensor | None],
        result_scales: list[Tensor | None],
        out_dtypes: list[torch.dtype | None],
        use_fast_accum: list[bool],
    ) -> tuple[Tensor, list[Tensor]]:
        library.check_gather(A, Bs, gather_dim)
        dtypes = [_dtype_numbered(given) for given in out_dtypes]
        rest = biases, result_scales, dtypes, use_fast_accum
        names = "B_scales", "biases", "result_scales", "out_dtypes", "use_fast_accum"
        scaled.check_lists(Bs, dict(zip(names, (B_scales, *rest), strict=True)))
        fallback = lambda: torchs(A, Bs, A_scale, B_scales, gather_dim, group_name, *rest)  # noqa: E731
        op = operator(f"symm_mem::{SCALED_GATHER}", group_name, fallback)
        compute = lambda: scaled.all_gather_scaled_matmul(op, A, Bs, A_scale, B_scales, gather_dim, *rest)[::2]  # noqa: E731
        return op.run(compute)

    return kernel


class ScaledScatter(NamedTuple):
    """The arguments of torch's `fused_scaled_matmul_reduce_scatter`, as in its schema.

    `output_shape` is that of the product, whose axis `orig_scatter_dim` is scattered; None: the rows of A, the columns
    of B.
    """

    A: Tensor
    B: Tensor
    A_scale: Tensor
    B_scale: Tensor
    reduce_op: str
    orig_scatter_dim: int
    scatter_dim_after_maybe_reshape: int
    group_name: str
    output_shape: list[int] | None
    bias: Tensor | None = None
    result_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False


def _fused_scaled_matmul_reduce_scatter(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Tensor:
        given = ScaledScatter(*arguments)
        library.check_scatter(given.A, given.B, given.reduce_op, given.scatter_dim_after_maybe_reshape)
        shape = given.output_shape or [*given.A.shape[:-1], given.B.shape[1]]
        if not 0 <= given.orig_scatter_dim < len(shape):
            raise ValueError("Invalid scatter dim for 3D+ output tensor")
        fallback = lambda: torchs(*given._replace(output_shape=[*shape]))  # noqa: E731
        op = operator(f"symm_mem::{SCALED_SCATTER}", given.group_name, fallback)
        return op.run(
            lambda: scaled.scaled_matmul_reduce_scatter(
                *(op, *given[:4]),
                average=given.reduce_op == "avg",
                axis=given.orig_scatter_dim,
                output_shape=shape,
                bias=given.bias,
                out_dtype=given.out_dtype,
                fast=given.use_fast_accum,
            )
        )

    return kernel


def _low_contention_all_gather(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(tensor: Tensor, group_name: str) -> Tensor:
        op = operator(f"symm_mem::{GATHER}", group_name, lambda: torchs(tensor, group_name))
        return op.run(lambda: _overlapped(tensor, lambda: operators.all_gather(op, tensor, 0)))

    return kernel


def _low_contention_reduce_scatter(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
        if reduce_op not in ("sum", "avg"):
            raise ValueError(f"reduce_op ({reduce_op}) is not supported")
        op = operator(f"symm_mem::{SCATTER}", group_name, lambda: torchs(tensor, reduce_op, group_name))
        return op.run(lambda: _overlapped(tensor, lambda: operators.reduce_scatter(op, tensor, reduce_op == "avg", 0)))

    return kernel


def _overlapped(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Compute on CUDA beside what the caller issues next, until `wait_tensor` of the result; elsewhere at once."""
    if x.device.type != "cuda":
        return compute()
    stream, current = symm_mem._get_backend_stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = compute()
        torch._C._distributed_c10d._register_work(result, symm_mem.Work())
    x.record_stream(stream)
    result.record_stream(current)
    return result


# Torch's own functions ------------------------------------------------------------------------------------------------
# On CUDA its kernels; on CPU, where it has none, the plain collectives that its tracer takes the operators for.


def _plain_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    ranks = _get_group_size_by_name(group_name)  # type: ignore[arg-type]
    return torch.ops._c10d_functional.all_gather_into_tensor(tensor.contiguous(), ranks, group_name)


def _plain_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    ranks = _get_group_size_by_name(group_name)  # type: ignore[arg-type]
    return torch.ops._c10d_functional.reduce_scatter_tensor(tensor.contiguous(), reduce_op, ranks, group_name)


TORCHS: dict[str, dict[str, Callable[..., Any]]] = {
    "CUDA": {
        FUSED_GATHER: symm_mem._fused_all_gather_matmul,
        FUSED_SCATTER: symm_mem._fused_matmul_reduce_scatter,
        SCALED_GATHER: symm_mem._fused_all_gather_scaled_matmul,
        SCALED_SCATTER: symm_mem._fused_scaled_matmul_reduce_scatter,
        GATHER: symm_mem._low_contention_all_gather,
        SCATTER: symm_mem._low_contention_reduce_scatter,
    },
    "CPU": {
        FUSED_GATHER: symm_mem._fused_all_gather_matmul_fallback,
        FUSED_SCATTER: symm_mem._fused_matmul_reduce_scatter_fallback,
        SCALED_GATHER: symm_mem._fused_all_gather_scaled_matmul_fallback,
        SCALED_SCATTER: symm_mem._fused_scaled_matmul_reduce_scatter_fallback,
        GATHER: _plain_all_gather,
        SCATTER: _plain_reduce_scatter,
    },
}
KERNELS = {
    FUSED_GATHER: _fused_all_gather_matmul,
    FUSED_SCATTER: _fused_matmul_reduce_scatter,
    SCALED_GATHER: _fused_all_gather_scaled_matmul,
    SCALED_SCATTER: _fused_scaled_matmul_reduce_scatter,
    GATHER: _low_contention_all_gather,
    SCATTER: _low_contention_reduce_scatter,
}


# Installation ---------------------------------------------------------------------------------------------------------


class Installation:
    """The take-over of torch's operators; as a context manager it uninstalls at the end of its block.

    Fields:
        operators: the names of torch's operators that hostir has taken over.
        functions: the names of torch's Python functions that it has taken over.
    """

    def __init__(self) -> None:
        self.operators = tuple(f"symm_mem::{name}" for name in KERNELS)
        self.functions = implementations.taken()

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        uninstall()

    def __repr__(self) -> str:
        if _library is None:
            return "torch's own functions run its operators: hostir has given them back"
        strict = ", strict" if SETTINGS.strict else ""
        return f"hostir runs {', '.join((*self.operators, *self.functions))} (strategy '{SETTINGS.strategy}'{strict})"


_library: Any = None  # the registrations, which torch drops with it


def install(*, strict: bool = False, strategy: str = AUTO) -> Installation:
    """Take over six operators of `torch.ops.symm_mem`, for tensors on CUDA and on CPU; torch has none for a CPU.

    These are `fused_all_gather_matmul`, `fused_matmul_reduce_scatter`, `fused_all_gather_scaled_matmul`,
    `fused_scaled_matmul_reduce_scatter`, `_low_contention_all_gather` and `_low_contention_reduce_scatter`: whoever
    calls them by name calls hostir, also from compiled graphs. All but the scaled ones get gradients, too. What hostir
    cannot do goes to torch's own function, with a `hi.FallbackWarning` that says why, once. `uninstall()` gives them
    back, as does the end of `with install():`. A second call changes the settings.

    hostir also takes over two Python functions of `torch.distributed._symmetric_memory`, which vLLM calls with
    FlashInfer's matmul: `_fused_all_gather_matmul_impl` and `_fused_scaled_matmul_reduce_scatter_impl`. If a version
    of torch has other parameters for one of them, a warning says so, and that function stays torch's.

    Args:
        strict: raise HostIRError instead of leaving anything to torch.
        strategy: `auto`, or one of those of `hi.lower`; also for the functions of this package.
    """
    global _library
    if not isinstance(strict, bool):
        raise error(f"strict={strict!r}", user_span(), expected="True or False")
    strategy, functions = check_taken(strategy), implementations.check_signatures(strict)
    SETTINGS.strategy, SETTINGS.strict = strategy, strict
    if _library is not None:
        return Installation()
    _library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():  # torch warns of the first kernel in a process that replaces one
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        made = {name: {key.lower(): kernel(TORCHS[key][name]) for key in TORCHS} for name, kernel in KERNELS.items()}
        for name, kernels in made.items():
            for device, kernel in kernels.items():
                _library.impl(name, kernel, device.upper(), allow_override=True)
    scatter, gather = (_in_backward(name, made[name]) for name in (FUSED_SCATTER, FUSED_GATHER))
    formulas = {
        FUSED_GATHER: library.gathering(f"symm_mem::{FUSED_GATHER}", scatter),
        FUSED_SCATTER: library.scattering(
            f"symm_mem::{FUSED_SCATTER}", lambda *args, return_a: gather(*args, return_A=return_a)
        ),
        GATHER: library.collective(f"symm_mem::{GATHER}", "reduce_scatter"),
        SCATTER: library.collective(f"symm_mem::{SCATTER}", "all_gather"),
    }
    for name, formula in formulas.items():
        register_gradients(f"symm_mem::{name}", formula, _library, made[name])
    implementations.take_over(functions)
    return Installation()


def _in_backward(name: str, kernels: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return what calls an operator where autograd records nothing: where that is all, its kernel at once."""
    operator_of_torch = getattr(torch.ops.symm_mem, name)

    def call(x: Tensor, others: Tensor | list[Tensor], *args: Any, **options: Any) -> Any:
        kernel = kernels.get(x.device.type)
        if kernel is None or not needs_no_dispatcher([x, *others] if isinstance(others, list) else (x, others)):
            return operator_of_torch(x, others, *args, **options)
        with torch._C._AutoDispatchBelowAutograd():
            return kernel(x, others, *args, **options)

    return call


def uninstall() -> None:
    """Give torch its operators back; nothing happens if they were not taken over."""
    global _library
    if _library is not None:
        _library._destroy()
    _library = None
    implementations.give_back()
    SETTINGS.strategy, SETTINGS.strict = AUTO, False


def report(*, clear: bool = False) -> Report:
    """Return what operators ran on this rank, how often, by which strategy, and why; what is left to torch, too.

    A tuple with a row for each operator, group and strategy (fields `operator`, `group`, `strategy`, `calls`, `why`);
    `print` shows it as text. Its `symmetric_bytes` are what each group holds, by name. `clear` begins anew.
    """
    found = LEDGER.report()
    if clear:
        LEDGER.clear()
    return found
