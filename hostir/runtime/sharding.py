"""Between whole tensors and the parts that ranks hold; and the sizes that a call's tensors give to symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch

from hostir.described import described
from hostir.ir.op import Codec
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.source import error
from hostir.ir.tensor_ops import Linear, Matmul
from hostir.ir.types import FLAG, DType, Factor, Mesh, TensorType, bind_shape
from hostir.ir.values import Value
from hostir.runtime.tasks import check_seed
from hostir.runtime.tensors import without_plain_memory

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, FLAG.name: torch.int32}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(dtype: DType) -> torch.dtype:
    """What torch calls an element type."""
    return TORCH[dtype.name]


# Parts ------------------------------------------------------------------------------------------------------------
def shard(tensor: torch.Tensor, type: TensorType, rank: int, sizes: Mapping[str, int]) -> torch.Tensor | None:
    """The part of a whole tensor that one rank holds, dense and its own memory; None for a rank outside the mesh.

    Of a partial sum each rank along the partial axes holds every n-th element and zeros elsewhere, so that the parts
    add up to `tensor` without rounding.
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
        flat, mine = part.view(-1), mesh.coordinate(rank, axis)
        for other in range(mesh.size(axis)):
            if other != mine:
                flat[other :: mesh.size(axis)] = 0
    return part


def assemble(
    parts: Sequence[torch.Tensor | None], type: TensorType, sizes: Mapping[str, int], *, rounded: bool = True
) -> torch.Tensor:
    """The whole tensor, from every rank's part (`parts[rank]`): the inverse of `shard`.

    Partial sums are added in float64, in the order of the ranks, and rounded once; unless `rounded`, not at all, and
    their whole is of float64. Raises HostIRError where a part is missing or has the wrong shape, or where parts that
    must be copies of each other differ in a bit.
    """
    mesh = type.mesh
    if mesh is None:
        mesh = Mesh("all", ("rank",), (len(parts),), tuple(range(len(parts))))
    shape = bind_shape(type.local_shape, sizes)
    held = {rank: _part(parts, rank, type, shape) for rank in mesh.devices}
    first = held[mesh.devices[0]]
    dtype = first.dtype if rounded or not type.partial else torch.float64
    whole = first.new_empty(bind_shape(type.shape, sizes), dtype=dtype)
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
        target = whole.view(split)[at]
        target.copy_(block.reshape(target.shape))
    return whole


def check_shape(tensor: torch.Tensor, type: TensorType, sizes: Mapping[str, int]) -> None:
    """Raises unless a whole tensor has the shape that the type gives it."""
    expected = bind_shape(type.shape, sizes)
    if tuple(tensor.shape) != expected:
        raise error(f"a tensor of shape {list(tensor.shape)} is not {type}", expected=f"shape {list(expected)}")


def _split(
    type: TensorType, mesh: Mesh, sizes: Mapping[str, int], coordinate: Callable[[str], int]
) -> tuple[list[int], tuple[int | slice, ...]]:
    """The shape in which each sharded factor is an axis of ranks and one within a rank; and where one rank stands."""
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
        found = "none" if part is None else f"shape {list(part.shape)}"
        raise error(f"the part of rank {rank} of a tensor {type}: {found}", expected=f"shape {list(shape)}")
    return part


