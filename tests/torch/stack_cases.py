"""Random stacks of layers compared with DTensor; test_operators.py starts the ranks.

    STACKS=200 SEED=1 torchrun --standalone --nproc-per-node 4 tests/torch/stack_cases.py

Result and gradients of each stack are compared with float64 on unsharded tensors. Their error and the memory saved for
backward must not exceed those of the same stack by DTensor: parallelize_module with ColwiseParallel, RowwiseParallel
and SequenceParallel, eager.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hostir as hi
import hostir.torch
from hostir.torch import column_parallel_linear, gated_linear, row_parallel_linear
from tests.torch.layer_cases import STRATEGIES
from tests.torch.on_ranks import DEVICE, RANKS, case, group, leaf, main, part, replicated

COUNT = int(os.environ.get("STACKS", "12"))
WIDTH, HIDDEN = 32, 64
SHARDED = {
    "gate": 0,
    "up": 0,
    "bias": 0,
    "down": 1,
}  # the sharded axis of a weight; norms and last biases are replicated
Weights = dict[str, Tensor]


def draws() -> random.Random:
    """Return a source of random choices that is the same on every rank."""
    seed = torch.randint(1 << 31, (1,))
    dist.broadcast(seed, 0)
    return random.Random(int(seed))


def activated(activation: str, hs: list[Tensor]) -> Tensor:
    if activation == "gelu":
        return F.gelu(hs[0])
    return F.silu(hs[0]) * hs[1] if activation == "gated" else torch.tanh(hs[0]) + hs[1]


def normed(x: Tensor, w: Weights) -> Tensor:
    return F.rms_norm(x, (WIDTH,), w["norm"], 1e-5) if "norm" in w else x


# Layers -----------------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """A residual block of two linear layers with an activation between them, and its unsharded weights."""

    activation: str
    weights: Weights

    def exact(self, x: Tensor, w: Weights) -> Tensor:
        full = normed(x, w)
        hs = [F.linear(full, w[name]) for name in ("gate", "up") if name in w]
        hs[-1] = hs[-1] + w["bias"] if "bias" in w else hs[-1]
        y = x + F.linear(activated(self.activation, hs), w["down"])
        return y + w["last"] if "last" in w else y

    def sharded(self, x: Tensor, w: Weights, ranks: Any, axis: int) -> Tensor:
        mine, firsts = normed(x, w), [w[name] for name in ("gate", "up") if name in w]
        if self.activation == "gated" and "bias" not in w:
            h = gated_linear(mine, *firsts, ranks, gather_dim=axis)
        else:
            biases = [*[None] * (len(firsts) - 1), w.get("bias")]
            h = activated(self.activation, column_parallel_linear(mine, firsts, ranks, biases, gather_dim=axis))
        return x + row_parallel_linear(h, w["down"], ranks, w.get("last"), scatter_dim=axis)


class Mlp(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.activation, w = layer.activation, layer.weights
        self.firsts = nn.ModuleList([linear(w["gate"])] if "gate" in w else [])
        self.firsts.append(linear(w["up"], w.get("bias")))
        self.down = linear(w["down"], w.get("last"))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activated(self.activation, [first(x) for first in self.firsts]))


class ByDTensor(nn.Module):
    """The same layer as a torch module, sharded by `parallelize_module`."""

    def __init__(self, layer: Layer, mesh: DeviceMesh, axis: int) -> None:
        super().__init__()
        self.norm: nn.Module | None = None
        self.mlp = Mlp(layer)
        styles: dict[str, Any] = {
            "mlp": PrepareModuleInput(input_layouts=(Shard(axis),), desired_input_layouts=(Replicate(),)),
            "mlp.firsts.*": ColwiseParallel(use_local_output=False),
            "mlp.down": RowwiseParallel(output_layouts=Shard(axis)),
        }
        if "norm" in layer.weights:
            self.norm = nn.RMSNorm(WIDTH, 1e-5, dtype=layer.weights["norm"].dtype)
            self.norm.weight.data.copy_(layer.weights["norm"])
            styles["norm"] = SequenceParallel(sequence_dim=axis)
        parallelize_module(self, mesh, styles)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x if self.norm is None else self.norm(x))

    def gradients(self) -> Weights:
        """Return this rank's gradients by the names of weights; replicated weights have full gradients."""
        named = {"up": self.mlp.firsts[-1].weight, "bias": self.mlp.firsts[-1].bias}
        named |= {"gate": self.mlp.firsts[0].weight} if len(self.mlp.firsts) > 1 else {}
        named |= {"down": self.mlp.down.weight, "last": self.mlp.down.bias}
        named |= {} if self.norm is None else {"norm": self.norm.weight}
        grads = {name: weight.grad for name, weight in named.items() if weight is not None}
        assert all(isinstance(grad, DTensor) for grad in grads.values())
        return {name: g.to_local() if name in SHARDED else g.full_tensor() for name, g in grads.items()}


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(bias)
    return layer


