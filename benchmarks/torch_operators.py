"""Compare hostir's functions for torch, torch's own operators, and NCCL + cuBLAS: forward, and forward with backward.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.torch_operators --out benchmarks/results/torch_operators
    torchrun --standalone --nproc-per-node 2 -m benchmarks.torch_operators --rows 8B-gather:16,70B-scatter-trained
    torchrun --standalone --nproc-per-node 2 -m benchmarks.torch_operators --device cpu --shrink 64 --rows 8B-gather:16

A row of the table is the first (`gather`) or the second (`scatter`) weight of the MLP of Llama 3 8B or 70B with tensor
parallelism 8, and M from 16 to 16384 tokens. `trained` rows compute the gradients of input and weight as well. Every
call is timed eagerly and in a CUDA graph that the caller captures, all in one process group. floor = max(all matmuls by
cuBLAS, all collectives by NCCL); a score is floor/time. Eager calls and graphs are scored separately. In each mode,
hostir must reach 0.98 times the score of the fastest peer.

The candidates:

    hostir          column_parallel_linear or row_parallel_linear
    hostir out=     all_gather_matmul or matmul_reduce_scatter with `out=`; forward only
    torch fused     torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter; on a CPU, torch's
                    fallbacks with plain collectives
    NCCL + cuBLAS   all_gather_into_tensor, reduce_scatter_tensor and torch.matmul

The peers compute gradients as torchtitan's functions do. The gradient of the input of an all-gather + matmul is a
matmul + reduce-scatter, and the other way round. The gradient of the weight is a matmul with the gathered tensor.
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
    options_parser,
    replayed,
    summed_rows,
)
from benchmarks.harness import synchronize
from benchmarks.scores import BY_HAND, GRAPH, HOSTIR, TORCH, Row
from hostir.choice.platforms import Platform
from hostir.job.session import Session
from hostir.torch import all_gather_matmul, column_parallel_linear, matmul_reduce_scatter, row_parallel_linear


class ByHand:
    """NCCL and cuBLAS, one after the other. The rows of a matmul are computed in `pieces` pieces."""

    def __init__(self, pieces: int = 1) -> None:
        self.pieces = pieces

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b if self.pieces == 1 else torch.cat([x @ b for x in a.chunk(self.pieces)])

    def gather(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather the rows of `a`; return them, and their product with `b`."""
        full = a.new_empty(a.shape[0] * dist.get_world_size(), a.shape[1])
        dist.all_gather_into_tensor(full, a)
        return full, self.product(full, b)

    def scatter(self, a: Tensor, b: Tensor) -> Tensor:
        """Return this rank's rows of the sum of `a @ b` over the ranks."""
        y = a.new_empty(a.shape[0] // dist.get_world_size(), b.shape[1])
        dist.reduce_scatter_tensor(y, self.product(a, b))
        return y


class Fused:
    """torch's fused operators. On a CPU, torch's fallbacks with plain collectives run instead."""

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
    """`gather(x) @ weight^T` by a peer, with gradients."""

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
    """`x @ weight^T` by a peer, summed over the ranks and scattered, with gradients."""

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


Layer = Callable[[Tensor, Tensor], Tensor]  # (input, weight) -> output


class Operands(Subject):
    """The tensors of a layer on this rank. The result is y, or the gradients of x and the weight if `trained`.

    Fields:
        gathers: True if x is gathered, False if y is scattered.
        x: `[M / ranks, K]` if it is gathered, else `[M, K]`.
        weight: `[N, K]`.
        dy: the gradient of y: `[M, N]` if x is gathered, else `[M / ranks, N]`.
        full: the gathered x if x is gathered, else the gathered dy.
    """

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        super().__init__(row, dtype, job)
        _, side, *trained = row.model.split("-")
        self.gathers, self.trained = side == "gather", bool(trained)
        local_rows, new = row.M // self.ranks, {"dtype": dtype, "device": self.device}
        self.x = torch.empty(local_rows if self.gathers else row.M, row.K, **new, requires_grad=self.trained)
        self.dy = torch.empty(row.M if self.gathers else local_rows, row.N, **new)
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
        """Run a layer, and return y, or the gradients if `trained`. This call is timed."""
        if not self.trained:
            return layer(self.x, self.weight)
        with torch.enable_grad():
            return torch.autograd.grad(layer(self.x, self.weight), (self.x, self.weight), self.dy)

    def judge(self) -> Judge:
        unfused, *in_pieces = (self.step(partial(self.peer, ByHand(n))) for n in sorted({*PIECES, self.ranks}))
        x, weight, dy = self.x.detach(), self.weight.detach().double(), self.dy
        if not self.trained:
            sample, exact = self.rows(self.full if self.gathers else x, weight.t(), summed=not self.gathers)
            return Judge(sample, exact, unfused, in_pieces)
        sample, exact = self.rows(dy if self.gathers else self.full, weight, summed=self.gathers)
        columns = torch.randint(self.row.N, (32,), device=self.device).unique()
        dy, x = (dy, self.full) if self.gathers else (self.full, x)
        d_weight = dy[:, columns].double().t() @ x.double()
        return GradientJudge(
            torch.cat([sample, len(self.x) + columns]),
            torch.cat([exact, d_weight]),
            torch.cat(unfused),
            [torch.cat(gradients) for gradients in in_pieces],
        )

    def rows(self, a: Tensor, b: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
        """Return the indices of some rows of `a @ b`, and these rows in float64.

        If `summed`, they are rows of this rank's part of the sum of `a @ b` over the ranks.
        """
        if summed:
            return summed_rows(self.row.M, self.ranks, self.rank, lambda rows: a[rows].double() @ b, self.device)
        rows = torch.cat([torch.arange(0, len(a), max(len(a) // 64, 1)), torch.tensor([len(a) - 1])]).unique()
        rows = rows.to(self.device)
        return rows, a[rows].double() @ b

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
            calls[f"{HOSTIR} out="] = self.with_out
        for name, call in calls.items():
            yield from (Entrant(name, mode, partial(ours, name, mode, call)) for mode in modes)

    def with_out(self) -> Tensor:
        product = all_gather_matmul if self.gathers else matmul_reduce_scatter
        return product(self.x, self.weight.t(), dist.group.WORLD, out=self.y)

    def fusion(self, slices: int) -> hi.Fusion:
        raise NotPossibleError("the functions for torch make their own fusions")

    def inputs(self, slices: int) -> Sequence[Tensor]:
        return self.x, self.weight

    def out(self, slices: int) -> Tensor:
        return self.y


class GradientJudge(Judge):
    """Compares gradients with a reference: the rows of x's gradient, then the rows of the weight's gradient."""

    def spoil(self, c: Any) -> None:
        for gradient in c:
            super().spoil(gradient)

    def rows_of(self, c: Any) -> Tensor:
        return super().rows_of(torch.cat(c) if isinstance(c, tuple) else c)


def ours(name: str, mode: str, call: Callable[[], Any]) -> Candidate:
    """Return the candidate of a hostir function, after its trial. In mode `graph` the benchmark captures it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hi.FallbackWarning)  # impossible strategies warn at the first call
        call()
        return Candidate(name, mode, True, replayed(call) if mode == GRAPH else call)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    return options_parser(__doc__, "torch_operators").parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    compare(parse_options(arguments), "torch_operators", Operands)


if __name__ == "__main__":
    main()
