"""Random inputs of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from hostir.ir.op import Codec, Statement, Value
from hostir.ir.program import Program
from hostir.ir.types import INTEGERS, bind_shape
from hostir.kernels.dtypes import torch_dtype
from hostir.machines.simulated.scheduler import check_seed


def random_inputs(
    program: Program, sizes: Mapping[str, int], seed: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Return unsharded inputs with random elements: numbers from a normal distribution, and valid indices.

    The same seed and device type give the same inputs. The mean is 0, and the standard deviation is 1. But for an input
    that becomes the right side of a matmul or linear with K contracted elements, the standard deviation is 1/sqrt(K).
    Then the products have a standard deviation of about 1, and f16 does not overflow.

    Indices are valid for the statements that read them. Offsets of groups are drawn in three ways, which alternate with
    the seed: groups of any size; few groups with rows; all rows in one group.
    """
    generator = torch.Generator(device).manual_seed(check_seed(seed) % (1 << 64))  # torch takes 64 bits
    scales, limits = _scales(program, sizes), _limits(program, sizes)

    def normal(value: Value) -> torch.Tensor:
        shape = bind_shape(value.tensor.shape, sizes)
        dtype = torch_dtype(value.tensor.dtype)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        x = torch.randn(shape, generator=generator, dtype=wide, device=device)
        return (x * scales.get(value.name, 1.0)).to(dtype)

    def indices(value: Value) -> torch.Tensor:
        shape, dtype = bind_shape(value.tensor.shape, sizes), torch_dtype(value.tensor.dtype)
        limit, ascending = limits.get(value.name, (1, False))

        def drawn(below: int, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randint(max(below, 1), shape, generator=generator, dtype=torch.int64, device=device)

        if not ascending:
            return drawn(limit, shape).to(dtype)
        if seed % 3 == 0:
            offsets = drawn(limit + 1, shape)
        elif seed % 3 == 1:
            offsets = drawn(3, shape) * (limit // 2)
        else:
            offsets = (drawn(2, shape) * limit).to(torch.int64)
            offsets[..., :1], offsets[..., -1:] = 0, limit
        return offsets.sort(-1).values.to(dtype)

    return [indices(v) if v.tensor.dtype.name in INTEGERS else normal(v) for v in program.inputs]


def _limits(program: Program, sizes: Mapping[str, int]) -> dict[str, tuple[int, bool]]:
    """Return a map from names of values that hold indices to their limit, and to True if they are offsets of groups.

    The limit is the smallest `limit` of the statements that read the indices.
    """
    limits: dict[str, tuple[int, bool]] = {}
    for s, root in _with_roots(program):
        for operand in s.index_operands:
            name, limit = root(operand.indices.name), operand.limit.bind(sizes)
            known, ascending = limits.get(name, (limit, False))
            limits[name] = min(limit, known), ascending or operand.ascending
    return limits


def _scales(program: Program, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return a map from names of values that become the right side of a contraction to their standard deviations."""
    scales: dict[str, float] = {}
    for s, root in _with_roots(program):
        if s.right_side is not None:
            right, axis = s.right_side
            contracted = right.tensor.shape[axis].bind(sizes)
            scales[root(right.name)] = max(contracted, 1) ** -0.5
    return scales


def _with_roots(program: Program) -> Iterator[tuple[Statement, Callable[[str], str]]]:
    """Yield each statement, and a function that returns the name of the value from which an operand comes.

    The function takes the name of the operand. It returns the name of another value if the operand is a view of this
    value, or is computed from this value only.
    """
    origin: dict[str, str] = {}

    def root(name: str) -> str:
        while name in origin:
            name = origin[name]
        return name

    for s in program.walk():
        yield s, root
        sources = list(s.values(Codec.READ, Codec.ALIAS))
        target = next(s.values(Codec.WRITE, Codec.DEFINE), None)  # a communication defines its handle as well
        if len(sources) == 1 and target is not None and root(target.name) != root(sources[0].name):
            origin[root(target.name)] = root(sources[0].name)
