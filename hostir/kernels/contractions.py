"""The Triton kernels in the tables of `hostir.kernels.table`.

They compute contractions (matmul, linear and scaled matmul), products of rows in groups, rows by an index, sums, fp8
scales, quantized rows, and RMS norms. Further kernels for contractions and sums work on blocks of rows: they wait for
the flag of each block before they read it, and they raise a flag after each block that they write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hostir.ir.source import error
from hostir.kernels import aten
from hostir.kernels.grouped_library import grouped_by_library, outer_by_library, takes_grouped
from hostir.kernels.layout import collapse, rows, with_all_rows
from hostir.kernels.repeats import ATEN, Again, Kernel
from hostir.kernels.scaled import readable
from hostir.kernels.scaled_library import scaled_by_library
from hostir.kernels.scales import FlatScales

if TYPE_CHECKING:
    from hostir.kernels.flags.copies import PushKernel
    from hostir.kernels.flags.done import DoneFlags
    from hostir.kernels.flags.ready import ReadyFlags


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
    """Compute `out = activation(x.sum(axis) + addend)` in Triton. Return the same as `hostir.kernels.reduce.add_up`.

    With `ready`, the kernel waits for the flags of each block of rows before it reads the block. With `done`, it raises
    a flag after each block that it writes.
    """
    from hostir.kernels.reduce import add_up  # loads Triton: only where it is used

    return add_up(x, out, axis, addend=addend, activation=activation, ready=ready, done=done, own_rows=own_rows)


# A contraction multiplies the rows of `a` by a right side. All contractions share the code that waits for flags, raises
# flags, or copies to peers.

# A function f(out, a, row, **flags) that multiplies some rows of an operand. `row` is the index of the first row.
Multiply = Callable[..., Again | None]
# A function f(out, a, *others, **options) that takes a kernel's arguments. It computes nothing and returns a Multiply.
RightSide = Callable[..., Multiply]


def _matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None = None) -> Multiply:
    """Return a function that multiplies rows by `b` `[K, N]`.

    The addend must be None or `out` itself. If it is `out`, the function adds the product to the old values of `out`.
    """
    assert addend is None or (addend.data_ptr(), addend.stride()) == (out.data_ptr(), out.stride())
    return _product(b, adds=addend is not None)


def _linear(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Multiply:
    """Return a function that multiplies rows by `weight^T`, adds `bias` `[N]` and rounds once. `weight` is `[N, K]`."""
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
    """Return a function that multiplies rows as `hostir.kernels.scaled.scaled_matmul` does."""
    from hostir.kernels.matmul.matmul import multiply

    along_k, (of_a, of_b), copied = readable(a, b, scale_a, scale_b)

    def product(out: torch.Tensor, a: torch.Tensor, row: int, **flags: Any) -> Again | None:
        scales = FlatScales(of_a[row : row + a.shape[:-1].numel()], of_b, fast)
        again = multiply(a, along_k, out, bias=bias, scales=scales, **flags)
        return None if copied else again

    return product


CONTRACTIONS: Mapping[str, RightSide] = {"matmul": _matmul, "linear": _linear, "scaled_matmul": _scaled_matmul}


def _without_flags(right_side: RightSide) -> Kernel:
    """Return a kernel that computes a contraction without flags. All rows of `a` are ready when it starts."""

    def kernel(out: torch.Tensor, a: torch.Tensor, *others: torch.Tensor | None, **options: Any) -> Again | None:
        return _contract(out, a, right_side(out, a, *others, **options))

    return kernel


def _by_blocks(right_side: RightSide) -> Kernel:
    """Return a kernel that computes a contraction, waits for the flags of `ready` and raises the flags of `done`.

    The kernel computes a block of rows once the block's flag has risen. `own_rows` replace block `ready.first`, which
    needs no flag. If the leading axes of `a` and `out` merge, the kernel is one launch. Otherwise the kernel launches
    several times. Two more launches may follow: one raises all flags of `done`, and one ends the call (`ready.ending`).

    The kernel raises HostIRError if the leading axes do not merge and the blocks do not fit the slices of the outermost
    axis (see `_contract_ready`).
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
        if _merges(out, a) if own_rows is None else ready and _in_complete_batches(out, a, len(ready.flags)):
            return product(out, a, 0, ready=ready, done=done, own_rows=own_rows)
        if ready is None:
            _contract(out, a, product)
        else:
            _contract_ready(out, a, product, 0, replace(ready, ending=None), own_rows)
        if done is not None:
            raise_flags(done, None if ready is None else ready.timeouts)
        if ready is not None and ready.ending is not None:
            ready.ending()
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
    """Compute a scaled matmul in blocks of rows, as the kernels that `_by_blocks` returns do.

    Raises HostIRError if `ready` is set and the scales of the rows have no constant stride. Such scales would have to
    be copied before the launch, but they arrive only with the rows.
    """
    if ready is not None and scale_a.numel() > 1 and rows(scale_a) is None:
        raise error(
            "a matmul cannot wait for rows if their scales have no single stride",
            expected="the scales of all rows in one buffer, with one stride between rows",
        )
    return _by_blocks(_scaled_matmul)(out, a, b, scale_a, *others, ready=ready, **options)


