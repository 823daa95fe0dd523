"""Contractions of the kernel table: matmul, linear and scaled matmul, whole or by blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hostir.ir.source import error
from hostir.kernels import aten
from hostir.kernels.layout import collapse, rows, with_all_rows
from hostir.kernels.scaled import readable
from hostir.kernels.scaled_library import scaled_by_library
from hostir.kernels.scales import FlatScales

if TYPE_CHECKING:
    from hostir.kernels.flags.copies import PushKernel
    from hostir.kernels.flags.done import DoneFlags
    from hostir.kernels.flags.ready import ReadyFlags
from hostir.kernels.repeats import ATEN, Again, Kernel


def sum_by_blocks(
    out: torch.Tensor,
    x: torch.Tensor,
    addend: torch.Tensor | None = None,
    *,
    axis: int,
    activation: str = "",
    ready: ReadyFlags | None = None,
    done: DoneFlags | None = None,
    own_rows: torch.Tensor | None = None,
) -> Again | None:
    """Compute `out = activation(x.sum(axis) + addend)` in Triton, each block of rows once all sources have theirs."""
    from hostir.kernels.reduce import add_up  # loads Triton: only where it is used

    return add_up(x, out, axis, addend=addend, activation=activation, ready=ready, done=done, own_rows=own_rows)


# A contraction is what multiplies rows with a right side; the kernels that do so wait for flags, raise them, or copy.

Multiply = Callable[..., Again | None]  # f(out, a, row, **flags): of rows that begin with number `row` of all
RightSide = Callable[..., Multiply]  # f(out, a, *others, **options), as a kernel: computes nothing yet


def _matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None = None) -> Multiply:
    """Multiply with `b` `[K, N]`; an addend is `out` itself, to which the product is added."""
    assert addend is None or (addend.data_ptr(), addend.stride()) == (out.data_ptr(), out.stride())
    return _product(b, adds=addend is not None)


def _linear(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Multiply:
    """Multiply with the transpose of `weight` `[N, K]`, and add `bias` `[N]`; rounded once."""
    return _product(weight.t(), bias=bias)


def _product(b: torch.Tensor, **options: Any) -> Multiply:
    from hostir.kernels.matmul.matmul import multiply  # loads Triton: only where it is used

    return lambda out, a, row, **flags: multiply(a, b, out, **options, **flags)


def _scaled_matmul(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast: bool = False,
) -> Multiply:
    """Multiply as `hostir.kernels.scaled.scaled_matmul`."""
    from hostir.kernels.matmul.matmul import multiply

    along_k, (of_a, of_b), copied = readable(a, b, scale_a, scale_b)

    def product(out: torch.Tensor, a: torch.Tensor, row: int, **flags: Any) -> Again | None:
        scales = FlatScales(of_a[row : row + a.shape[:-1].numel()], of_b, fast)
        again = multiply(a, along_k, out, bias=bias, scales=scales, **flags)
        return None if copied else again

    return product


CONTRACTIONS: Mapping[str, RightSide] = {"matmul": _matmul, "linear": _linear, "scaled_matmul": _scaled_matmul}


def _all_rows_ready(right_side: RightSide) -> Kernel:
    """Return the kernel that computes a contraction whose rows are all ready."""

    def kernel(out: torch.Tensor, a: torch.Tensor, *others: torch.Tensor | None, **options: Any) -> Again | None:
        return _contract(out, a, right_side(out, a, *others, **options))

    return kernel


def _by_blocks(right_side: RightSide) -> Kernel:
    """Return the kernel that begins each block of rows once its flag of `ready` is up, and raises the flags of `done`.

    `own` are rows of a block that needs no flag. It is one launch if the leading axes of `a` and `out` merge; else the
    flags of `done` are raised together, by a launch of their own behind the others. The kernel raises HostIRError if
    the blocks do not fit the slices of a tensor whose leading axes do not merge (see `_contract_ready`).
    """

    def kernel(
        out: torch.Tensor,
        a: torch.Tensor,
        *others: torch.Tensor | None,
        ready: ReadyFlags | None = None,
        done: DoneFlags | None = None,
        own_rows: torch.Tensor | None = None,
        **options: Any,
    ) -> Again | None:
        from hostir.kernels.flags.done import raise_flags

        product = right_side(out, a, *others, **options)
        if _merges(out, a) if own_rows is None else ready and _in_whole_batches(out, a, len(ready.flags)):
            return product(out, a, 0, ready=ready, done=done, own_rows=own_rows)
        if ready is None:
            _contract(out, a, product)
        else:
            _contract_ready(out, a, product, 0, ready, own_rows)
        if done is not None:
            raise_flags(done, None if ready is None else ready.timeouts)
        return None

    return kernel


def _scaled_matmul_by_blocks(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    *others: torch.Tensor | None,
    ready: ReadyFlags | None = None,
    **options: Any,
) -> Again | None:
    """As `_by_blocks`; raises HostIRError for scales that it would have to copy before their rows are there."""
    if ready is not None and scale_a.numel() > 1 and rows(scale_a) is None:
        raise error(
            "the scales of rows that a matmul waits for lie with several strides",
            expected="scales of all rows in one piece, as gathered",
        )
    return _by_blocks(_scaled_matmul)(out, a, b, scale_a, *others, ready=ready, **options)


def _pushed(right_side: RightSide) -> Kernel:
    """Return the kernel that computes a contraction and what `pushed` does with `out`, which is dense, as well.

    If the leading axes of `a` do not merge, that is another kernel behind it.
    """

    def kernel(
        out: torch.Tensor, a: torch.Tensor, *others: torch.Tensor | None, pushed: PushKernel, **options: Any
    ) -> Again | None:
        product = right_side(out, a, *others, **options)
        if _merges(out, a):
            return product(out, a, 0, pushed=pushed)
        _contract(out, a, product)
        pushed(out)
        return None

    return kernel


ALL_ROWS_READY: Mapping[str, Kernel] = {name: _all_rows_ready(each) for name, each in CONTRACTIONS.items()}
BY_BLOCKS: Mapping[str, Kernel] = {
    **{f"{name}_by_blocks": _by_blocks(each) for name, each in CONTRACTIONS.items()},
    "scaled_matmul_by_blocks": _scaled_matmul_by_blocks,
    "sum_by_blocks": sum_by_blocks,
}
PUSHED: Mapping[str, Kernel] = {f"{name}_pushed": _pushed(each) for name, each in CONTRACTIONS.items()}


def _contract_ready(
    out: torch.Tensor,
    a: torch.Tensor,
    product: Multiply,
    row: int,
    ready: ReadyFlags,
    own_rows: torch.Tensor | None = None,
) -> Again | None:
    """Compute a contraction that begins each block of the flattened rows once its flag is up.

    If the leading axes of `a` and `out` merge into `[batch, rows]`, it is one launch, which works on whatever is ready.
    Otherwise each slice of the outermost axis is a launch, in order from that of block `ready.first` on: a slice must
    consist of whole blocks, or a block of whole slices; HostIRError otherwise. With `own` rows, and blocks that do not
    consist of whole batches, each block is a launch.
    """
    count = a.shape[:-1].numel()
    if own_rows is not None:
        if _in_whole_batches(out, a, len(ready.flags)):
            return product(out, a, row, ready=ready, own_rows=own_rows)
        pairs = with_all_rows(out, a, len(ready.flags), ready.first, own_rows)
        for block in (*range(ready.first, len(pairs)), *range(ready.first)):
            flag, at = None if block == ready.first else _of_block(ready, block), row + block * count // len(pairs)
            for out_part, a_part in pairs[block]:
                if flag is None:
                    _contract(out_part, a_part, product, at)
                else:
                    _contract_ready(out_part, a_part, product, at, flag)
                at += a_part.shape[:-1].numel()
        return None
    if _merges(out, a):
        return product(out, a, row, ready=ready)
    slices, blocks = len(out), len(ready.flags)
    if slices % blocks and blocks % slices:
        raise error(
            f"a matmul cannot wait for {blocks} blocks of rows in {slices} slices, of which each lies apart in memory",
            expected="slices of whole blocks, or blocks of whole slices",
            notes=((None, f"a: shape {list(a.shape)}, strides {list(a.stride())}; out: strides {list(out.stride())}"),),
        )
    foremost = ready.first * slices // blocks
    for i in (*range(foremost, slices), *range(foremost)):
        begin = i * blocks // slices
        end = max(begin + 1, (i + 1) * blocks // slices)
        first = ready.first - begin if begin <= ready.first < end else 0
        part = replace(ready, flags=ready.flags[begin:end], timeouts=ready.timeouts[begin:end], first=first)
        _contract_ready(out[i], a[i], product, row + i * count // slices, part)
        ready = replace(ready, overlapped_sms=0)  # the first launch ended after the kernel that it overlapped
    return None


def _of_block(ready: ReadyFlags, block: int) -> ReadyFlags:
    """Return the flags of one block, for a launch behind another one, which overlaps no other kernel."""
    one = slice(block, block + 1)
    return replace(ready, flags=ready.flags[one], timeouts=ready.timeouts[one], first=0, overlapped_sms=0)


def _in_whole_batches(out: torch.Tensor, a: torch.Tensor, blocks: int) -> bool:
    """Whether the leading axes of both merge for one launch, and blocks are whole batches or parts of one batch."""
    levels = collapse(a.shape[:-1], a.stride()[:-1], out.stride()[:-1])
    return len(levels) < 2 or (len(levels) == 2 and levels[0][0] % blocks == 0)


def _contract(out: torch.Tensor, a: torch.Tensor, product: Multiply, row: int = 0) -> Again | None:
    """Compute a contraction whose rows are all ready, with a launch for each slice if leading axes do not merge."""
    if _merges(out, a):
        return product(out, a, row)
    for i, (out_part, a_part) in enumerate(zip(out, a, strict=True)):
        _contract(out_part, a_part, product, row + i * a_part.shape[:-1].numel())
    return None


def scaled_matmul_of_either(out: torch.Tensor, *operands: Any, fast: bool = False) -> Again | None:
    """Compute a scaled product by torch's library where it takes such operands, else in Triton."""
    if scaled_by_library(out, *operands, fast=fast):
        return None
    return ALL_ROWS_READY["scaled_matmul"](out, *operands, fast=fast)


