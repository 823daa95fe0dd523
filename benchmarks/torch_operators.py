"""hostir's functions for torch against torch's own operators and NCCL + cuBLAS: forward, and forward with backward.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.torch_operators --out benchmarks/results/torch_operators
    torchrun --standalone --nproc-per-node 2 -m benchmarks.torch_operators --rows 8B-gather:16,70B-scatter-trained
    torchrun --standalone --nproc-per-node 2 -m benchmarks.torch_operators --device cpu --shrink 64 --rows 8B-gather:16

Rows are the first (`gather`) and the second (`scatter`) weight of the MLPs of Llama 3 8B and 70B as tensor parallel 8
has them, with M from 16 to 16384 tokens; `trained` ones compute the gradients of input and weight as well. Everything
runs in one process group, eager and in a CUDA graph of the caller's. floor = max(all matmuls by cuBLAS, all collectives
by NCCL); a score is floor/time. Scores stand by mode: in each, hostir has to reach 0.98 of the fastest peer's score.

What is measured:

    hostir          column_parallel_linear or row_parallel_linear
    hostir out=     all_gather_matmul or matmul_reduce_scatter into a tensor of the caller's; forward only
    torch fused     torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter; on CPU what torch says
                    they compute, by plain collectives
    NCCL + cuBLAS   all_gather_into_tensor, reduce_scatter_tensor and torch.matmul

The peers' gradients are those of torchtitan's functions: the other operator for the input, and for the weight a matmul
with what was gathered.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import hostir as hi
from benchmarks.comparison import (
    PIECES,
    Candidate,
    Entrant,
    Judge,
    NotPossibleError,
    Subject,
    Work,
    compare,
    parser,
    replayed,
    summed_rows,
)
from benchmarks.harness import synchronize
from benchmarks.scores import BY_HAND, GRAPH, HOSTIR, TORCH, Row
from hostir.choice.platforms import Platform
from hostir.runtime.session import Session
from hostir.torch import all_gather_matmul, column_parallel_linear, matmul_reduce_scatter, row_parallel_linear


# Peers ------------------------------------------------------------------------------------------------------------
class ByHand:
    """NCCL and cuBLAS, one after the other; with `pieces`, rows of products are computed in so many parts."""

    def __init__(self, pieces: int = 1) -> None:
        self.pieces = pieces

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b if self.pieces == 1 else torch.cat([x @ b for x in a.chunk(self.pieces)])

    def gather(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The gathered rows of `a`, and their product with `b`."""
        full = a.new_empty(a.shape[0] * dist.get_world_size(), a.shape[1])
        dist.all_gather_into_tensor(full, a)
        return full, self.product(full, b)

    def scatter(self, a: Tensor, b: Tensor) -> Tensor:
        """This rank's rows of the sum of `a @ b` over the ranks."""
        y = a.new_empty(a.shape[0] // dist.get_world_size(), b.shape[1])
        dist.reduce_scatter_tensor(y, self.product(a, b))
        return y


class Fused:
    """torch's own operators."""

    def gather(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ops = torch.ops.symm_mem.fused_all_gather_matmul
        run = ops if a.is_cuda else symm_mem._fused_all_gather_matmul_fallback
        full, (y,) = run(a, [b], 0, dist.group.WORLD.group_name, return_A=True)
        return full, y

    def scatter(self, a: Tensor, b: Tensor) -> Tensor:
        ops = torch.ops.symm_mem.fused_matmul_reduce_scatter
        run = ops if a.is_cuda else symm_mem._fused_matmul_reduce_scatter_fallback
        return run(a, b, "sum", 0, dist.group.WORLD.group_name)


class Gathering(torch.autograd.Function):
    """A peer's `gather(x) @ weight^T`, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: Any) -> Tensor:
        full, y = way.gather(x, weight.t())
        ctx.save_for_backward(full, weight)
        ctx.way = way
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        full, weight = ctx.saved_tensors
        return ctx.way.scatter(dy, weight), dy.t() @ full, None


class Scattering(torch.autograd.Function):
    """A peer's `scatter(sum of x @ weight^T)`, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.way = way
        return way.scatter(x, weight.t())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        full, dx = ctx.way.gather(dy, weight)
        return dx, full.t() @ x, None


# Rows -------------------------------------------------------------------------------------------------------------
Layer = Callable[[Tensor, Tensor], Tensor]  # of the input and the weight


class Operands(Subject):
    """A layer's tensors on this rank. Results are y, or with `trained` the gradients of x and the weight.

    Fields:
        gathers: whether x is gathered, or y scattered.
        x: `[M / ranks, K]`, or `[M, K]` if y is scattered.
        weight: `[N, K]`.
        dy: the gradient of y: `[M, N]`, or `[M / ranks, N]` if it is scattered.
        full: what is gathered, of x or dy.
    """

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session) -> None:
        super().__init__(row, dtype, joined)
        _, kind, *trained = row.model.split("-")
        self.gathers, self.trained = kind == "gather", bool(trained)
        mine, new = row.M // self.ranks, {"dtype": dtype, "device": self.device}
        self.x = torch.empty(mine if self.gathers else row.M, row.K, **new, requires_grad=self.trained)
        self.dy = torch.empty(row.M if self.gathers else mine, row.N, **new)
        self.weight = (torch.randn(row.N, row.K, device=self.device) / row.K**0.5).to(dtype)
        self.weight.requires_grad_(self.trained)
        self.y = torch.empty_like(self.dy)
        self.part = torch.empty(row.M, row.K if self.gathers else row.N, **new)
        self.full = torch.empty(row.M, row.K if self.gathers else row.N, **new)
        self.renew()

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.x.normal_()
        self.dy.normal_()
        self.part.normal_()
        dist.all_gather_into_tensor(self.full, self.x if self.gathers else self.dy)

    def step(self, layer: Layer) -> Any:
        """What is timed: y, or the gradients."""
        if not self.trained:
            return layer(self.x, self.weight)
        with torch.enable_grad():
            return torch.autograd.grad(layer(self.x, self.weight), (self.x, self.weight), self.dy)

    # Right or wrong ---------------------------------------------------------------------------------------------------
    def judge(self) -> Judge:
        unfused, *alike = (self.step(partial(self.peer, ByHand(n))) for n in sorted({*PIECES, self.ranks}))
        x, weight, dy = self.x.detach(), self.weight.detach().double(), self.dy
        if not self.trained:
            sample, exact = self.rows(self.full if self.gathers else x, weight.t(), summed=not self.gathers)
            return Judge(sample, exact, unfused, alike)
        sample, exact = self.rows(dy if self.gathers else self.full, weight, summed=self.gathers)
        columns = torch.randint(self.row.N, (32,), device=self.device).unique()
        dy, x = (dy, self.full) if self.gathers else (self.full, x)
        d_weight = dy[:, columns].double().t() @ x.double()
        return OfGradients(
            torch.cat([sample, len(self.x) + columns]),
            torch.cat([exact, d_weight]),
            torch.cat(unfused),
            [torch.cat(gradients) for gradients in alike],
        )

    def rows(self, a: Tensor, b: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
        """A sample of the rows of `a @ b`, and these in float64; of the sum over ranks, this rank's rows."""
        if summed:
            return summed_rows(self.row.M, self.ranks, self.rank, lambda rows: a[rows].double() @ b, self.device)
        rows = torch.cat([torch.arange(0, len(a), max(len(a) // 64, 1)), torch.tensor([len(a) - 1])]).unique()
        rows = rows.to(self.device)
        return rows, a[rows].double() @ b

    # The parts --------------------------------------------------------------------------------------------------------
    def parts(self) -> Mapping[str, Work]:
        return {"gemm": self.multiply, "nccl": self.communicate}

    def multiply(self) -> None:
        x, dy = (self.full, self.dy) if self.gathers else (self.x.detach(), self.full)
        weight = self.weight.detach()
        torch.matmul(x, weight.t())
        if self.trained:
            torch.matmul(dy, weight)
            torch.matmul(dy.t(), x)

    def communicate(self) -> None:
        if self.gathers or self.trained:
            dist.all_gather_into_tensor(self.full, self.x.detach() if self.gathers else self.dy)
        if self.trained or not self.gathers:
            dist.reduce_scatter_tensor(torch.empty_like(self.part[: self.row.M // self.ranks]), self.part)

    # The candidates ---------------------------------------------------------------------------------------------------
    def peer(self, way: Any, x: Tensor, weight: Tensor) -> Tensor:
        return (Gathering if self.gathers else Scattering).apply(x, weight, way)

    def peers(self) -> Mapping[str, Callable[[], Any]]:
        ways = {BY_HAND: ByHand(), TORCH: Fused()}
        return {name: partial(self.step, partial(self.peer, way)) for name, way in ways.items()}

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        yield from self.peers_in(modes)
        layer = column_parallel_linear if self.gathers else row_parallel_linear
        calls = {HOSTIR: partial(self.step, lambda x, weight: layer(x, weight, dist.group.WORLD))}
        if not self.trained:
            calls[f"{HOSTIR} out="] = self.into
        for name, call in calls.items():
            yield from (Entrant(name, mode, partial(ours, name, mode, call)) for mode in modes)

    def into(self) -> Tensor:
        product = all_gather_matmul if self.gathers else matmul_reduce_scatter
        return product(self.x, self.weight.t(), dist.group.WORLD, out=self.y)

    def fusion(self, slices: int) -> hi.Fusion:
        raise NotPossibleError("the functions make their own")

    def inputs(self, slices: int) -> Sequence[Tensor]:
        return self.x, self.weight

    def out(self, slices: int) -> Tensor:
        return self.y


class OfGradients(Judge):
    """Holds pairs of gradients, of x and the weight, against theirs as rows one after the other."""

    def spoil(self, c: Any) -> None:
        for gradient in c:
            super().spoil(gradient)

    def rows_of(self, c: Any) -> Tensor:
        return super().rows_of(torch.cat(c) if isinstance(c, tuple) else c)


def ours(name: str, mode: str, call: Callable[[], Any]) -> Candidate:
    """A function of hostir's, by its own choice from estimates; in a graph, in that of the caller."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hi.FallbackWarning)  # the strategies that refuse say why
        call()
        return Candidate(name, mode, True, replayed(call) if mode == GRAPH else call)


# The command line -------------------------------------------------------------------------------------------------
def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    return parser(__doc__, "torch_operators").parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a line a row, and writes table and figures on rank 0."""
    compare(options(arguments), "torch_operators", Operands)


if __name__ == "__main__":
    main()
