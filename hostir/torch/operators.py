"""Compute torch's operators by executors: the layouts of their tensors, and what they leave to torch.

The gathered or scattered axis is moved to the front, and the axes but the last one are rows of a matrix. Results have
the strides that torch's own functions give them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hostir.ir.program import Program
from hostir.ir.source import error, warn_once
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
            raise error(f"hostir cannot run {self.name}: {why}", hint=hint)
        warn_once(self.name, f"torch's own function runs {self.name}: {why}.", "hostir.torch.report() counts the calls")
        LEDGER.left(self.name, self.group.name, why)
        return self.torchs()

    def execute(
        self,
        build: Callable[..., Program],
        key: tuple[Any, ...],
        inputs: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the program of a fusion on this rank's parts, as executors do. Raises Unfit."""
        executor = self._executor(build, key, inputs, "eager" if out is None else "out")
        outputs = executor(*inputs, out=out)
        LEDGER.ran(self.name, self.group.name, executor)
        return outputs

    def start(self, build: Callable[..., Program], key: tuple[Any, ...], inputs: Sequence[Tensor]) -> Started:
        """Start the program of a fusion beside what the caller issues next. Raises Unfit."""
        executor = self._executor(build, key, inputs, "eager")
        started = executor.start(*inputs)
        LEDGER.ran(self.name, self.group.name, executor)
        return started

    def _executor(
        self, build: Callable[..., Program], key: tuple[Any, ...], inputs: Sequence[Tensor], calls: str
    ) -> Executor:
        kind, device = dtype_of(inputs), inputs[0].device
        return self.group.program(build, kind, *key, strategy=SETTINGS.strategy, device=device, calls=calls)


def dtype_of(tensors: Sequence[Tensor]) -> str:
    """Return the dtype of tensors in the words of a program. Raises Unfit for one that hostir lacks, or several."""
    kind = tensors[0].dtype
    if len(kinds := {x.dtype for x in tensors}) > 1:
        raise Unfit(f"operands of several dtypes, {', '.join(sorted(map(str, kinds)))}")
    if kind not in DTYPES:
        raise Unfit(f"its dtype is {kind}, not one of {', '.join(map(str, DTYPES))}")
    return DTYPES[kind]


# Layouts --------------------------------------------------------------------------------------------------------------


def rows_of(x: Tensor, axis: int) -> Tensor:
    """Return a tensor as a matrix, its rows along an axis first; contiguous, and a copy only if `x` is not so."""
    moved = x.movedim(axis, 0) if axis else x
    return (moved if moved.ndim == 2 else moved.flatten(0, -2)).contiguous()


def from_rows(rows: Tensor, like: Tensor, axis: int, ranks: int) -> Tensor:
    """Return gathered rows as a tensor with the axes of a rank's part `like`; a view."""
    if like.ndim == 2:
        return rows
    others = [n for k, n in enumerate(like.shape[:-1]) if k != axis]
    return rows.view(like.shape[axis] * ranks, *others, rows.shape[-1]).movedim(0, axis)


def own(result: Tensor, given: Tensor) -> Tensor:
    """Return a result that is not a tensor of the caller's: on one rank, a gathered tensor is the input itself."""
    return result.clone() if result is given or result._base is given else result


# Operators ------------------------------------------------------------------------------------------------------------
# Each takes and gives this rank's parts. Axes are not negative, and have been checked.


def all_gather_matmul(
    op: Operator, a: Tensor, bs: Sequence[Tensor], axis: int, gathered: bool, out: Sequence[Tensor] | None = None
) -> tuple[Tensor | None, list[Tensor]]:
    """Gather `a` along an axis of any rank, and multiply it with each of `bs`.

    With `out`, matrices of rows for the products and then, if wanted, for the gathered tensor.
    """
    contracted, ranks = axis == a.ndim - 1, op.group.size
    if not bs:
        return all_gather(op, a, axis) if gathered else None, []
    K = a.shape[-1] * (ranks if contracted else 1)
    _check_products(bs, K, f"A has {K} columns")
    x = a.flatten(0, -2).contiguous() if contracted else rows_of(a, axis)
    key = (K, tuple(b.shape[1] for b in bs), contracted, gathered)
    *products, last = op.execute(programs.all_gather_matmul, key, [x, *bs], out)
    products, full = (products, own(last, x)) if gathered else ([*products, last], None)
    if contracted:
        shaped = [y.view(*a.shape[:-1], y.shape[-1]) for y in products]
        return None if full is None else full.view(*a.shape[:-1], K), shaped
    return None if full is None else from_rows(full, a, axis, ranks), [from_rows(y, a, axis, ranks) for y in products]


def all_gather_gated(
    op: Operator, a: Tensor, gate: Tensor, up: Tensor, axis: int, gathered: bool
) -> tuple[Tensor, Tensor | None]:
    """Gather `a` along an axis but the last; return `silu(a @ gate) * (a @ up)`, and the gathered tensor if wanted."""
    if axis == a.ndim - 1:
        raise Unfit("the axis that is gathered is the one that the products sum over")
    _check_products([gate, up], a.shape[-1], f"A has {a.shape[-1]} columns")
    if gate.shape != up.shape:
        raise Unfit(f"the two matrices have shapes {list(gate.shape)} and {list(up.shape)}")
    x, ranks = rows_of(a, axis), op.group.size
    y, *full = op.execute(programs.all_gather_gated, (*gate.shape, gathered), [x, gate, up])
    return from_rows(y, a, axis, ranks), from_rows(own(full[0], x), a, axis, ranks) if gathered else None


