"""Compute torch's operators by executors: the layouts of their tensors, and what they leave to torch.

All that is made here is views with fewer axes. Where a layout forces a copy, the program makes it, as its text says.
Results have the strides that torch's own functions give them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hostir.ir.program import Program
from hostir.ir.source import error, user_span, warn_once
from hostir.lower.rows import SLICES
from hostir.runtime.executor import Executor
from hostir.runtime.started import Started
from hostir.torch import programs
from hostir.torch.programs import DTYPES, LEDGER, OperatorGroup, Unfit, group_named

# How they run ---------------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    """The strategy by which operators run, and whether what hostir cannot do is an error for torch's operators."""

    strategy: str = "auto"
    strict: bool = False


SETTINGS = Settings()


class _InTorch(threading.local):
    """`active` is True while this thread runs a call that hostir has left to torch, where all is torch's own."""

    active = False


IN_TORCH = _InTorch()


@dataclass(slots=True)
class Operator:
    """An operator's call: its name in the report, its group, and the function of torch's that can do the same."""

    name: str
    group: OperatorGroup
    torchs: Callable[[], Any] | None = None

    def run(self, compute: Callable[[], Any]) -> Any:
        """Return what hostir computes; where it cannot, what torch does, or raise."""
        try:
            return compute()
        except Unfit as unfit:
            why = str(unfit)
        if self.torchs is None or SETTINGS.strict:
            hint = "" if self.torchs is None else "without strict=True, hostir.torch.install leaves it to torch"
            raise error(f"hostir cannot run {self.name}: {why}", user_span(), hint=hint)
        message = f"torch's own function runs {self.name}: {why}."
        warn_once((self.name, why), message, "hostir.torch.report() counts the calls")
        LEDGER.left(self.name, self.group.name, why)
        before, IN_TORCH.active = IN_TORCH.active, True
        try:
            return self.torchs()
        finally:
            IN_TORCH.active = before

    def execute(
        self,
        build: Callable[..., Program],
        key: tuple[Any, ...],
        inputs: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
        dtype: str = "",
    ) -> tuple[Tensor, ...]:
        """Run the program of a fusion on this rank's parts, as executors do. Raises Unfit.

        `dtype` is the one that the program is built for; by default that of all inputs.
        """
        executor = self._executor(build, key, inputs, "eager" if out is None else "out", dtype)
        outputs = self._call(executor, executor, inputs, out=out)
        LEDGER.ran(self.name, self.group.name, executor)
        return outputs

    def start(self, build: Callable[..., Program], key: tuple[Any, ...], inputs: Sequence[Tensor]) -> Started:
        """Start the program of a fusion beside what the caller issues next. Raises Unfit."""
        executor = self._executor(build, key, inputs, "eager")
        started: Started = self._call(executor, executor.start, inputs)
        LEDGER.ran(self.name, self.group.name, executor, started=True)
        return started

    def _call(self, executor: Executor, call: Callable[..., Any], inputs: Sequence[Tensor], **options: Any) -> Any:
        """Make a call of the executor in the name of this operator: ranks pair calls of the same operators only."""
        executor.calls.operator = self.name
        try:
            return call(*inputs, **options)
        finally:
            executor.calls.operator = ""

    def _executor(
        self, build: Callable[..., Program], key: tuple[Any, ...], inputs: Sequence[Tensor], calls: str, dtype: str = ""
    ) -> Executor:
        kind, device = dtype or dtype_of(inputs), inputs[0].device
        return self.group.program(build, kind, *key, strategy=SETTINGS.strategy, device=device, calls=calls)


def dtype_of(tensors: Sequence[Tensor]) -> str:
    """Return the dtype of tensors in the words of a program. Raises Unfit for one that hostir lacks, or several."""
    kind = tensors[0].dtype
    for x in tensors:
        if x.dtype != kind:
            raise Unfit(f"operands of several dtypes, {', '.join(sorted({str(x.dtype) for x in tensors}))}")
    if kind not in DTYPES:
        raise Unfit(f"its dtype is {kind}, not one of {', '.join(map(str, DTYPES))}")
    return DTYPES[kind]