# Stacks -----------------------------------------------------------------------------------------------------------


@dataclass
class Gradients:
    """This rank's parts of a result, of the input gradient, and of the weight gradients of each layer.

    Fields:
        saved: bytes saved for backward, including weights.
    """

    y: Tensor
    x: Tensor | None
    weights: list[Weights]
    saved: int = 0

    def all(self) -> list[Tensor]:
        return [self.y, self.x, *(w[name] for w in self.weights for name in sorted(w))]


class Stack:
    """Random layers with unsharded inputs and weights."""

    def __init__(self, draw: random.Random, dtype: torch.dtype) -> None:
        self.axis = draw.choice((0, 1))
        batch, tokens = draw.choice((1, 2, 3)), 4 * draw.choice((1, 2, 5, 9))
        self.x = replicated(*((batch, tokens) if self.axis else (tokens, batch)), WIDTH, dtype=dtype)
        self.target = replicated(*self.x.shape)
        self.layers = [self.layer(draw, dtype) for _ in range(draw.choice((1, 2, 3)))]

    def layer(self, draw: random.Random, dtype: torch.dtype) -> Layer:
        activation = draw.choice(("gelu", "gated", "several"))
        shapes: dict[str, tuple[int, ...]] = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
        shapes |= {"gate": (HIDDEN, WIDTH)} if activation != "gelu" else {}
        vectors = {"bias": (HIDDEN,), "last": (WIDTH,), "norm": (WIDTH,)}
        shapes |= {name: shape for name, shape in vectors.items() if draw.random() < 0.5}
        return Layer(
            activation, {name: replicated(*shape, dtype=dtype) / len(shape) ** 2 for name, shape in shapes.items()}
        )

    def exact(self) -> Gradients:
        """Compute in float64 on unsharded tensors and return this rank's parts."""
        x, weights = leaf(self.x.double()), [{n: leaf(w.double()) for n, w in it.weights.items()} for it in self.layers]
        y = x
        for layer, w in zip(self.layers, weights, strict=True):
            y = layer.exact(y, w)
        (y * self.target).sum().backward()
        grads = [{n: self.mine(n, t.grad) for n, t in w.items()} for w in weights]
        return Gradients(part(y.detach(), self.axis), part(x.grad, self.axis), grads)

    def mine(self, name: str, w: Tensor) -> Tensor:
        return part(w, SHARDED[name]) if name in SHARDED else w

    def __str__(self) -> str:
        shapes = [{name: list(w.shape) for name, w in layer.weights.items()} for layer in self.layers]
        return f"x {list(self.x.shape)}, sharded over axis {self.axis}, layers {shapes}"

    def sharded(self, ranks: Any) -> Gradients:
        """Compute by hostir's functions."""
        x = leaf(part(self.x, self.axis))
        weights = [{n: leaf(self.mine(n, w)) for n, w in it.weights.items()} for it in self.layers]
        y = x
        with saving() as saved:
            for layer, w in zip(self.layers, weights, strict=True):
                y = layer.sharded(y, w, ranks, self.axis)
        (y * part(self.target, self.axis)).sum().backward()
        grads = [{n: total(n, t.grad) for n, t in w.items()} for w in weights]
        return Gradients(y.detach(), x.grad, grads, sum(saved.values()))

    def by_dtensor(self, mesh: DeviceMesh) -> Gradients:
        x = leaf(part(self.x, self.axis))
        layers = [ByDTensor(layer, mesh, self.axis) for layer in self.layers]
        y = x
        with saving() as saved:
            for layer in layers:
                y = layer(y)
        (y * part(self.target, self.axis)).sum().backward()
        return Gradients(y.detach(), x.grad, [layer.gradients() for layer in layers], sum(saved.values()))


