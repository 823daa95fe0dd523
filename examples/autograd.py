"""A layer that trains: two programs in a torch.autograd.Function, one for each direction.

    python examples/autograd.py                          one rank
    torchrun --nproc-per-node 4 examples/autograd.py     4 ranks: on GPUs if available, otherwise on CPU
    hostir run examples/autograd.py:backward --compare   the backward program, on whole tensors

y = x @ w, with the rows of x and the columns of w sharded over the ranks. Forward gathers x. Backward scatters dx.
"""

from __future__ import annotations

from typing import Any

import torch

import hostir as hi


def forward(ranks: int = 4, M: int = 64, K: int = 48, N: int = 96) -> hi.Fusion:
    with hi.Fusion("forward") as fusion:
        x = hi.tensor("x", [M, K], "f32")
        w = hi.tensor("w", [K, N], "f32")
        x_full = hi.reshard(x)
        y = x_full @ w
        fusion.output(y, x_full)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(0, mesh)
    w.shard(1, mesh)
    x_full.set_device_mesh(mesh)  # all rows on every rank: an allgather
    y.shard(1, mesh)
    return fusion


def backward(ranks: int = 4, M: int = 64, K: int = 48, N: int = 96) -> hi.Fusion:
    with hi.Fusion("backward") as fusion:
        x_full = hi.tensor("x_full", [M, K], "f32")
        w = hi.tensor("w", [K, N], "f32")
        dy = hi.tensor("dy", [M, N], "f32")
        dx = hi.linear(dy, w)  # dy @ w^T sums over N, and each rank has a part of N: a reduce_scatter
        dw = hi.permute(x_full, (1, 0)) @ dy
        fusion.output(dx, dw)
    mesh = hi.DeviceMesh(range(ranks))
    x_full.set_device_mesh(mesh)
    dx.shard(0, mesh)
    for t in (w, dy, dw):
        t.shard(1, mesh)
    return fusion


class ColumnParallel:
    """The layer and its two executors. An executor plans once for each set of shapes."""

    def __init__(self, ranks: int, M: int, K: int, N: int, machine: str | None = None) -> None:
        self.forward = hi.Executor(hi.lower(forward(ranks, M, K, N)), machine=machine)
        self.backward = hi.Executor(hi.lower(backward(ranks, M, K, N)), machine=machine)

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return [M, N/ranks] for `x` [M/ranks, K] and `w` [K, N/ranks]."""
        return Apply.apply(self, x, w)


class Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: ColumnParallel, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, x_full = layer.forward(x, w)
        ctx.layer = layer
        ctx.save_for_backward(x_full, w)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        x_full, w = ctx.saved_tensors
        dx, dw = ctx.layer.backward(x_full, w, dy.contiguous())
        return None, dx, dw


def main() -> None:
    with hi.session() as job:  # None without torchrun
        rank, ranks = (job.rank, job.size) if job else (0, 1)
        device = job.device if job else torch.device("cpu")
        M, K, N = 64, 48, 96
        layer = ColumnParallel(ranks, M, K, N, machine=None if job else "gloo")

        torch.manual_seed(0)  # every rank draws the same whole tensors and keeps its part
        whole_x, whole_w, target = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
        x = whole_x.chunk(ranks, dim=0)[rank].to(device).requires_grad_()
        w = whole_w.chunk(ranks, dim=1)[rank].contiguous().to(device).requires_grad_()
        (layer(x, w) * target.chunk(ranks, dim=1)[rank].to(device)).sum().backward()

        whole_x, whole_w = whole_x.double().requires_grad_(), whole_w.double().requires_grad_()
        ((whole_x @ whole_w) * target).sum().backward()
        expected = whole_x.grad.chunk(ranks, dim=0)[rank], whole_w.grad.chunk(ranks, dim=1)[rank]
        for found, right in zip((x.grad, w.grad), expected, strict=True):
            torch.testing.assert_close(found.cpu(), right.float(), rtol=1e-4, atol=1e-4)
        done = f"rank {rank}: dx {list(x.grad.shape)} and dw {list(w.grad.shape)} are those of torch's autograd"
        print(f"{done}\n", end="", flush=True)  # in one write, because all ranks write at once


if __name__ == "__main__":
    main()