def _added(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in float64, made with one tensor of that size; of a single block, itself."""
    if len(blocks) == 1:
        return blocks[0]
    total = blocks[0].to(torch.float64, copy=True)
    for block in blocks[1:]:
        total += block
    return total


def _agree(ranks: Sequence[int], held: Mapping[int, torch.Tensor], type: TensorType) -> None:
    """Raises unless these ranks hold the same bits; NaN equals itself here."""
    bits = BITS[held[ranks[0]].element_size()]
    first = held[ranks[0]].contiguous().view(bits)
    if odd := [rank for rank in ranks[1:] if not torch.equal(held[rank].contiguous().view(bits), first)]:
        raise error(
            f"copies of a tensor {type} differ: ranks {', '.join(map(str, odd))} from rank {ranks[0]}",
            expected="the same bits on every rank that holds a copy",
            hint="a rank read what was not ready: look for a missing wait or synchronize",
        )


# Sizes ------------------------------------------------------------------------------------------------------------
def bind_sizes(
    program: Program,
    inputs: Sequence[torch.Tensor | None],
    given: Mapping[str, int] | None = None,
    *,
    rank: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, int]:
    """Every symbol of the program, from the shapes of a call's inputs and from those `given`.

    `inputs` are this rank's parts, or whole tensors where `rank` is None. Raises HostIRError for an input of the wrong
    number, shape, dtype or device (`device` None: any), and for a symbol that neither inputs nor `given` bind.
    """
    sizes = solve_sizes(program, inputs, program.given_sizes(given), rank=rank, device=device)
    program.check_sizes(sizes)
    return sizes


def solve_sizes(
    program: Program,
    inputs: Sequence[torch.Tensor | None],
    given: Mapping[str, int],
    *,
    rank: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, int]:
    """As `bind_sizes`, but symbols that stand in no input which this rank holds stay unbound."""
    if len(inputs) != len(program.inputs):
        names = ", ".join(map(str, program.inputs))
        raise error(f"@{program.name} was given {len(inputs)} inputs", expected=f"{len(program.inputs)}: {names}")
    held = [(v, t) for v, t in zip(program.inputs, inputs, strict=True) if _check_input(v, t, rank, device)]
    sizes, origin = dict(given), dict.fromkeys(given, "given")
    equations = [(v, s, e) for v, t in held if t is not None for s, e in zip(_shape(v, rank), t.shape, strict=True)]
    while found := next(((v, n) for v, s, e in equations if (n := _solve(s, e, sizes))), None):
        value, (name, extent) = found
        sizes[name], origin[name] = extent, f"from {value}"
    program.check_whole(sizes)
    for value, tensor in held:
        if tensor is not None and value.tensor.names <= sizes.keys():
            _check_extents(value, tensor, rank, sizes, origin)
    return sizes


def _shape(value: Value, rank: int | None) -> tuple[Size, ...]:
    return value.tensor.shape if rank is None else value.tensor.local_shape


def _check_input(
    value: Value, tensor: torch.Tensor | None, rank: int | None, device: torch.device | str | None
) -> bool:
    """Whether the rank holds the input; raises where it should not, and for a wrong dtype, device or number of axes."""
    type, mesh = value.tensor, value.tensor.mesh
    if rank is not None and mesh is not None and rank not in mesh.devices:
        if tensor is not None:
            raise error(f"the input {value} lies on {mesh}, without rank {rank}", value.span, expected="None for it")
        return False
    what = f"input {value}" if rank is None else f"input {value} of rank {rank}"
    if not isinstance(tensor, torch.Tensor):
        raise error(f"{what} is {described(tensor)}", value.span, expected=f"a tensor {type}")
    if odd := without_plain_memory(tensor):
        raise error(f"{what} is {odd.what}", value.span, expected=f"a dense tensor {type}", hint=odd.hint)
    if tensor.dtype != torch_dtype(type.dtype):
        raise error(f"{what} has dtype {tensor.dtype}", value.span, expected=f"{torch_dtype(type.dtype)}")
    if device is not None and not _same_device(tensor.device, torch.device(device)):
        raise error(f"{what} is on {tensor.device}", value.span, expected=f"{device}", hint=f"move it: .to('{device}')")
    if tensor.ndim != len(type.axes):
        shape = ", ".join(map(str, _shape(value, rank)))
        raise error(f"{what} has shape {list(tensor.shape)}", value.span, expected=f"{len(type.axes)} axes: [{shape}]")
    return True


def _same_device(got: torch.device, expected: torch.device) -> bool:
    return got.type == expected.type and expected.index in (None, got.index)


def _solve(size: Size, extent: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """The one unbound symbol of `size`, and its value where `size` is `extent`; None unless just one is unbound."""
    unbound = [(name, power) for name, power in size.symbols if name not in sizes]
    if len(unbound) != 1 or unbound[0][1] < 1:
        return None
    name, power = unbound[0]
    num, den = extent * size.den, size.num
    for other, exponent in size.symbols:
        if other != name:
            num, den = num * sizes[other] ** max(0, -exponent), den * sizes[other] ** max(0, exponent)
    if not den:
        return None  # another symbol is 0, and any value would do for this one
    return name, round((num / den) ** (1 / power))  # where it does not fit exactly, the comparison of shapes says so


def _check_extents(
    value: Value, tensor: torch.Tensor, rank: int | None, sizes: Mapping[str, int], origin: Mapping[str, str]
) -> None:
    expected = list(bind_shape(_shape(value, rank), sizes))
    if list(tensor.shape) != expected:
        part = "" if rank is None else f"the part of rank {rank} of "
        bound = ", ".join(f"{name}={sizes[name]} {origin[name]}" for name in sorted(value.tensor.names))
        raise error(
            f"input {value} has shape {list(tensor.shape)}",
            value.span,
            expected=f"{expected}, {part}{value.tensor}" + (f" with {bound}" if bound else ""),
        )


# Data -------------------------------------------------------------------------------------------------------------
def random_inputs(
    program: Program, sizes: Mapping[str, int], seed: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Whole tensors for the inputs, normally distributed with mean 0, the same for the same seed and kind of device.

    Their standard deviation is 1, or 1/sqrt(K) for an input that reaches the right side of a matmul or linear with K
    contracted elements: products are then about 1 as well, and f16 does not overflow.
    """
    generator = torch.Generator(device).manual_seed(check_seed(seed) % (1 << 64))  # torch takes 64 bits
    scales = _scales(program, sizes)

    def normal(value: Value) -> torch.Tensor:
        shape = bind_shape(value.tensor.shape, sizes)
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        return (x * scales.get(value.name, 1.0)).to(torch_dtype(value.tensor.dtype))

    return [normal(value) for value in program.inputs]


def _scales(program: Program, sizes: Mapping[str, int]) -> dict[str, float]:
    """The standard deviation of each input, by name, that is the right side of a contraction."""
    origin: dict[str, str] = {}  # of a name: what it is a view of, or was computed from alone
    scales: dict[str, float] = {}

    def root(name: str) -> str:
        while name in origin:
            name = origin[name]
        return name

    for s in program.walk():
        if isinstance(s, Matmul | Linear):
            right, axis = (s.b, 0) if isinstance(s, Matmul) else (s.weight, 1)
            contracted = right.tensor.shape[axis].bind(sizes)
            scales[root(right.name)] = max(contracted, 1) ** -0.5
        sources = list(s.values(Codec.READ, Codec.ALIAS))
        target = next(s.values(Codec.WRITE, Codec.DEFINE), None)  # a communication defines its handle as well
        if len(sources) == 1 and target is not None and root(target.name) != root(sources[0].name):
            origin[root(target.name)] = root(sources[0].name)
    return scales