@contextmanager
def saving() -> Iterator[dict[int, int]]:
    """Record the memory that autograd saves in this context: the bytes at each address."""
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        memory = (x._local_tensor if isinstance(x, DTensor) else x).untyped_storage()
        saved[memory.data_ptr()] = memory.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


def total(name: str, grad: Tensor) -> Tensor:
    """Return the gradient for all tokens: gradients of replicated weights are summed over ranks."""
    if name not in SHARDED:
        dist.all_reduce(grad)
    return grad


def error(results: list[Tensor], exact: list[Tensor]) -> float:
    """Return the root mean square of the relative errors of tensors, over all ranks."""
    pairs = [((r.double() - e).square().sum(), e.square().sum()) for r, e in zip(results, exact, strict=True)]
    sums = torch.tensor([[float(n) for n in pair] for pair in pairs], dtype=torch.float64)
    dist.all_reduce(sums)
    return math.sqrt(float((sums[:, 0] / sums[:, 1]).mean()))


def errors(stack: Stack, mesh: DeviceMesh, ranks: Any, strategy: str) -> tuple[float, float, float]:
    """Return hostir's error, DTensor's error, and the bytes that hostir saves relative to DTensor."""
    by_dtensor = stack.by_dtensor(mesh)
    with hi.torch.install(strict=True, strategy=strategy):
        by_hostir, once_more = stack.sharded(ranks), stack.sharded(ranks)
    ours, again, theirs, exact = (it.all() for it in (by_hostir, once_more, by_dtensor, stack.exact()))
    assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True)), "the same bits in every run"
    return error(ours, exact), error(theirs, exact), by_hostir.saved / by_dtensor.saved


@case
def random_stacks_of_layers_are_as_accurate_as_by_dtensor() -> None:
    draw = draws()
    mesh = init_device_mesh(DEVICE, (RANKS,), mesh_dim_names=("tp",))
    ratios, saved = [], []
    for n in range(5 * COUNT):
        if n >= COUNT and geometric_mean(ratios) <= 1.1:
            break  # otherwise more stacks say whether it was chance
        dtype = draw.choice((torch.float32, torch.float64)) if n % 8 == 7 else torch.bfloat16
        ranks, strategy = (mesh, dist.group.WORLD, group())[n % 3], STRATEGIES[n % len(STRATEGIES)]
        shapes, found = draw.random(), []
        # one stack in 1000 has twice DTensor's error by chance: other values in the same shapes say whether it was
        while len(found) < 5 and (not found or geometric_mean(found) > 2):
            stack = Stack(random.Random(shapes), dtype)
            own_error, dtensor_error, bytes_saved = errors(stack, mesh, ranks, strategy)
            assert bytes_saved <= 1, (bytes_saved, str(stack))
            found.append(max(own_error, 1e-12) / max(dtensor_error, 1e-12))
            assert found[-1] <= 4, (dtype, strategy, own_error, dtensor_error, str(stack))
        assert geometric_mean(found) <= 2, (dtype, strategy, found, str(stack))
        saved.append(bytes_saved)
        if dtype == torch.bfloat16:
            ratios += found
    mean = geometric_mean(ratios)  # of many stacks: all gradients of one stack share its rounding
    if dist.get_rank() == 0:
        print(f"{len(ratios)} stacks in bf16: error ratio {mean:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
        print(f"{len(saved)} stacks: bytes saved relative to DTensor, from {min(saved):.3f} to {max(saved):.3f}")
    assert mean <= 1.1, ratios


if __name__ == "__main__":
    main()
