"""Convert between whole tensors and the parts that ranks hold; find sizes and memory needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from hostir.ir.op import Codec, Statement, Value
from hostir.ir.program import Program
from hostir.ir.regions import Region
from hostir.ir.sizes import Size
from hostir.ir.source import HostIRError, amount, counted, described, error
from hostir.ir.types import FLAG, DType, Factor, Mesh, TensorType, bind_shape
from hostir.runtime.simulated.tasks import check_seed

# Tensors that cannot be used ------------------------------------------------------------------------------------------
# Arguments that are not tensors, or tensors whose memory hostir cannot use directly.


class Odd(NamedTuple):
    """A kind of unsupported tensor, and a hint for the user."""

    what: str
    hint: str


def without_plain_memory(x: torch.Tensor) -> Odd | None:
    """Return the kind of a tensor whose elements are not in plain strided memory; None for all others."""
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # a wrapper of other tensors
        hint = "pass what this rank has of it, .to_local()" if hasattr(x, "to_local") else "pass a plain one"
        return Odd(f"a {type(x).__name__}", hint)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return Odd("a tensor of torch.func", "call outside torch.vmap and its like")
    if torch.nn.parameter.is_lazy(x):
        return Odd("a parameter without a shape", "initialize it first")
    if x.is_nested:
        return Odd("a nested tensor", "pass a plain one")
    if x.layout is not torch.strided:
        return Odd(f"of layout {x.layout}", "pass it .to_dense()")
    if x.is_neg():
        return Odd("a view that negates its memory", "pass it .resolve_neg()")
    if x._is_zerotensor():
        return Odd("zeros without memory", "pass its .clone()")
    return None


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two plain tensors of one device have a byte in common."""
    (low, high), (bottom, top) = _stretch(x), _stretch(y)
    if high <= bottom or top <= low:
        return False
    start = min(low, bottom)
    return _bytes_of(x, low - start).meets(_bytes_of(y, bottom - start))


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether elements may share memory: unless each stride is longer than all that the shorter ones reach."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach and x.numel():
            return True
        reach += (size - 1) * stride
    return False


