"""All-gather, reduce-scatter and all-reduce without a matmul."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators that the CPU fallbacks call
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed.distributed_c10d import _get_group_size_by_name

from hostir.choice.collectives import is_sooner
from hostir.ir.comm_ops import ONE_SHOT, TWO_SHOT, UNIT
from hostir.ir.program import Program
from hostir.lower import AUTO
from hostir.machines.cuda import torchs
from hostir.torch.ops.fusions import extra_sizes, fusion, in_front, type_of
from hostir.torch.ops.gradients import refuse_twice
from hostir.torch.ops.layouts import check_shape, collapsed, empty_rows, into, unaliased
from hostir.torch.ops.library import GATHERED, SCATTERED, SUMMED, Operator, TakenOver, check_out, define, takes_over
from hostir.torch.ops.running import (
    SETTINGS,
    THREAD,
    OperatorCall,
    Unfit,
    do_not_remember,
    dtype_of,
    leave_to_torch,
    run_by_torch,
)

BY_LOW_LATENCY = (torch.float32, torch.bfloat16, torch.float16)


@define("all_gather(Tensor x, int gather_dim, str group_name) -> Tensor", GATHERED)
def all_gather(x: Tensor, gather_dim: int, group_name: str) -> Tensor:
    """All-gather `x` along `gather_dim`. This axis is the outermost axis in the memory of the result."""
    return gathered(OperatorCall("hostir::all_gather", group_name), x, gather_dim)


@define("reduce_scatter(Tensor x, str reduce_op, int scatter_dim, str group_name) -> Tensor", SCATTERED)
def reduce_scatter(x: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """Sum or average `x` over all ranks, and return this rank's part along `scatter_dim`.

    `scatter_dim` is the outermost axis in the memory of the result.
    """
    return scattered(OperatorCall("hostir::reduce_scatter", group_name), x, reduce_op, scatter_dim)


@define("all_reduce(Tensor x, str group_name) -> Tensor", SUMMED)
def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """All-reduce: return the sum of `x` over all ranks, which is contiguous."""
    return reduced(OperatorCall("hostir::all_reduce", group_name), x)


@define("all_reduce_out(Tensor x, str group_name, *, Tensor(a!) out) -> ()", SUMMED)
def all_reduce_out(x: Tensor, group_name: str, *, out: Tensor) -> None:
    """All-reduce: write the sum of `x` over all ranks to `out`."""
    check_out("hostir::all_reduce_out", x, out)
    into(out, lambda y: reduced(OperatorCall("hostir::all_reduce_out", group_name), x, y))


def gathered(call: OperatorCall, x: Tensor, axis: int) -> Tensor:
    """All-gather `x` along `axis`. This axis is the outermost axis in the memory of the result."""
    ranks = call.group.size
    if THREAD.tracing:
        return empty_rows(x, [n * ranks if k == axis else n for k, n in enumerate(x.shape)], axis)
    key, operand = _moved(x, axis)
    (y,) = call.execute(gather_fusion, key, [operand])
    return _unmoved(y, x, axis, x.shape[axis] * ranks, ranks)


def start_gathered(call: OperatorCall, x: Tensor, axis: int) -> Callable[[], Tensor]:
    """Start an all-gather of `x` along `axis`; return a function that waits for the all-gather and returns the result.

    The all-gather overlaps everything that the caller computes before it calls this function.
    """
    if THREAD.tracing:
        return lambda: gathered(call, x, axis)
    (key, operand), ranks = _moved(x, axis), call.group.size
    started = call.start(gather_fusion, key, [operand])
    return lambda: _unmoved(started.wait()[0], x, axis, x.shape[axis] * ranks, ranks)


def scattered(call: OperatorCall, x: Tensor, reduce_op: str, axis: int) -> Tensor:
    """Sum or average `x` over all ranks, and return this rank's part along `axis`.

    `axis` is the outermost axis in the memory of the result.
    """
    ranks, average = call.group.size, is_average(reduce_op)
    if THREAD.tracing:
        return empty_rows(x, [n // ranks if k == axis else n for k, n in enumerate(x.shape)], axis)
    key, operand = _to_scatter(x, average, axis, ranks)
    (y,) = call.execute(scatter_fusion, key, [operand])
    y = _unmoved(y, x, axis, x.shape[axis] // ranks, ranks)
    return mean(y, ranks, x.dtype) if average else y


def start_scattered(call: OperatorCall, x: Tensor, axis: int) -> Callable[[], Tensor]:
    """Start a reduce-scatter of `x` along `axis`; return a function that waits for it and returns this rank's part.

    The reduce-scatter overlaps everything that the caller computes before it calls this function.
    """
    if THREAD.tracing:
        return lambda: scattered(call, x, "sum", axis)
    ranks = call.group.size
    key, operand = _to_scatter(x, False, axis, ranks)
    started = call.start(scatter_fusion, key, [operand])
    return lambda: _unmoved(started.wait()[0], x, axis, x.shape[axis] // ranks, ranks)


def reduced(call: OperatorCall, x: Tensor, out: Tensor | None = None) -> Tensor:
    """All-reduce: return the sum of `x` over all ranks, in `out` or in a new tensor. `out` must be contiguous."""
    if THREAD.tracing:
        return x.new_empty(x.shape)
    rows = (prod(x.shape[:-1]), x.shape[-1]) if x.ndim else (1, 1)
    (y,) = call.execute(
        reduce_fusion, (), [x.reshape(rows)], None if out is None else [check_shape(out, x.shape).view(rows)]
    )
    return unaliased(y, x, call.group.size).view(x.shape) if out is None else out


def start_reduced(call: OperatorCall, x: Tensor) -> Callable[[], Tensor]:
    """Start an all-reduce of `x`; return a function that waits for the all-reduce and returns the sum.

    The all-reduce overlaps everything that the caller computes before it calls this function.
    """
    if THREAD.tracing:
        return lambda: reduced(call, x)
    started = call.start(reduce_fusion, (), [x.reshape(prod(x.shape[:-1]), x.shape[-1])])
    return lambda: unaliased(started.wait()[0], x, call.group.size).view(x.shape)


def is_average(reduce_op: str) -> bool:
    """Return True for the reduction `avg`, False for `sum`. Raises ValueError for any other reduction."""
    if reduce_op not in ("sum", "avg"):
        raise ValueError("reduce_op must be sum or avg")
    return reduce_op == "avg"


def dtype_of_sum(x: Tensor, average: bool) -> str:
    """Return the name of the dtype of the sum over ranks. Raises Unfit if hostir does not compute with this dtype.

    It is the dtype of `x`, with one exception: for an average of float16 it is f32, because the sum may overflow in
    float16.
    """
    return "f32" if average and x.dtype == torch.float16 else dtype_of([x])


def mean(total: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    """Return the mean over ranks, `total / ranks`, in `dtype`. Overwrites `total`."""
    do_not_remember()
    return total.mul_(1 / ranks).to(dtype)


def _to_scatter(x: Tensor, average: bool, axis: int, ranks: int) -> tuple[tuple[Any, ...], Tensor]:
    """Return the arguments for the parameters of `scatter_fusion` that follow `dtype`, and the operand of the fusion.

    The operand is a view of `x`.

    Raises Unfit if the number of ranks does not divide the length of `axis`.
    """
    if x.shape[axis] % ranks:
        raise Unfit(f"its {ranks} ranks do not divide axis {axis}, which is {x.shape[axis]}")
    key, operand = _moved(x, axis)
    return (*key, dtype_of_sum(x, average)), operand


def _moved(x: Tensor, axis: int) -> tuple[tuple[int, ...], Tensor]:
    """Return `(extra, outside)` for a fusion along `axis`, and the operand of the fusion, which is a view of `x`."""
    operand, outside = collapsed(x if x.ndim > 1 else x.unsqueeze(1), axis, last=0)
    return (operand.ndim - 1, outside), operand


def _unmoved(y: Tensor, x: Tensor, axis: int, length: int, ranks: int) -> Tensor:
    """Return the output `y` of a fusion, viewed with the axes of `x`. `length` is the length of `axis` in `y`."""
    others = [n for k, n in enumerate(x.shape) if k != axis]
    return unaliased(y, x, ranks).view(length, *others).movedim(0, axis)


def gather_fusion(ranks: int, dtype: str, extra: int, outside: int) -> Program:
    """Return the fusion that all-gathers `%x` along M. M is the outermost axis of the output."""
    x, body, front = in_front("%x", dtype, ("M@didx", *extra_sizes(extra)), outside)
    y = f"%y: {type_of(dtype, 'M', *extra_sizes(extra))} = reshard {front}"
    return fusion("all_gather", ranks, [x], ["%y"], [*body, y])


def scatter_fusion(ranks: int, dtype: str, extra: int, outside: int, result: str) -> Program:
    """Return the fusion that reduce-scatters `%x` along M.

    The sum has the dtype `result`. M is the outermost axis of the output.
    """
    sizes = extra_sizes(extra)
    x, body, front = in_front("%x", dtype, ("M", *sizes), outside, " partial(didx)")
    if result != dtype:
        body.append(f"%wide: {type_of(result, 'M', *sizes)} partial(didx) = cast {front} to {result}")
        front = "%wide"
    return fusion(
        "reduce_scatter", ranks, [x], ["%y"], [*body, f"%y: {type_of(result, 'M@didx', *sizes)} = reshard {front}"]
    )


def reduce_fusion(ranks: int, dtype: str) -> Program:
    """Return the fusion that all-reduces the matrix `%x`."""
    y = type_of(dtype, "M", "P")
    return fusion("all_reduce", ranks, [f"%x: {y} partial(didx)"], ["%y"], [f"%y: {y} = reshard %x"])


def _plain_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    ranks = _get_group_size_by_name(group_name)  # type: ignore[arg-type]
    return torch.ops._c10d_functional.all_gather_into_tensor(tensor.contiguous(), ranks, group_name)


def _plain_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    ranks = _get_group_size_by_name(group_name)  # type: ignore[arg-type]
    return torch.ops._c10d_functional.reduce_scatter_tensor(tensor.contiguous(), reduce_op, ranks, group_name)


@takes_over("_low_contention_all_gather", cuda=symm_mem._low_contention_all_gather, cpu=_plain_all_gather)
def low_contention_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    """All-gather along axis 0.

    On CUDA, the all-gather runs on a side stream, and the caller must call `wait_tensor` on the result.
    """
    call = OperatorCall("symm_mem::_low_contention_all_gather", group_name)
    return _overlapped(tensor, gathered, call, tensor, 0)


@takes_over("_low_contention_reduce_scatter", cuda=symm_mem._low_contention_reduce_scatter, cpu=_plain_reduce_scatter)
def low_contention_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Reduce-scatter along axis 0.

    On CUDA, the reduce-scatter runs on a side stream, and the caller must call `wait_tensor` on the result.
    """
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op ({reduce_op}) is not supported")
    call = OperatorCall("symm_mem::_low_contention_reduce_scatter", group_name)
    return _overlapped(tensor, scattered, call, tensor, reduce_op, 0)


