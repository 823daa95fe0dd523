"""Random inputs of a program."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hostir.ir.op import Codec, Value
from hostir.ir.program import Program
from hostir.ir.types import bind_shape
from hostir.kernels.dtypes import torch_dtype
from hostir.machines.simulated.scheduler import check_seed


def random_inputs(
    program: Program, sizes: Mapping[str, int], seed: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Return unsharded inputs with random elements from a normal distribution.

    The same seed and device type give the same inputs. The mean is 0, and the standard deviation is 1. But for an input
    that becomes the right side of a matmul or linear with K contracted elements, the standard deviation is 1/sqrt(K).
    Then the products have a standard deviation of about 1, and f16 does not overflow.
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
    """Return a map from names of values to standard deviations, for values that become the right side of a contraction.

    If the right side is a view of another value, or is computed from only one other value, the map has the name of that
    other value instead.
    """
    origin: dict[str, str] = {}  # by name of a value: the value that it views, or the only one it is computed from
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
