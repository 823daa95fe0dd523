"""A tensor-parallel MLP on rank-local tensors: each rank holds only its shard of the weights and tokens.

    python examples/tensor_parallel.py                          one rank
    torchrun --nproc-per-node 4 examples/tensor_parallel.py     4 ranks: on GPUs if available, otherwise on CPU
    hostir run examples/tensor_parallel.py --compare            the same fusion, on whole tensors

The whole weights are drawn from one seed. A model would read them from a checkpoint.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import hostir as hi


def tensor_parallel(
    ranks: int = 4, M: int = 512, K: int = 256, H: int = 1024, S: int = 2, dtype: str = "bf16"
) -> hi.Fusion:
    with hi.Fusion("tensor_parallel") as fusion:
        x = hi.tensor("x", [M, K], dtype)
        up = hi.tensor("up", [H, K], dtype)
        down = hi.tensor("down", [K, H], dtype)
        y = hi.linear(hi.gelu(hi.linear(x, up)), down)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(0, mesh)  # M/ranks tokens a rank
    up.shard(0, mesh)  # column parallel: H/ranks rows of the weight
    down.shard(1, mesh)  # row parallel: H/ranks columns
    y.set_device_mesh(mesh)
    y.split(0, ranks)  # M/ranks tokens a rank again, ...
    y.split(1, S)  # ... in S slices that overlap
    y.axis(0).parallelize(hi.ParallelType.DIDx)
    y.axis(1).parallelize(hi.ParallelType.Stream)
    return fusion


def main(M: int = 512, K: int = 256, H: int = 1024) -> None:
    with hi.session() as job:  # None without torchrun
        rank, ranks = (job.rank, job.size) if job else (0, 1)
        device = job.device if job else torch.device("cpu")
        program = hi.lower(tensor_parallel(ranks, M, K, H))
        executor = hi.Executor(program, machine=None if job else "gloo")

        # Only the rank's shard of the weights goes to the device.
        torch.manual_seed(0)
        whole_up, whole_down = torch.randn(H, K) / K**0.5, torch.randn(K, H) / H**0.5
        up = whole_up.chunk(ranks, dim=0)[rank].bfloat16().to(device)
        down = whole_down.chunk(ranks, dim=1)[rank].contiguous().bfloat16().to(device)

        for step in range(3):
            whole_x = torch.randn(M, K)  # the same on all ranks, because they share the seed
            x = whole_x.chunk(ranks, dim=0)[rank].bfloat16().to(device)
            (y,) = executor(x, up, down)  # [M/ranks, K]: this rank's rows

            # Only for the comparison: the unsharded result, and the rows of all ranks.
            exact = reference(*(t.bfloat16().double() for t in (whole_x, whole_up, whole_down)))
            mine = exact.chunk(ranks, dim=0)[rank]
            torch.testing.assert_close(y.cpu().double(), mine, rtol=2e-2, atol=2e-2)
            rows = [torch.empty_like(y) for _ in range(ranks)] if job else [y]
            if job:
                dist.all_gather(rows, y)
            if rank == 0:
                whole_y = torch.cat(rows).cpu().double()
                error = (whole_y - exact).norm() / exact.norm()
                print(f"step {step}: {ranks} ranks with {len(y)} rows each, relative error {error:.1e}")


def reference(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ up.T) @ down.T


if __name__ == "__main__":
    main()