def _row_scales(out: torch.Tensor, x: torch.Tensor, *, dtype: str, block: int = 0) -> None:
    from hostir.kernels.quantize import row_scales  # loads Triton: only where it is used

    row_scales(out, x, dtype=dtype, block=block)


def _quantize(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *, dtype: str) -> None:
    from hostir.kernels.quantize import quantize

    quantize(out, x, scale, dtype=dtype)


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float) -> None:
    from hostir.kernels.norm import rms_norm

    rms_norm(out, x, weight, eps=eps)


BY_ROWS: Mapping[str, Kernel] = {"row_scales": _row_scales, "quantize": _quantize, "rms_norm": _rms_norm}


def sum_of_few(
    out: torch.Tensor, x: torch.Tensor, addend: torch.Tensor | None = None, *, axis: int, activation: str = ""
) -> Again | None:
    """Compute as `sum_by_blocks` if `x` is a few tensors one after another, which torch sums slowly; else by torch."""
    from hostir.kernels.reduce import adds_in_order

    if adds_in_order(x, out, axis):
        return sum_by_blocks(out, x, addend, axis=axis, activation=activation)
    aten.sum(out, x, addend, axis=axis, activation=activation)
    return None


# Kernels that may return a function that repeats the call, see `repeating`.
REPEATABLE: tuple[Kernel, ...] = (*ALL_ROWS_READY.values(), scaled_matmul_of_either, sum_by_blocks, sum_of_few)
# Kernels that launch kernels of Triton, at least for some operands: they can be loaded before a call.
IN_TRITON: tuple[Kernel, ...] = (*REPEATABLE, *BY_BLOCKS.values(), *PUSHED.values(), *BY_ROWS.values())
# Kernels that call cuBLAS, at least for some operands.
BY_CUBLAS: tuple[Kernel, ...] = (*aten.BY_CUBLAS, scaled_matmul_of_either)


def _merges(out: torch.Tensor, a: torch.Tensor) -> bool:
    """Whether the leading axes of both merge into the `[batch, rows]` that one launch of the Triton kernel takes."""
    return len(collapse(a.shape[:-1], a.stride()[:-1], out.stride()[:-1])) <= 2


def triton_kernels(device_type: str) -> dict[str, Kernel]:
    """Return the Triton kernels of the table for a type of device."""
    try:  # only here: where nobody asks for Triton, it need not be installed
        from hostir.kernels.devices import INTERPRETED
    except ImportError as problem:
        hint = f"pip install triton, or {ATEN}"
        raise error(f"kernels='triton' cannot be loaded: {problem}", hint=hint) from None
    if device_type == "cpu" and not INTERPRETED:
        raise error(
            "kernels='triton' on a CPU needs Triton's interpreter",
            expected="TRITON_INTERPRET=1 in the environment when Python starts",
            hint=f"set it, or {ATEN}",
        )

    return {**ALL_ROWS_READY, "sum": sum_by_blocks, **BY_ROWS}