def _overlapped(x: Tensor, compute: Callable[..., Tensor], *args: Any) -> Tensor:
    """Run `compute(*args)` on a side stream, and register the result for `wait_tensor`.

    On CPU, run it synchronously.
    """
    if x.device.type != "cuda":
        return compute(*args)
    do_not_remember()
    stream, current = symm_mem._get_backend_stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = compute(*args)
        torch._C._distributed_c10d._register_work(result, symm_mem.Work())
    x.record_stream(stream)
    result.record_stream(current)
    return result


def _plain_all_reduce(x: Tensor, reduce_op: str, group_name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), reduce_op, group_name))


class TakenOverSum(TakenOver):
    """An all-reduce of `torch.ops.symm_mem` that hostir runs where it is expected not to be slower than torch.

    Fields:
        by: the name of torch's kernel as an implementation of a collective.
        in_place: True if the operator overwrites its operand with the sum.
    """

    def __init__(self, short_name: str, by: str, in_place: bool) -> None:
        super().__init__(f"symm_mem::{short_name}", self.sum_up, {})
        self.by, self.in_place, self.own = by, in_place, torchs.own(short_name)

    def sum_up(self, x: Tensor, reduce_op: str, group_name: str) -> Tensor:
        """Return the sum of `x` over all ranks, in new memory."""
        if reduce_op != "sum":
            raise Unfit(f"its reduction is {reduce_op!r}")
        return reduced(OperatorCall(self.name, group_name), x)

    def kernel(self, *args: Any, **options: Any) -> Any:
        x, reduce_op, group_name = args
        given = x.detach()  # as with torch's kernels, no gradients pass
        result = self.run(given, reduce_op, group_name, **options)
        if not self.in_place:
            return result
        if result is not given:
            given.copy_(result)
        return x

    def run(self, x: Tensor, reduce_op: str, group_name: Any, **options: Any) -> Any:
        """Return the sum of `x`, by hostir or by torch. torch's kernel may overwrite `x`, and then returns `x`."""
        args = x, reduce_op, group_name
        if torchs.is_kept(self.short_name, x.device):
            if not _is_symmetric(x, group_name):
                return self.refuse("its input is not in symmetric memory", args, options)
            if why := self.why_torch(x, _get_group_size_by_name(group_name)):
                return run_by_torch(self.name, group_name, why, lambda: self.own(*args))
        return super().kernel(*args, **options)

    def refuse(self, why: str, args: Sequence[Any], options: Any) -> Any:
        kept = torchs.is_kept(self.short_name, args[0].device)
        run = self.own if kept else _plain_all_reduce  # torch has no kernel on CPU
        return leave_to_torch(self.name, args[2], why, lambda: run(*args))

    def why_torch(self, x: Tensor, ranks: int) -> str:
        """Return the reason why torch runs a call that hostir can run; empty if hostir runs it.

        hostir runs all calls if the caller of `install` has chosen a strategy.
        """
        size = x.numel() * x.itemsize
        if SETTINGS.strategy != AUTO or not size:
            return ""
        if size % UNIT or x.dtype not in BY_LOW_LATENCY:
            return f"hostir's kernel sums multiples of {UNIT} bytes in f32, bf16 or f16"
        return "" if is_sooner(self.by, size, ranks) else f"torch's kernel is expected to be faster on {ranks} ranks"

    def register(self, library: Any) -> None:
        torchs.keep(self.short_name)
        super().register(library)


