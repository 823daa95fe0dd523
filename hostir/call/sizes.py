"""Find the sizes of a program's symbols from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hostir.call.tensors import without_plain_memory
from hostir.ir.op import Value
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.source import counted, described, error
from hostir.ir.types import bind_shape
from hostir.kernels.dtypes import torch_dtype


def bind_sizes(
    program: Program,
    inputs: Sequence[torch.Tensor | None],
    given: Mapping[str, int] | None = None,
    *,
    rank: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, int]:
    """Return the value of every symbol of the program.

    The values follow from the shapes of a call's inputs, and from `given`. `inputs` are this rank's parts, or unsharded
    tensors if `rank` is None. They must be on `device`, unless it is None. Raises HostIRError for a wrong number of
    inputs, for an input of the wrong shape, dtype or device, and for a symbol with a value that follows neither from
    the inputs nor from `given`.
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
    """Return the same as `bind_sizes`, but leave out the symbols that occur only in inputs that this rank lacks."""
    if len(inputs) != len(program.inputs):
        names = ", ".join(map(str, program.inputs))
        message = f"@{program.name} was given {counted(len(inputs), 'input')}"
        raise error(message, expected=f"{len(program.inputs)}: {names}")
    held = [(v, t) for v, t in zip(program.inputs, inputs, strict=True) if _check_input(v, t, rank, device)]
    sizes, origin = dict(given), dict.fromkeys(given, "given")
    equations = [(v, s, e) for v, t in held if t is not None for s, e in zip(_shape(v, rank), t.shape, strict=True)]
    while solution := next(((v, n) for v, s, e in equations if (n := _solve(s, e, sizes))), None):
        value, (name, extent) = solution
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
    """Return True if the rank holds a part of the input.

    Raises HostIRError if the input is not a tensor, has no plain memory, or has the wrong dtype, device or number of
    axes. It does not check extents.
    """
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
    """Solve `size == extent` for the only unbound symbol of `size`, and return the symbol and its value.

    Return None if `size` has no unbound symbol, if it has several, or if every value of the symbol solves the equation.
    """
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