def _stretch(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and past its last; equal ones if it has no elements."""
    start = x.data_ptr()
    if not x.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def _bytes_of(x: torch.Tensor, offset: int) -> Region:
    axes = [(size, stride * x.element_size()) for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    shape, strides = zip(*axes, (x.element_size(), 1), strict=True)
    return Region.of(offset, shape, strides)


# Parts and sizes ------------------------------------------------------------------------------------------------------
# Convert between whole tensors and the parts that ranks hold, and bind symbols to the sizes of a call's tensors.

FLOATS = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TORCH = {**FLOATS, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, FLAG.name: torch.int64}
Part = torch.Tensor | None  # what a rank holds of a tensor: None if it is no device of its mesh
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype for an element type."""
    return TORCH[dtype.name]


# Parts ------------------------------------------------------------------------------------------------------------
def shard(tensor: torch.Tensor, type: TensorType, rank: int, sizes: Mapping[str, int]) -> torch.Tensor | None:
    """Return one rank's part of a whole tensor, dense in its own memory; None for a rank outside the mesh.

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
    """Return the whole tensor from every rank's part (`parts[rank]`): the inverse of `shard`.

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
    """Raise HostIRError unless a whole tensor has the shape that the type gives it."""
    expected = bind_shape(type.shape, sizes)
    if tuple(tensor.shape) != expected:
        raise error(f"a tensor of shape {list(tensor.shape)} is not {type}", expected=f"shape {list(expected)}")


def _split(
    type: TensorType, mesh: Mesh, sizes: Mapping[str, int], coordinate: Callable[[str], int]
) -> tuple[list[int], tuple[int | slice, ...]]:
    """Return the shape with each sharded factor split into ranks and the rest, and a rank's index in it."""
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
    """Return the sum in float64, with one temporary of that size; of a single block, the block itself."""
    if len(blocks) == 1:
        return blocks[0]
    total = blocks[0].to(torch.float64, copy=True)
    for block in blocks[1:]:
        total += block
    return total


def _agree(ranks: Sequence[int], held: Mapping[int, torch.Tensor], type: TensorType) -> None:
    """Raise HostIRError unless these ranks hold the same bits; NaN equals itself here."""
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
    """Return the value of every symbol of the program, from the shapes of a call's inputs and those `given`.

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
    """Do as `bind_sizes`, but leave symbols unbound that occur only in inputs that this rank does not hold."""
    if len(inputs) != len(program.inputs):
        names = ", ".join(map(str, program.inputs))
        message = f"@{program.name} was given {counted(len(inputs), 'input')}"
        raise error(message, expected=f"{len(program.inputs)}: {names}")
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
    """Whether the rank holds the input; raises if it should not, and for a wrong dtype, device or number of axes."""
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
    """Return the one unbound symbol of `size`, and its value if `size` is `extent`; None unless just one is unbound."""
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
    return name, round((num / den) ** (1 / power))  # if it does not fit exactly, the comparison of shapes fails


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
    """Return whole random inputs, normal with mean 0, the same for the same seed and kind of device.

    Their standard deviation is 1, or 1/sqrt(K) for an input that reaches the right side of a matmul or linear with K
    contracted elements: products are then about 1 as well, and f16 does not overflow.
    """
    generator = torch.Generator(device).manual_seed(check_seed(seed) % (1 << 64))  # torch takes 64 bits
    scales = _scales(program, sizes)

    def normal(value: Value) -> torch.Tensor:
        shape = bind_shape(value.tensor.shape, sizes)
        dtype = torch_dtype(value.tensor.dtype)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        x = torch.randn(shape, generator=generator, dtype=wide, device=device)
        return (x * scales.get(value.name, 1.0)).to(dtype)

    return [normal(value) for value in program.inputs]


def _scales(program: Program, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the standard deviation of each input, by name, that is the right side of a contraction."""
    origin: dict[str, str] = {}  # by name: the value that it is a view of, or is computed from alone
    scales: dict[str, float] = {}

    def root(name: str) -> str:
        while name in origin:
            name = origin[name]
        return name

    for s in program.walk():
        if s.right_side is not None:
            right, axis = s.right_side
            contracted = right.tensor.shape[axis].bind(sizes)
            scales[root(right.name)] = max(contracted, 1) ** -0.5
        sources = list(s.values(Codec.READ, Codec.ALIAS))
        target = next(s.values(Codec.WRITE, Codec.DEFINE), None)  # a communication defines its handle as well
        if len(sources) == 1 and target is not None and root(target.name) != root(sources[0].name):
            origin[root(target.name)] = root(sources[0].name)
    return scales


# Bytes ----------------------------------------------------------------------------------------------------------------
# The memory that a program takes, and the error if there is less.

SMALLER = "choose smaller sizes, or fewer ranks"
SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


class Room:
    """The bytes that a host program takes for some sizes: those of its whole inputs, and those that ranks hold.

    Ranks hold their parts of inputs and the buffers that are not freed yet. Simulated ranks (`frees=False`) keep all
    buffers, and inputs twice: as the caller gives them, and as the call finds them. What `dense` copies is not counted:
    only the caller knows whether it does.
    """

    def __init__(self, program: Program, sizes: Mapping[str, int], *, frees: bool = True) -> None:
        self.sizes = sizes
        self.frees = frees
        self.inputs = sum(prod(bind_shape(v.tensor.shape, sizes)) * v.tensor.dtype.bytes for v in program.inputs)
        meshes = [mesh.devices for mesh in program.meshes]
        of_meshes = cache(lambda mine: self._of_rank(program, mine))  # ranks of the same meshes hold as much
        self.ranks = [of_meshes(tuple(rank in devices for devices in meshes)) for rank in range(program.ranks)]
        self.name = program.name

    def check(self, total: int, there: int, where: str, has: str, whole: str = "") -> None:
        """Raise HostIRError if `total` bytes are more than are `there`; `has` describes the memory for the message."""
        if total <= there:
            return
        raise error(
            f"@{self.name} takes {amount(total)} {where}: {amount(max(self.ranks, default=0))} a rank, "
            f"and {amount(self.inputs)} for whole inputs{whole}",
            expected=f"at most {amount(there)}, {has}",
            hint=SMALLER,
        )

    def _of_rank(self, program: Program, mine: tuple[bool, ...]) -> int:
        meshes = {mesh.name for mesh, belongs in zip(program.meshes, mine, strict=True) if belongs}
        inputs = sum(self._part(v, meshes) for v in program.inputs)
        return inputs * (1 if self.frees else 2) + self._most(program.body, meshes)[0]

    def _part(self, value: Value, meshes: set[str]) -> int:
        type = value.tensor
        if type.mesh is not None and type.mesh.name not in meshes:
            return 0
        return prod(bind_shape(type.local_shape, self.sizes)) * type.dtype.bytes

    def _most(self, body: tuple[Statement, ...], meshes: set[str]) -> tuple[int, int]:
        """Return the largest number of bytes that a body's buffers take at once, and the bytes left at its end."""
        most = now = 0
        for s in body:
            if s.buffer is not None:
                now += self._part(s.buffer, meshes)
            elif s.freed is not None and self.frees:
                now -= self._part(s.freed, meshes)
            for inner in s.bodies:
                rounds = s.repeats.bind(self.sizes)
                inside, left = self._most(inner, meshes)
                most = max(most, now + left * (rounds - 1) + inside)
                now += left * rounds
            most = max(most, now)
        return most, now


def of_host() -> int:
    """Return the bytes of memory that this host or container has."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def free_here() -> int:
    """Return the bytes of memory that are free on this host, counting what it can swap out."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        left = sum(int(rows[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        left = of_host()
    return min([left, *_limits()])


def _limits() -> Iterator[int]:
    for file in LIMITS:
        with suppress(OSError, ValueError):  # a word instead of a number: there is none
            yield int(Path(file).read_text())


def lacks_memory(problem: BaseException) -> bool:
    """Whether an exception of Python or torch means that it could not allocate."""
    return isinstance(problem, MemoryError) or any(sign in str(problem) for sign in SIGNS)


def out_of_memory(problem: BaseException, what: str = "it") -> HostIRError:
    """Return the diagnostic for an exception for which `lacks_memory` is true."""
    said = f": {str(problem).splitlines()[0]}" if str(problem) else ""
    return error(f"there is not enough memory for {what}{said}", hint=SMALLER)


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise a HostIRError if the block cannot allocate."""
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        if not lacks_memory(problem):
            raise
        raise out_of_memory(problem, what) from problem
