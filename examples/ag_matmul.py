"""All-gather and matmul: A is sharded on its rows, and each slice is gathered while the previous slice is multiplied.

python examples/ag_matmul.py                                   8 simulated ranks
torchrun --nproc-per-node 4 examples/ag_matmul.py              4 real ranks: on GPUs if available, otherwise on CPU
hostir run examples/ag_matmul.py --ranks 4 --set M=512 --compare
"""

from __future__ import annotations

import torch

import hostir as hi


def ag_matmul(ranks: int = 8, S: int = 4, M: int = 4096, K: int = 1024, N: int = 512, dtype: str = "bf16") -> hi.Fusion:
    with hi.Fusion("ag_matmul") as fusion:
        a = hi.tensor("a", [S, ranks, f"{M}/{S * ranks}", K], dtype)  # refused if the quotient is not an integer
        b = hi.tensor("b", [K, N], dtype)
        c = hi.matmul(a, b)  # [S, ranks, M/(S*ranks), N]
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    for t in (a, b, c):
        t.set_device_mesh(mesh)
    a.axis(1).parallelize(hi.ParallelType.DIDx)
    c.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


def main() -> None:
    with hi.session() as job:  # this rank of torchrun's job; None without torchrun
        ranks, device = (job.size, job.device) if job else (8, "cpu")
        torch.manual_seed(0)  # every rank draws the same whole tensors; `hi.run` gives each rank its part
        a = torch.randn(4, ranks, 4096 // (4 * ranks), 1024, device=device).bfloat16()
        b = torch.randn(1024, 512, device=device).bfloat16()

        program = hi.lower(ag_matmul(ranks))
        (c,) = hi.run(program, a, b)

        if job is None or job.rank == 0:
            exact = a.double() @ b.double()
            ours, torchs = ((x - exact).norm() / exact.norm() for x in (c, a @ b))
            print(program)
            print(f"relative error {ours:.2e}; torch's on one rank is {torchs:.2e}")


if __name__ == "__main__":
    main()