def _pushed(right_side: RightSide) -> Kernel:
    """Return a kernel that computes a contraction, and copies pieces of `out` to peers.

    The kernel's option `pushed` names the pieces. `out` must be contiguous. If the leading axes of `a` do not merge, a
    second launch makes the copies.
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


WITHOUT_FLAGS: Mapping[str, Kernel] = {name: _without_flags(right_side) for name, right_side in CONTRACTIONS.items()}
BY_BLOCKS: Mapping[str, Kernel] = {
    **{f"{name}_by_blocks": _by_blocks(right_side) for name, right_side in CONTRACTIONS.items()},
    "scaled_matmul_by_blocks": _scaled_matmul_by_blocks,
    "sum_by_blocks": sum_by_blocks,
}
PUSHED: Mapping[str, Kernel] = {f"{name}_pushed": _pushed(right_side) for name, right_side in CONTRACTIONS.items()}


def _contract_ready(
    out: torch.Tensor,
    a: torch.Tensor,
    product: Multiply,
    row: int,
    ready: ReadyFlags,
    own_rows: torch.Tensor | None = None,
) -> Again | None:
    """Compute a contraction. Each block of the flattened rows is computed once its flag has risen.

    `row` is the index of the first row of `a` in the complete operand.

    If the leading axes of `a` and `out` merge into `[batch, rows]`, one launch computes everything, and waits for each
    block. Otherwise there is one launch for each slice of the outermost axis. The slice that holds block `ready.first`
    comes first. Each slice must then consist of complete blocks, or each block must consist of complete slices. If not,
    this function raises HostIRError.

    With `own_rows`, there is one launch for everything if blocks consist of complete batches, or if there is only one
    batch. Otherwise there is at least one launch for each block.
    """
    count = a.shape[:-1].numel()
    if own_rows is not None:
        if _in_complete_batches(out, a, len(ready.flags)):
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
            f"a matmul cannot wait for {blocks} blocks of rows in {slices} slices that lie apart in memory",
            expected="slices of complete blocks, or blocks of complete slices",
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
    """Return `ready` with the flag of one block only, for a launch after the first one.

    Such a launch overlaps no other kernel, so `overlapped_sms` of the result is 0.
    """
    one = slice(block, block + 1)
    return replace(ready, flags=ready.flags[one], timeouts=ready.timeouts[one], first=0, overlapped_sms=0)


def _in_complete_batches(out: torch.Tensor, a: torch.Tensor, blocks: int) -> bool:
    """Return True if one launch can compute a contraction whose first block of rows lies in another tensor.

    The leading axes of `a` and `out` must merge into `[batch, rows]`. Either there must be only one batch, or each of
    the `blocks` blocks of rows must consist of complete batches.
    """
    levels = collapse(a.shape[:-1], a.stride()[:-1], out.stride()[:-1])
    return len(levels) < 2 or (len(levels) == 2 and levels[0][0] % blocks == 0)


def _contract(out: torch.Tensor, a: torch.Tensor, product: Multiply, row: int = 0) -> Again | None:
    """Compute a contraction without flags. If leading axes do not merge, launch once for each slice.

    `row` is the index of the first row of `a` in the complete operand.
    """
    if _merges(out, a):
        return product(out, a, row)
    for i, (out_part, a_part) in enumerate(zip(out, a, strict=True)):
        _contract(out_part, a_part, product, row + i * a_part.shape[:-1].numel())
    return None


def scaled_matmul_of_either(out: torch.Tensor, *operands: Any, fast: bool = False) -> Again | None:
    """Compute a scaled matmul by `torch._scaled_mm` if it supports the operands, else in Triton."""
    if scaled_by_library(out, *operands, fast=fast):
        return None
    return WITHOUT_FLAGS["scaled_matmul"](out, *operands, fast=fast)


def _row_scales(out: torch.Tensor, x: torch.Tensor, *, dtype: str, block: int = 0) -> None:
    from hostir.kernels.quantize import row_scales  # loads Triton: only where it is used

    row_scales(out, x, dtype=dtype, block=block)


def _quantize(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *, dtype: str) -> None:
    from hostir.kernels.quantize import quantize

    quantize(out, x, scale, dtype=dtype)


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float) -> None:
    from hostir.kernels.norm import rms_norm

    rms_norm(out, x, weight, eps=eps)


def _permute_rows(out: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> None:
    from hostir.kernels.rows_by_index import permute_rows

    permute_rows(out, x, index)


def _combine_rows(out: torch.Tensor, y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
    from hostir.kernels.rows_by_index import combine_rows

    combine_rows(out, y, index, weights)


BY_ROWS: Mapping[str, Kernel] = {
    "row_scales": _row_scales,
    "quantize": _quantize,
    "rms_norm": _rms_norm,
    "permute_rows": _permute_rows,
    "combine_rows": _combine_rows,
}


def _grouped_matmul(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *others: torch.Tensor | None
) -> None:
    from hostir.kernels.grouped import grouped_matmul  # loads Triton: only where it is used

    grouped_matmul(out, x, w, offsets, *others)


def grouped_matmul_of_either(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *others: torch.Tensor | None
) -> None:
    """Compute a grouped matmul by `torch._grouped_mm` if it supports the operands, else in Triton."""
    from hostir.kernels.devices import only_loads  # loads Triton: only where it is used

    if others or offsets.ndim > 1 or not takes_grouped(out, x, w):
        _grouped_matmul(out, x, w, offsets, *others)
    elif not only_loads():
        grouped_by_library(out, x, w, offsets)


def grouped_matmul_by_blocks(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    *others: torch.Tensor | None,
    ready: ReadyFlags,
    done: DoneFlags | None = None,
    own_rows: torch.Tensor | None = None,
) -> None:
    """Compute a grouped matmul that waits for the flags of blocks of sources. It raises no flags."""
    from hostir.kernels import grouped  # loads Triton: only where it is used

    assert done is None
    grouped.grouped_matmul_by_blocks(out, x, w, offsets, *others, ready=ready, own_rows=own_rows)


def _grouped_outer(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, addend: torch.Tensor | None = None
) -> None:
    from hostir.kernels.outer import grouped_outer

    grouped_outer(out, x, y, offsets, addend)


def grouped_outer_of_either(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, addend: torch.Tensor | None = None
) -> None:
    """Compute sums of outer products by `torch._grouped_mm` if it supports the operands, else in Triton."""
    from hostir.kernels.devices import only_loads

    if addend is not None or offsets.ndim > 1 or not takes_grouped(out, x.t(), y):
        _grouped_outer(out, x, y, offsets, addend)
    elif not only_loads():
        outer_by_library(out, x, y, offsets)


GROUPED_OF_EITHER: Mapping[str, Kernel] = {
    "grouped_matmul": grouped_matmul_of_either,
    "grouped_outer": grouped_outer_of_either,
}
IN_GROUPS: Mapping[str, Kernel] = {"grouped_matmul": _grouped_matmul, "grouped_outer": _grouped_outer}
GROUPED_BY_BLOCKS: Mapping[str, Kernel] = {"grouped_matmul_by_blocks": grouped_matmul_by_blocks}
GROUPED: tuple[Kernel, ...] = (*GROUPED_OF_EITHER.values(), *IN_GROUPS.values(), grouped_matmul_by_blocks)


def sum_of_few(
    out: torch.Tensor, x: torch.Tensor, addend: torch.Tensor | None = None, *, axis: int, activation: str = ""
) -> Again | None:
    """Compute a sum in Triton if it adds a few tensors that lie one after another in memory, else by torch.

    torch is slow for such tensors.
    """
    from hostir.kernels.reduce import adds_in_order

    if adds_in_order(x, out, axis):
        return sum_by_blocks(out, x, addend, axis=axis, activation=activation)
    aten.sum(out, x, addend, axis=axis, activation=activation)
    return None


# Kernels that may return a function which repeats the call; see `repeating`.
REPEATABLE: tuple[Kernel, ...] = (*WITHOUT_FLAGS.values(), scaled_matmul_of_either, sum_by_blocks, sum_of_few)
# Kernels that launch Triton kernels, at least for some operands. Their Triton kernels can be loaded before a call.
IN_TRITON: tuple[Kernel, ...] = (
    *REPEATABLE,
    *BY_BLOCKS.values(),
    *PUSHED.values(),
    *BY_ROWS.values(),
    *GROUPED,
)
# Kernels that call cuBLAS, at least for some operands.
BY_CUBLAS: tuple[Kernel, ...] = (*aten.BY_CUBLAS, scaled_matmul_of_either)


def _merges(out: torch.Tensor, a: torch.Tensor) -> bool:
    """Return True if the leading axes merge into at most two axes `[batch, rows]`, so that one launch suffices."""
    return len(collapse(a.shape[:-1], a.stride()[:-1], out.stride()[:-1])) <= 2


def triton_kernels(device_type: str) -> dict[str, Kernel]:
    """Return the Triton kernels without flags, by the name of the computation, for devices of type `cpu` or `cuda`.

    Raises HostIRError if Triton is not installed, and for a CPU if Triton's interpreter is switched off.
    """
    try:  # Triton need not be installed unless somebody asks for it
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

    return {**WITHOUT_FLAGS, "sum": sum_by_blocks, **BY_ROWS, **IN_GROUPS}
