"""Bind operations of an unrolled program to a machine's registers and kernels: what all machines do alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hostir.ir.regions import dense_strides
from hostir.runtime.kernels.table import REPEATABLE, Kernel, repeating
from hostir.runtime.order import NONE
from hostir.runtime.sharding import torch_dtype
from hostir.runtime.symmetric import SharedMemory
from hostir.runtime.unroll import AllocateOp, ComputeOp, CopyOp, UnrolledProgram, ViewOp, overlap

Step = Callable[[], object]


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


# Inputs in place ------------------------------------------------------------------------------------------------------
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
    writes += [((n, rounds), (low, high)) for o in memory.offers for n, rounds, r, low, high in o.touches if r == me]
    for op in unrolled.ops:
        home = own.get(unrolled.buffers[op.out]) if isinstance(op, CopyOp) else None
        if isinstance(op, CopyOp) and op.x in found and home is not None and (*home, me) not in memory.read:
            alone = sum(home == place and overlap(at[op.out], [extent]) for place, extent in writes) == 1
            found[op.x] = op.out if alone else found[op.x]
    return tuple(found.values())
