"""Bind operations of an unrolled program to a machine's registers, memory and kernels, as all machines do."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from hostir.ir.machine import Done
from hostir.ir.regions import dense_strides
from hostir.job.symmetric import SharedMemory, touches
from hostir.kernels.contractions import REPEATABLE
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.layout import row_pieces, with_rows
from hostir.kernels.repeats import Kernel, repeating
from hostir.plan.operations import NONE, AllocateOp, ComputeOp, CopyOp, ViewOp, overlap
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram

Part = torch.Tensor | None  # what a rank holds of a tensor: None if it is no device of its mesh


MAX_PLANS = 16  # plans that an executor keeps, the latest used ones: shapes may never repeat, and a plan is soon made
Step = Callable[[], object]
Copy = Callable[[torch.Tensor, torch.Tensor], object]  # of the second to the first
AddUp = Callable[..., object]  # as aten.add_up


def bind_allocate(op: AllocateOp, registers: list[Any], device: torch.device) -> Step:
    """Return the closure that allocates a buffer, unless the caller gave a tensor for it: it may be an output."""
    out, shape, strides, dtype = op.out, op.shape, dense_strides(op.shape), torch_dtype(op.dtype)
    empty = torch.empty_strided  # which takes two thirds of the time of torch.empty

    def step() -> None:
        if registers[out] is None:
            registers[out] = empty(shape, strides, dtype=dtype, device=device)

    return step


def bind_view(op: ViewOp, registers: list[Any]) -> Step:
    """Return the closure that makes a view."""
    out, x, shape, stride, offset, index = op.out, op.x, op.shape, op.stride, op.offset, op.index

    def item() -> None:
        registers[out] = registers[x][index]

    def strided() -> None:
        buffer = registers[x]  # an input may start anywhere in its own storage
        registers[out] = buffer.as_strided(shape, stride, buffer.storage_offset() + offset)

    return strided if index is None else item


def bind_compute(op: ComputeOp, registers: list[Any], kernel: Kernel) -> Step:
    """Return the closure that runs a computation's kernel."""
    out, operands, options = op.out, op.operands, dict(op.options)
    if kernel in REPEATABLE:
        multiply = repeating(kernel, **options)
        return lambda: multiply(registers[out], *[registers[i] for i in operands])
    if options or len(operands) > 2:
        return lambda: kernel(registers[out], *[registers[i] for i in operands], **options)
    if len(operands) == 2:
        x, y = operands
        return lambda: kernel(registers[out], registers[x], registers[y])
    (x,) = operands
    return lambda: kernel(registers[out], registers[x])


def place(given: Sequence[Part], homes: Sequence[int], registers: list[Any]) -> None:
    """Put the caller's tensors, before a run, in the registers of the buffers that they replace."""
    for home, x in zip(homes, given, strict=True):
        if home != NONE:
            registers[home] = x


def deliver(given: Sequence[Part], outputs: Sequence[int], registers: Sequence[Any]) -> tuple[Part, ...]:
    """Copy, after a run, the outputs that are not in the caller's tensors yet; return the caller's tensors."""
    for register, x in zip(outputs, given, strict=True):
        if x is not None and x is not registers[register]:
            x.copy_(registers[register])
    return tuple(given)


# Computations block by block, for machines without a kernel that waits for flags or raises them.


def compute_block(
    op: ComputeOp, registers: Sequence[Any], kernel: Kernel, block: int, blocks: int, add_up: AddUp | None = None
) -> None:
    """Compute one of `blocks` equal blocks of the rows of a product or a sum.

    `add_up` adds sources of which one is elsewhere, with the bits of a sum of whole tensors; else they are copied.
    """
    if op.kind == "sum":
        _sum_block(op, registers, kernel, block, blocks, add_up)
        return
    out, a, *others = registers[op.out], *(registers[x] for x in op.operands)
    ready = op.ready
    own = registers[ready.own] if ready is not None and ready.own is not None and block in ready.replaced else None
    of_rows = ready.along if ready is not None else op.done.along if op.done is not None else ()
    if not of_rows:
        for out_part, a_part in with_rows(out, a, block, blocks, own):
            kernel(out_part, a_part, *others, **op.options)
        return
    height = out.shape[:-1].numel() // blocks
    first = block * height
    left = (a, first) if own is None else (own, 0)
    parts = [(out, first), left, *((others[n - 1], first) for n in of_rows)]
    for _, (out_part, a_part, *cut_alike) in row_pieces(parts, height):
        for n, rows in zip(of_rows, cut_alike, strict=True):
            others[n - 1] = rows
        kernel(out_part, a_part, *others, **op.options)