def matmul_reduce_scatter(
    op: Operator, a: Tensor, b: Tensor, average: bool, axis: int, out: Tensor | None = None
) -> Tensor:
    """Multiply, sum over all ranks, and return this rank's part along an axis; contiguous, and `out` if given."""
    last, ranks = axis == a.ndim - 1, op.group.size
    _check_mean(a, average)
    _check_products([b], a.shape[-1], f"A has {a.shape[-1]} columns")
    length = b.shape[1] if last else a.shape[axis]
    if length % ranks:
        raise Unfit(f"its {ranks} ranks do not divide axis {axis} of the product, which is {length}")
    first = last or axis == 0
    x = a if first else a.movedim(axis, 0)
    if x.ndim > 2 and (x.is_contiguous() or x.ndim > 3):  # of two or three axes any strides will do
        x = x.flatten(0 if x.is_contiguous() else 1, -2)
    key = (a.shape[-1] * ranks, b.shape[1], x.ndim, last)
    direct = out is not None and first
    given = None
    if direct and out is not None:
        given = [out if x.ndim == out.ndim == 2 else out.view(*_shape(x, b, ranks, last))]
    (y,) = op.execute(programs.matmul_reduce_scatter, key, [x, b], given)
    if average:
        y.mul_(1 / ranks)
    if direct and out is not None:
        return out
    if first and a.ndim == 2:
        return y
    shape = [*a.shape[:-1], b.shape[1] // ranks if last else b.shape[1]]
    if not last:
        shape[axis] //= ranks
    if first:
        return y.view(shape)
    result = y.view(shape[axis], *shape[:axis], *shape[axis + 1 :]).movedim(0, axis)
    return result.flatten().view(shape) if out is None else out.copy_(result)


def _shape(x: Tensor, b: Tensor, ranks: int, last: bool) -> list[int]:
    first, *others = x.shape[:-1]
    return [first, *others, b.shape[1] // ranks] if last else [first // ranks, *others, b.shape[1]]


def all_gather(op: Operator, x: Tensor, axis: int) -> Tensor:
    """Gather a tensor along an axis; the result is contiguous with that axis first."""
    rows, shape = _first(x, axis)
    (y,) = op.execute(programs.all_gather, (), [rows])
    return _whole(y, rows, shape, axis)


def start_all_gather(op: Operator, x: Tensor, axis: int) -> Callable[[], Tensor]:
    """Do so beside what the caller issues next; what this returns waits for the result."""
    rows, shape = _first(x, axis)
    started = op.start(programs.all_gather, (), [rows])
    return lambda: _whole(started.wait()[0], rows, shape, axis)


def reduce_scatter(op: Operator, x: Tensor, average: bool, axis: int) -> Tensor:
    """Sum a tensor over all ranks; return this rank's part along an axis, contiguous with that axis first."""
    rows, shape = _to_scatter(op, x, average, axis)
    (y,) = op.execute(programs.reduce_scatter, (), [rows])
    y = _whole(y, rows, shape, axis)
    return y.mul_(1 / op.group.size) if average else y


def start_reduce_scatter(op: Operator, x: Tensor, axis: int) -> Callable[[], Tensor]:
    """Sum beside what the caller issues next; what this returns waits for the result."""
    rows, shape = _to_scatter(op, x, False, axis)
    started = op.start(programs.reduce_scatter, (), [rows])
    return lambda: _whole(started.wait()[0], rows, shape, axis)


def _first(x: Tensor, axis: int) -> tuple[Tensor, Sequence[int]]:
    """Return a tensor as dense rows along an axis, and its shape with that axis first."""
    moved = x.movedim(axis, 0)
    return moved.reshape(moved.shape[0], prod(moved.shape[1:])).contiguous(), moved.shape


def _whole(y: Tensor, rows: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """Return rows that were gathered from a tensor, or scattered, as a tensor with its axes."""
    return own(y, rows).view(y.shape[0], *shape[1:]).movedim(0, axis)


def _to_scatter(op: Operator, x: Tensor, average: bool, axis: int) -> tuple[Tensor, Sequence[int]]:
    _check_mean(x, average)
    if x.shape[axis] % op.group.size:
        raise Unfit(f"its {op.group.size} ranks do not divide axis {axis}, which is {x.shape[axis]}")
    return _first(x, axis)


def _check_mean(x: Tensor, average: bool) -> None:
    """Raise Unfit where a mean, which is computed from the rounded sum, might be less exact than torch's."""
    if average and x.dtype == torch.float16:
        raise Unfit("it is a mean of float16, and hostir computes means from sums, which may overflow")


def _check_products(bs: Sequence[Tensor], K: int, has: str) -> None:
    for b in bs:
        if b.shape[0] != K:
            raise Unfit(f"{has}, and B has {b.shape[0]} rows")


def operator(name: str, group_name: str, torchs: Callable[[], Any] | None = None) -> Operator:
    """Return a call of the operator of this name."""
    return Operator(name, group_named(group_name), torchs)