# Layouts --------------------------------------------------------------------------------------------------------------


def grouped(x: Tensor, axis: int, last: int = 1, joined: bool = False) -> tuple[Tensor, int]:
    """Return a view of as few axes as strides allow, and how many of them are outside the one of interest.

    Axes outside are merged, and those inside up to the `last` ones: with the axis itself if nothing is outside, or
    `joined`. With `last` 0 there are at least two axes.
    """
    end = x.ndim - last
    if prod(x.shape[:axis]) > 1:
        inner = merged(x, axis if joined else axis + 1, end)
        x = x if inner is None else inner
        outer = merged(x, 0, axis)
        return (x, axis) if outer is None else (outer, 1)
    x = x if axis == 0 else x.movedim(axis, 0)
    for first in (0, 1) if last else (1,):
        if (view := merged(x, first, end)) is not None:
            return view, 0
    return x, 0


def merged(x: Tensor, first: int, end: int) -> Tensor | None:
    """Return a view in which the axes from `first` up to `end` are one; None if strides do not allow it."""
    if end - first < 2:
        return x
    try:
        return x.view(*x.shape[:first], prod(x.shape[first:end]), *x.shape[end:])
    except RuntimeError:
        return None


def from_front(rows: Tensor, like: Tensor, axis: int, ranks: int) -> Tensor:
    """Return gathered rows as a tensor with the axes of a rank's part `like`; a view."""
    if like.ndim == 2:
        return rows
    others = [n for k, n in enumerate(like.shape[:-1]) if k != axis]
    return rows.view(like.shape[axis] * ranks, *others, rows.shape[-1]).movedim(0, axis)


def own(result: Tensor, given: Tensor, ranks: int) -> Tensor:
    """Return a result that is not a tensor of the caller's: on one rank, what is gathered is a view of the input."""
    if ranks > 1 or result.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
        return result
    return result.clone(memory_format=torch.contiguous_format)


# Operators ------------------------------------------------------------------------------------------------------------
# Each takes and gives this rank's parts. Axes are not negative, and have been checked.