def _sum_block(
    op: ComputeOp, registers: Sequence[Any], kernel: Kernel, block: int, blocks: int, add_up: AddUp | None
) -> None:
    """Compute one block of the rows of a sum; the bits are those of a sum of whole tensors."""
    out, x, ready = registers[op.out], registers[op.operands[0]].movedim(op.options["axis"], 0), op.ready
    height = out.shape[:-1].numel() // blocks
    own = [] if ready is None or ready.own is None else [registers[ready.own]]
    addends = [y.expand_as(out) for y in (registers[register] for register in op.operands[1:]) if y is not None]
    then = {**op.options, "axis": 0}
    rows = [(part, block * height) for part in (out, *addends, *x[:1], *own)]
    for _, (target, *views) in row_pieces(rows, height):
        added, views = views[: len(addends)], views[len(addends) :]
        if not len(x):
            kernel(target, x.new_empty(0, *target.shape), *added, **then)
            continue
        first = views[0]
        sources = first.as_strided((len(x), *first.shape), (x.stride(0), *first.stride()), first.storage_offset())
        if ready is None or not own:
            kernel(target, sources, *added, **then)
            continue
        parts = list(sources)
        parts[ready.replaced[0] // ready.results] = views[1]
        if add_up is not None:
            add_up(target, [*parts, *added], activation=then.get("activation", ""))
        else:
            kernel(target, torch.stack(parts), *added, **then)


def completed(done: Done, block: int, blocks: int, computed: Set[int]) -> list[int]:
    """Return the flags whose rows are all computed now that a block is, which is in `computed`."""
    flags = range(done.blocks)
    rows = {i: range(i * blocks // done.blocks, -(-(i + 1) * blocks // done.blocks)) for i in flags}
    return [flag for flag, needed in rows.items() if block in needed and computed >= set(needed)]


# Inputs that need no copy: the caller can write them where a program would copy them, in symmetric memory.


def places(unrolled: UnrolledProgram, memory: SharedMemory | None) -> tuple[int, ...]:
    """Return for each input the register of the memory to which one copy takes all of it; NONE if there is none.

    Memory that peers read does not count: they may read it until this rank's next call waits for them, and the caller
    writes before. Nor does memory that anything else writes: the result or the input would be lost.
    """
    found = dict.fromkeys(unrolled.inputs, NONE)
    if memory is None:
        return tuple(found.values())
    me = unrolled.rank
    own = {register: op.home for register, op in unrolled.symmetric.items() if op.rank == me}
    at = unrolled.extents
    writes = [(home, at[r]) for op in unrolled.ops for r in op.writes if (home := own.get(unrolled.buffers[r]))]
    peers = (p for p, offer in enumerate(memory.offers) if p != me and any(r == me for *_, r in offer.uses))
    theirs = (touches(unroll(unrolled.program, peer, unrolled.sizes)) for peer in peers)
    writes += [((n, rounds), (low, high)) for its in theirs for n, rounds, r, low, high in its if r == me]
    for op in unrolled.ops:
        home = own.get(unrolled.buffers[op.out]) if isinstance(op, CopyOp) else None
        if isinstance(op, CopyOp) and op.x in found and home is not None and (*home, me) not in memory.read:
            alone = sum(home == place and overlap(at[op.out], [extent]) for place, extent in writes) == 1
            found[op.x] = op.out if alone else found[op.x]
    return tuple(found.values())


def copy_here(out: torch.Tensor, x: torch.Tensor, copy: Copy) -> None:
    """Copy `x` to `out` within this rank's memory, by `copy`; do nothing where the caller has made `x` in its place.

    In place is one address and one layout. At that address with other strides, `x` is read before `out` is written.
    """
    if x.data_ptr() != out.data_ptr():
        copy(out, x)
    elif x.stride() != out.stride():
        copy(out, x.clone())
