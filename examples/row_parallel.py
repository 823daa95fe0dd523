"""Row-parallel linear: activations and weight are sharded on K, and the partial sums are reduced slice by slice.

    python examples/row_parallel.py                          4 simulated ranks
    torchrun --nproc-per-node 4 examples/row_parallel.py     4 real ranks: on GPUs if available, otherwise on CPU
    hostir run examples/row_parallel.py --compare --strategy sequential

A layer runs many times on parts that its ranks already hold. An `Executor` is for such calls.
"""

from __future__ import annotations

import torch

import hostir as hi


def row_parallel(
    ranks: int = 4, S: int = 4, M: int = 512, K: int = 1024, N: int = 256, dtype: str = "bf16"
) -> hi.Fusion:
    with hi.Fusion("row_parallel") as fusion:
        x = hi.tensor("x", [M, K], dtype)
        w = hi.tensor("w", [N, K], dtype)
        bias = hi.tensor("bias", [N], dtype)
        y = hi.linear(x, w, bias)  # the bias is added once, after the sum over ranks
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    w.shard(1, mesh)
    y.set_device_mesh(mesh)  # every rank gets all of y
    y.split(0, S)
    y.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


def main() -> None:
    with hi.session() as job:  # this rank of torchrun's job; None without torchrun
        ranks, device = (job.size, job.device) if job else (4, "cpu")
        program = hi.lower(row_parallel(ranks))
        executor = hi.Executor(program)  # plans once for each set of shapes

        torch.manual_seed(0)
        w, bias = (torch.randn(*shape, device=device).bfloat16() for shape in ((256, 1024), (256,)))
        w_parts = [part.contiguous() for part in w.chunk(ranks, dim=1)]
        for step in range(3):
            x = torch.randn(512, 1024, device=device).bfloat16()
            x_parts = [part.contiguous() for part in x.chunk(ranks, dim=1)]
            if job:  # this rank's part of each input, and of the output
                (y,) = executor(x_parts[job.rank], w_parts[job.rank], bias)
            else:  # the parts of all ranks, one after another
                ((y, *_),) = executor(x_parts, w_parts, [bias] * ranks)

            if job is None or job.rank == 0:
                exact = torch.nn.functional.linear(x.double(), w.double(), bias.double())
                print(f"step {step}: relative error {(y - exact).norm() / exact.norm():.2e}")


if __name__ == "__main__":
    main()