def all_gather_matmul(
    op: Operator,
    a: Tensor,
    bs: Sequence[Tensor],
    axis: int,
    gathered: bool,
    out: Sequence[Tensor] | None = None,
    gated: bool = False,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather `a` along an axis of any rank, and multiply it with each of `bs`; `gated`: `silu(a @ b0) * (a @ b1)`.

    With `out`, matrices of rows for the results and then, if wanted, for the gathered tensor.
    """
    contracted, ranks = axis == a.ndim - 1, op.group.size
    if not bs:
        return all_gather(op, a, axis) if gathered else None, []
    K = a.shape[-1] * (ranks if contracted else 1)
    _check_products(bs, K, f"A has {K} columns")
    columns = tuple([b.shape[1] for b in bs])
    if gated and columns[0] != columns[1]:
        raise Unfit(f"the two matrices have {columns[0]} and {columns[1]} columns")
    x, outside = grouped(a, 0 if contracted else axis)
    rows = [x.shape[outside], *x.shape[:outside], *x.shape[outside + 1 : -1]]
    if contracted:
        cut = next((n for n in SLICES if rows[0] % n == 0), 1)
    else:
        cut = outside
        rows[0] *= ranks
    key = (K, columns, x.ndim - 2, cut, gathered, gated)
    build = programs.all_gather_columns_matmul if contracted else programs.all_gather_matmul
    given = None
    if out is not None:
        flat = prod(rows)
        widths = [*columns, *([K] if gathered else [])]
        given = [_shaped(y, [flat, n]).view(*rows, n) for y, n in zip(out, widths, strict=True)]
    *products, last = op.execute(build, key, [x, *bs], given)
    products, full = (products, own(last, a, ranks)) if gathered else ([*products, last], None)
    if contracted:
        shaped = [y.view(*a.shape[:-1], y.shape[-1]) for y in products]
        return None if full is None else full.view(*a.shape[:-1], K), shaped
    return None if full is None else from_front(full, a, axis, ranks), [from_front(y, a, axis, ranks) for y in products]


def matmul_reduce_scatter(
    op: Operator, a: Tensor, b: Tensor, average: bool, axis: int, out: Tensor | None = None
) -> Tensor:
    """Multiply, sum over all ranks, and return this rank's part along an axis; contiguous, and `out` if given."""
    last, ranks = axis == a.ndim - 1, op.group.size
    _check_products([b], a.shape[-1], f"A has {a.shape[-1]} columns")
    length = b.shape[1] if last else a.shape[axis]
    if length % ranks:
        raise Unfit(f"its {ranks} ranks do not divide axis {axis} of the product, which is {length}")
    shape = [*a.shape[:-1], b.shape[1]]
    shape[axis] //= ranks
    x, outside = grouped(a, 0 if last else axis, joined=True)
    result = dtype_of_sum(a, average)
    key: tuple[Any, ...] = (a.shape[-1] * ranks, b.shape[1], x.ndim - 2, *(() if last else (outside,)), result)
    build = programs.matmul_reduce_scatter_columns if last else programs.matmul_reduce_scatter
    mine = [*x.shape[:-1], b.shape[1]]
    mine[-1 if last else outside] //= ranks
    into = out is not None and result == dtype_of([a])  # sums in a wider dtype have memory of their own
    given = None if out is None else _shaped(out, shape).view(mine)
    (y,) = op.execute(build, key, [x, b], [given] if given is not None and into else None)
    y = mean(y, ranks, a.dtype) if average else y
    if given is None or out is None:
        return y.view(shape)
    if not into:
        given.copy_(y)
    return out


def matmul_all_reduce(
    op: Operator, a: Tensor, b: Tensor, addend: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply, sum over all ranks, and add what is given; contiguous, and `out` if given, which is contiguous."""
    _check_products([b], a.shape[-1], f"A has {a.shape[-1]} columns")
    shape = [*a.shape[:-1], b.shape[1]]
    if addend is not None and list(addend.shape) not in (shape, shape[-1:]):
        raise Unfit(f"the addend has shape {list(addend.shape)}, and the product {shape}")
    x, _ = grouped(a, 0, joined=True)
    z = addend
    if addend is not None and addend.ndim > 1 and addend.ndim > x.ndim:
        z = addend.reshape(*x.shape[:-1], b.shape[1])
    key = (a.shape[-1] * op.group.size, b.shape[1], x.ndim - 2, 0 if addend is None else 1 + (addend.ndim > 1))
    given = None if out is None else [_shaped(out, shape).view(*x.shape[:-1], b.shape[1])]
    (y,) = op.execute(programs.matmul_all_reduce, key, [x, b] if z is None else [x, b, z], given)
    return y.view(shape) if out is None else out


def all_reduce(op: Operator, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum a tensor over all ranks; contiguous, and `out` if given, which is contiguous."""
    rows = (prod(x.shape[:-1]), x.shape[-1]) if x.ndim else (1, 1)
    given = None if out is None else [_shaped(out, x.shape).view(rows)]
    (y,) = op.execute(programs.all_reduce, (), [x.reshape(rows)], given)
    if out is not None:
        return out
    return own(y, x, op.group.size).view(x.shape)


def start_all_reduce(op: Operator, x: Tensor) -> Callable[[], Tensor]:
    """Sum beside what the caller issues next; what this returns waits for the result."""
    started = op.start(programs.all_reduce, (), [x.reshape(prod(x.shape[:-1]), x.shape[-1])])
    return lambda: own(started.wait()[0], x, op.group.size).view(x.shape)


def all_gather(op: Operator, x: Tensor, axis: int) -> Tensor:
    """Gather a tensor along an axis; the result is contiguous with that axis first."""
    key, seen, whole = _to_gather(op, x, axis)
    (y,) = op.execute(programs.all_gather, key, [seen])
    return whole(y)


def start_all_gather(op: Operator, x: Tensor, axis: int) -> Callable[[], Tensor]:
    """Do so beside what the caller issues next; what this returns waits for the result."""
    key, seen, whole = _to_gather(op, x, axis)
    started = op.start(programs.all_gather, key, [seen])
    return lambda: whole(started.wait()[0])


def _to_gather(op: Operator, x: Tensor, axis: int) -> tuple[tuple[int, ...], Tensor, Callable[[Tensor], Tensor]]:
    """Return the key of the program, its operand, and what makes the whole tensor of its result."""
    return _moved(x, axis, x.shape[axis] * op.group.size, op.group.size)


def _moved(x: Tensor, axis: int, length: int, ranks: int) -> tuple[tuple[int, ...], Tensor, Callable[[Tensor], Tensor]]:
    """Return the key of a program that moves rows along an axis, its operand, and what shapes its result.

    `length`: of the axis, in the result.
    """
    others = [n for k, n in enumerate(x.shape) if k != axis]
    seen, outside = grouped(x if others else x.unsqueeze(1), axis, last=0)

    def shaped(y: Tensor) -> Tensor:
        return own(y, x, ranks).view(length, *others).movedim(0, axis)

    return (seen.ndim - 1, outside), seen, shaped


def reduce_scatter(op: Operator, x: Tensor, average: bool, axis: int) -> Tensor:
    """Sum a tensor over all ranks; return this rank's part along an axis, contiguous with that axis first."""
    key, seen, part = _to_scatter(op, x, average, axis)
    (y,) = op.execute(programs.reduce_scatter, key, [seen])
    return mean(part(y), op.group.size, x.dtype) if average else part(y)


def start_reduce_scatter(op: Operator, x: Tensor, axis: int) -> Callable[[], Tensor]:
    """Sum beside what the caller issues next; what this returns waits for the result."""
    key, seen, part = _to_scatter(op, x, False, axis)
    started = op.start(programs.reduce_scatter, key, [seen])
    return lambda: part(started.wait()[0])


def _to_scatter(
    op: Operator, x: Tensor, average: bool, axis: int
) -> tuple[tuple[Any, ...], Tensor, Callable[[Tensor], Tensor]]:
    """Return the key of the program, its operand, and what makes this rank's part of its result. Raises Unfit."""
    ranks = op.group.size
    if x.shape[axis] % ranks:
        raise Unfit(f"its {ranks} ranks do not divide axis {axis}, which is {x.shape[axis]}")
    key, seen, part = _moved(x, axis, x.shape[axis] // ranks, ranks)
    return (*key, dtype_of_sum(x, average)), seen, part


def dtype_of_sum(x: Tensor, average: bool) -> str:
    """Return the dtype in which partial sums of the dtype of `x` are added up over ranks. Raises Unfit.

    The sum that a mean of float16 is computed from may overflow, and so is in f32.
    """
    return "f32" if average and x.dtype == torch.float16 else dtype_of([x])


def mean(total: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    """Return the mean over ranks in a dtype, computed from the sum; in its memory, where that is of the dtype."""
    return total.mul_(1 / ranks).to(dtype)


def _shaped(out: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor for a result. Raises HostIRError if it has another shape."""
    if list(out.shape) != [*shape]:
        raise error(f"out= has shape {list(out.shape)}", user_span(), expected=f"that of the result, {[*shape]}")
    return out


def _check_products(bs: Sequence[Tensor], K: int, has: str) -> None:
    for b in bs:
        if b.shape[0] != K:
            raise Unfit(f"{has}, and B has {b.shape[0]} rows")


def operator(name: str, group_name: str, torchs: Callable[[], Any] | None = None) -> Operator:
    """Return a call of the operator of this name."""
    return Operator(name, group_named(group_name), torchs)
