"""A transformer's MLP, tensor and sequence parallel: one loop gathers, multiplies twice and scatters each slice.

    python examples/mlp_block.py                          4 simulated ranks
    torchrun --nproc-per-node 4 examples/mlp_block.py     4 real ranks: on GPUs if available, otherwise on CPU
    hostir lower examples/mlp_block.py --all              the program after each pass

Only inputs and output are annotated. The compiler finds that `h` and `g` are sharded on the hidden axis, and that an
allgather before them and a reduce_scatter after them are needed.
"""

from __future__ import annotations

import torch

import hostir as hi


def mlp_block(ranks: int = 4, S: int = 4, M: int = 512, K: int = 256, H: int = 1024, dtype: str = "bf16") -> hi.Fusion:
    with hi.Fusion("mlp_block") as fusion:
        x = hi.tensor("x", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        up = hi.tensor("up", [H, K], dtype)
        up_bias = hi.tensor("up_bias", [H], dtype)
        down = hi.tensor("down", [K, H], dtype)
        h = hi.linear(x, up, up_bias)
        g = hi.gelu(h)
        y = hi.linear(g, down)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)  # the tokens of each slice are sharded over the ranks
    up.shard(0, mesh)  # column parallel
    up_bias.shard(0, mesh)
    down.shard(1, mesh)  # row parallel
    y.shard(1, mesh)
    y.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


def main() -> None:
    with hi.session() as job:  # this rank of torchrun's job; None without torchrun
        ranks, device = (job.size, job.device) if job else (4, "cpu")
        torch.manual_seed(0)  # every rank draws the same whole tensors; `hi.run` gives each rank its part
        shapes = (4, ranks, 512 // (4 * ranks), 256), (1024, 256), (1024,), (256, 1024)
        x, up, up_bias, down = (torch.randn(*shape, device=device).bfloat16() for shape in shapes)

        exact = torch.nn.functional.gelu(x.double() @ up.double().T + up_bias.double()) @ down.double().T
        for strategy in ("sequential", "pipeline"):
            program = hi.lower(mlp_block(ranks), strategy)
            (y,) = hi.run(program, x, up, up_bias, down)
            if job is None or job.rank == 0:
                print(f"{strategy}: relative error {(y - exact).norm() / exact.norm():.2e}")
        if job is None or job.rank == 0:
            print(program)


if __name__ == "__main__":
    main()