def _is_symmetric(x: Tensor, group_name: str) -> bool:
    """Return True if a CUDA tensor lies in symmetric memory."""
    if hasattr(symm_mem, "is_symm_mem_tensor"):
        return symm_mem.is_symm_mem_tensor(x)
    return _SymmetricMemory.rendezvous(x, group_name) is not None  # torch 2.11: its kernels do the same


one_shot_all_reduce = TakenOverSum("one_shot_all_reduce", ONE_SHOT, in_place=False)
two_shot_all_reduce = TakenOverSum("two_shot_all_reduce_", TWO_SHOT, in_place=True)


def _differentiate(gather: Operator, scatter: Operator) -> None:
    """Register the gradients of an all-gather and of a reduce-scatter.

    Backward of `gather` runs `hostir::reduce_scatter`. Backward of `scatter` runs `hostir::all_gather`.
    """

    def backward_of_gather(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_twice(gather.name)
        axis, group = (0, *ctx.rest)[-2:]
        return reduce_scatter.packet(dy, "sum", axis, group), *[None] * len(ctx.rest)

    def backward_of_scatter(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        refuse_twice(scatter.name)
        reduce_op, *axis, group = ctx.rest
        dy = dy / _get_group_size_by_name(group) if reduce_op == "avg" else dy
        return all_gather.packet(dy, axis[0] if axis else 0, group), *[None] * len(ctx.rest)

    gather.differentiate(backward_of_gather, _save_arguments)
    scatter.differentiate(backward_of_scatter, _save_arguments)


def _save_arguments(ctx: Any, inputs: Any, output: Any) -> None:
    _, *ctx.rest = inputs


def _all_reduce_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return a copy of `dy`, the gradient of the result, as the gradient of `x`.

    All ranks compute the same loss, so `dy` is the same on all ranks, and no communication is needed.
    """
    refuse_twice("hostir::all_reduce")
    return dy.clone(), None


_differentiate(all_gather, reduce_scatter)
_differentiate(low_contention_all_gather, low_contention_reduce_scatter)
all_reduce.differentiate(_all_reduce_backward, _save_arguments)
