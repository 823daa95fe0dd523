"""Closures that carry out the operations of a plan: allocations, views, computations and copies within a rank.

The gloo machine and the CUDA machine use them. The closures of a plan work on one list of registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from math import prod
from typing import Any

import torch

from hostir.ir.machine import Done
from hostir.ir.regions import dense_strides
from hostir.job.offers import WORKSPACE
from hostir.job.symmetric import SharedMemory, touches
from hostir.kernels.contractions import REPEATABLE
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.layout import row_pieces, source_pieces, with_rows
from hostir.kernels.repeats import Kernel, repeating
from hostir.plan.lifetimes import input_in_workspace
from hostir.plan.operations import NONE, AllocateOp, ComputeOp, CopyOp, ViewOp, overlap
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram

Part = torch.Tensor | None  # a rank's shard of a tensor; None if the rank is not in the tensor's mesh

# An executor keeps this many plans, the most recently used ones. Shapes may never repeat, and a plan is made quickly.
MAX_PLANS = 16
Step = Callable[[], object]
Copy = Callable[[torch.Tensor, torch.Tensor], object]  # copies the second tensor to the first
AddUp = Callable[..., object]  # has the signature of aten.add_up


def bind_allocate(op: AllocateOp, registers: list[Any], device: torch.device) -> Step:
    """Return the closure that allocates a buffer and puts it into its register.

    The closure does nothing if the register already holds a tensor: the tensor that the caller passed for an output.
    """
    out, shape, strides, dtype = op.out, op.shape, dense_strides(op.shape), torch_dtype(op.dtype)
    empty = torch.empty_strided  # takes two thirds of the time of torch.empty

    def step() -> None:
        if registers[out] is None:
            registers[out] = empty(shape, strides, dtype=dtype, device=device)

    return step


def bind_view(op: ViewOp, registers: list[Any]) -> Step:
    """Return the closure that makes a view of a tensor in a register and puts it into another register."""
    out, x, shape, stride, offset, index = op.out, op.x, op.shape, op.stride, op.offset, op.index

    def item() -> None:
        registers[out] = registers[x][index]

    def strided() -> None:
        buffer = registers[x]  # an input may start anywhere in its storage
        registers[out] = buffer.as_strided(shape, stride, buffer.storage_offset() + offset)

    return strided if index is None else item


def bind_compute(op: ComputeOp, registers: list[Any], kernel: Kernel) -> Step:
    """Return the closure that runs the kernel of a computation on the tensors in its registers."""
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


def place(outs: Sequence[Part], homes: Sequence[int], registers: list[Any]) -> None:
    """Put the caller's output tensors into the registers of the buffers that they replace. This is called before a run.

    `homes` holds a register for each output. It is NONE if the caller's tensor replaces no buffer.
    """
    for home, x in zip(homes, outs, strict=True):
        if home != NONE:
            registers[home] = x


def deliver(outs: Sequence[Part], outputs: Sequence[int], registers: Sequence[Any]) -> tuple[Part, ...]:
    """Copy the outputs to the caller's tensors, and return these tensors. This is called after a run.

    Outputs that the run has already written to the caller's tensors are not copied.
    """
    for register, x in zip(outputs, outs, strict=True):
        if x is not None and x is not registers[register]:
            x.copy_(registers[register])
    return tuple(outs)


def compute_block(
    op: ComputeOp, registers: Sequence[Any], kernel: Kernel, block: int, blocks: int, add_up: AddUp | None = None
) -> None:
    """Compute one block of the rows of a product or a sum. The rows are split into `blocks` equal blocks.

    A machine computes block by block if it has no kernel that waits for flags or raises flags.

    `add_up` is a function for sums in which `own_rows` replace one source, so that the sources are in two tensors. It
    reads the sources where they are in memory, and its result has the same bits as the sum of unsplit tensors. If
    `add_up` is None, the sources are first copied into one tensor.
    """
    if op.computation == "sum":
        _sum_block(op, registers, kernel, block, blocks, add_up)
        return
    out, a, *others = registers[op.out], *(registers[x] for x in op.operands)
    ready = op.ready
    own_rows = (
        registers[ready.own_rows]
        if ready is not None and ready.own_rows is not None and block in ready.replaced
        else None
    )
    of_rows = ready.along if ready is not None else op.done.along if op.done is not None else ()
    if not of_rows:
        for out_part, a_part in with_rows(out, a, block, blocks, own_rows):
            kernel(out_part, a_part, *others, **op.options)
        return
    height = out.shape[:-1].numel() // blocks
    first = block * height
    left = (a, first) if own_rows is None else (own_rows, 0)
    parts = [(out, first), left, *((others[n - 1], first) for n in of_rows)]
    by_source = ready is not None and ready.sources
    pieces = source_pieces(parts, by_source, out.shape[-2], height) if by_source else row_pieces(parts, height)
    for _, (out_part, a_part, *cut_alike) in pieces:
        for n, rows in zip(of_rows, cut_alike, strict=True):
            others[n - 1] = rows
        kernel(out_part, a_part, *others, **op.options)


def _sum_block(
    op: ComputeOp, registers: Sequence[Any], kernel: Kernel, block: int, blocks: int, add_up: AddUp | None
) -> None:
    """Compute one block of the rows of a sum. The result has the same bits as the sum of unsplit tensors.

    The arguments are as in `compute_block`.
    """
    out, x, ready = registers[op.out], registers[op.operands[0]].movedim(op.options["axis"], 0), op.ready
    height = out.shape[:-1].numel() // blocks
    own_rows = [] if ready is None or ready.own_rows is None else [registers[ready.own_rows]]
    addends = [y.expand_as(out) for y in (registers[register] for register in op.operands[1:]) if y is not None]
    options = {**op.options, "axis": 0}
    rows = [(part, block * height) for part in (out, *addends, *x[:1], *own_rows)]
    for _, (target, *views) in row_pieces(rows, height):
        added, views = views[: len(addends)], views[len(addends) :]
        if not len(x):
            kernel(target, x.new_empty(0, *target.shape), *added, **options)
            continue
        first = views[0]
        sources = first.as_strided((len(x), *first.shape), (x.stride(0), *first.stride()), first.storage_offset())
        if ready is None or not own_rows:
            kernel(target, sources, *added, **options)
            continue
        parts = list(sources)
        parts[ready.replaced[0] // ready.results] = views[1]
        if add_up is not None:
            add_up(target, [*parts, *added], activation=options.get("activation", ""))
        else:
            kernel(target, torch.stack(parts), *added, **options)


def completed(done: Done, block: int, blocks: int, computed: Set[int]) -> list[int]:
    """Return the indices of the flags to raise after block `block` of a computation that has `blocks` blocks.

    A flag rises once all rows that it announces have been computed. `computed` holds the blocks computed so far.
    """
    flags = range(done.blocks)
    rows = {i: range(i * blocks // done.blocks, -(-(i + 1) * blocks // done.blocks)) for i in flags}
    return [flag for flag, needed in rows.items() if block in needed and computed >= set(needed)]


def places(unrolled: UnrolledProgram, memory: SharedMemory | None, registers: Sequence[Any]) -> tuple[Part, ...]:
    """Return, for each input, the symmetric memory to which the program copies it; None if there is no such copy.

    The caller can write the input directly to this memory, which saves the copy. `registers` are those of the plan.

    Memory that peers read gives None: a peer may read it until this rank's next call waits for the peer, but the caller
    writes the input before that call. Only the workspace of collectives is free to be written after a call. Memory that
    the program also writes in another way gives None, because one of the two writes would be lost.
    """
    targets: dict[int, Part] = dict.fromkeys(unrolled.inputs)
    if memory is None:
        return tuple(targets.values())
    me = unrolled.rank
    if (x := input_in_workspace(unrolled)) is not None:
        targets[x] = workspace(unrolled, memory, x)
    local = {register: op.home for register, op in unrolled.symmetric.items() if op.rank == me}
    at = unrolled.extents
    writes = [(home, at[r]) for op in unrolled.ops for r in op.writes if (home := local.get(unrolled.buffers[r]))]
    peers = (p for p, offer in enumerate(memory.offers) if p != me and any(r == me for *_, r in offer.uses))
    remote = (touches(unroll(unrolled.program, peer, unrolled.sizes)) for peer in peers)
    writes += [((n, rounds), (low, high)) for ranges in remote for n, rounds, r, low, high in ranges if r == me]
    for op in unrolled.ops:
        home = local.get(unrolled.buffers[op.out]) if isinstance(op, CopyOp) else None
        if isinstance(op, CopyOp) and op.x in targets and home is not None and (*home, me) not in memory.read:
            writers = sum(home == place and overlap(at[op.out], [extent]) for place, extent in writes)
            targets[op.x] = registers[op.out] if writers == 1 else targets[op.x]
    return tuple(targets.values())


def workspace(unrolled: UnrolledProgram, memory: SharedMemory, register: int) -> torch.Tensor:
    """Return the beginning of this rank's workspace, with the shape and the dtype of the tensor in a register."""
    shape, buffer = unrolled.layouts[register].shape, unrolled.buffers[register]
    flat = memory.flat[WORKSPACE, unrolled.rank].view(torch_dtype(unrolled.dtypes[buffer]))
    return flat[: prod(shape)].view(shape)


def copy_here(out: torch.Tensor, x: torch.Tensor, copy: Copy) -> None:
    """Copy `x` to `out` within this rank's memory. The function `copy` makes the copy.

    If `x` and `out` have the same address and strides, do nothing: the caller has written `x` in place. If they have
    the same address but different strides, first copy `x` to new memory, so that all of `x` is read before `out` is
    written.
    """
    if x.data_ptr() != out.data_ptr():
        copy(out, x)
    elif x.stride() != out.stride():
        copy(out, x.clone())
