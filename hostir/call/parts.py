"""Parts of sharded tensors. A tensor can be cut into the parts of the ranks, and assembled from these parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch

from hostir.ir.source import error
from hostir.ir.types import Factor, Mesh, TensorType, bind_shape
from hostir.kernels.dtypes import BITS


def shard(tensor: torch.Tensor, type: TensorType, rank: int, sizes: Mapping[str, int]) -> torch.Tensor | None:
    """Return a contiguous copy of one rank's part of an unsharded tensor; None for a rank outside the mesh.

    If the type is a partial sum over a mesh axis of n ranks, each of the n ranks gets every n-th element, and zeros in
    place of the other elements. So the parts add up to `tensor` without rounding.
    """
    mesh = type.mesh
    if mesh is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    if rank not in mesh.devices:
        return None
    check_shape(tensor, type, sizes)
    split, at = _split(type, mesh, sizes, lambda axis: mesh.coordinate(rank, axis))
    part = torch.empty(bind_shape(type.local_shape, sizes), dtype=tensor.dtype, device=tensor.device)
    part.copy_(tensor.reshape(split)[at].reshape(part.shape))
    for axis in type.partial:
        flat, place = part.view(-1), mesh.coordinate(rank, axis)
        for other in range(mesh.size(axis)):
            if other != place:
                flat[other :: mesh.size(axis)] = 0
    return part


def assemble(
    parts: Sequence[torch.Tensor | None], type: TensorType, sizes: Mapping[str, int], *, rounded: bool = True
) -> torch.Tensor:
    """Return the unsharded tensor that consists of the parts of all ranks (`parts[rank]`): the inverse of `shard`.

    Partial sums are added in float64, in the order of the ranks. If `rounded`, the sum is rounded once to the dtype of
    the parts. Otherwise it stays in float64. Raises HostIRError if a part is missing or has the wrong shape, or if
    parts that must be copies of each other differ in a bit.
    """
    mesh = type.mesh
    if mesh is None:
        mesh = Mesh("all", ("rank",), (len(parts),), tuple(range(len(parts))))
    shape = bind_shape(type.local_shape, sizes)
    held = {rank: _part(parts, rank, type, shape) for rank in mesh.devices}
    first = held[mesh.devices[0]]
    dtype = first.dtype if rounded or not type.partial else torch.float64
    unsharded = first.new_empty(bind_shape(type.shape, sizes), dtype=dtype)
    sharding = {mark for axis in type.axes for mark in axis.marks if mark in mesh.axes}
    loose = [axis for axis in mesh.axes if axis not in sharding]
    for place in product(*(range(mesh.size(axis)) if axis in sharding else (0,) for axis in mesh.axes)):
        where = dict(zip(mesh.axes, place, strict=True))
        copies: dict[tuple[int, ...], list[int]] = {}
        for step in product(*(range(mesh.size(axis)) for axis in loose)):
            there = {**where, **dict(zip(loose, step, strict=True))}
            share = tuple(there[axis] for axis in type.partial)
            copies.setdefault(share, []).append(_device(mesh, there))
        for ranks in copies.values():
            _agree(ranks, held, type)
        block = _added([held[ranks[0]] for ranks in copies.values()])
        split, at = _split(type, mesh, sizes, where.__getitem__)
        target = unsharded.view(split)[at]
        target.copy_(block.reshape(target.shape))
    return unsharded


def check_shape(tensor: torch.Tensor, type: TensorType, sizes: Mapping[str, int]) -> None:
    """Raise HostIRError unless an unsharded tensor has the shape of its type."""
    expected = bind_shape(type.shape, sizes)
    if tuple(tensor.shape) != expected:
        raise error(f"a tensor of shape {list(tensor.shape)} is not {type}", expected=f"shape {list(expected)}")


def _split(
    type: TensorType, mesh: Mesh, sizes: Mapping[str, int], coordinate: Callable[[str], int]
) -> tuple[list[int], tuple[int | slice, ...]]:
    """Return a shape in which the unsharded tensor is viewed, and the index of one rank's part in this view.

    The view splits each sharded factor of an axis into two axes: one for the ranks, and one for the elements of a rank.
    `coordinate` returns the rank's position on a mesh axis.
    """
    shape: list[int] = []
    at: list[int | slice] = []
    for axis in type.axes:
        for factor in axis.factors:
            if factor.on in mesh.axes:
                shape += [mesh.size(factor.on), _within(factor, mesh, sizes)]
                at += [coordinate(factor.on), slice(None)]
            else:
                shape.append(factor.extent.bind(sizes))
                at.append(slice(None))
    return shape, tuple(at)


def _within(factor: Factor, mesh: Mesh, sizes: Mapping[str, int]) -> int:
    return (factor.extent / mesh.size(factor.on or "")).bind(sizes)


def _device(mesh: Mesh, where: Mapping[str, int]) -> int:
    index = 0
    for axis, size in zip(mesh.axes, mesh.shape, strict=True):
        index = index * size + where[axis]
    return mesh.devices[index]


def _part(parts: Sequence[torch.Tensor | None], rank: int, type: TensorType, shape: tuple[int, ...]) -> torch.Tensor:
    part = parts[rank] if rank < len(parts) else None
    if part is None or tuple(part.shape) != shape:
        problem = "is missing" if part is None else f"has shape {list(part.shape)}"
        raise error(f"the part of rank {rank} of a tensor {type} {problem}", expected=f"shape {list(shape)}")
    return part


def _added(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of blocks in float64, with only one temporary float64 tensor.

    A single block is returned unchanged.
    """
    if len(blocks) == 1:
        return blocks[0]
    total = blocks[0].to(torch.float64, copy=True)
    for block in blocks[1:]:
        total += block
    return total


def _agree(ranks: Sequence[int], held: Mapping[int, torch.Tensor], type: TensorType) -> None:
    """Raise HostIRError unless the parts of these ranks are equal bit for bit. NaNs with the same bits are equal."""
    bits = BITS[held[ranks[0]].element_size()]
    first = held[ranks[0]].contiguous().view(bits)
    if odd := [rank for rank in ranks[1:] if not torch.equal(held[rank].contiguous().view(bits), first)]:
        raise error(
            f"copies of a tensor {type} differ: ranks {', '.join(map(str, odd))} from rank {ranks[0]}",
            expected="the same bits on every rank that holds a copy",
            hint="a rank read data that was not ready: look for a missing wait or synchronize",
        )
