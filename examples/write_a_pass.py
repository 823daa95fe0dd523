"""A pass of your own: it puts gathers on another stream, so that no gather queues behind an earlier round's matmul.

    python examples/write_a_pass.py                          4 simulated ranks
    torchrun --nproc-per-node 4 examples/write_a_pass.py     4 real ranks: on GPUs if available, otherwise on CPU

A pass is a pure function of a program. Its result is verified like the result of any other pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

import hostir as hi
from hostir.ir import Program, Statement
from hostir.ir.comm_ops import AllGather
from hostir.ir.host_ops import For, SetStream
from hostir.ir.op import Lit
from hostir.ir.sizes import Size
from hostir.lower import Pass, passes_of, run_passes


@dataclass(frozen=True)
class GatherAhead(Pass):
    """Issues the allgathers of every loop to an additional stream."""

    name = "gather_ahead"

    def run(self, program: Program) -> Program:
        body = [self.changed(s, program.streams) if isinstance(s, For) else s for s in program.body]
        return replace(program, body=tuple(body), streams=program.streams + 1)

    def changed(self, loop: For, spare: int) -> For:
        if not any(
            isinstance(s, AllGather) for s in loop.body
        ):  # the loops that fork from and join to the caller's stream
            return replace(loop, count=Size(spare + 1))
        return replace(loop, body=tuple(self.apart(loop.body, spare)))

    def apart(self, body: tuple[Statement, ...], spare: int) -> Iterator[Statement]:
        turn = body[0]  # the `set_stream` of the round
        for s in body:
            yield from (SetStream(Lit(spare)), s, turn) if isinstance(s, AllGather) else (s,)


def ag_matmul(ranks: int = 4, S: int = 8, M: int = 64, K: int = 256, N: int = 128) -> hi.Fusion:
    with hi.Fusion("ag_matmul") as fusion:
        a = hi.tensor("a", [S, ranks, M, K], "f32")
        b = hi.tensor("b", [K, N], "f32")
        c = hi.matmul(a, b)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(1, mesh)
    c.set_device_mesh(mesh)
    c.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


def main() -> None:
    with hi.session() as job:  # this rank of torchrun's job; None without torchrun
        ranks, device = (job.size, job.device) if job else (4, "cpu")
        program = run_passes(ag_matmul(ranks).program(), [*passes_of("pipeline", streams=2), GatherAhead()])

        torch.manual_seed(0)
        a, b = torch.randn(8, ranks, 64, 256, device=device), torch.randn(256, 128, device=device)
        exact = a.double() @ b.double()
        for seed in range(3):  # schedules of simulated ranks; real ranks have their own order
            (c,) = hi.run(program, a, b, seed=seed)
            if job is None or job.rank == 0:
                print(f"relative error {(c - exact).norm() / exact.norm():.1e}")
        if job is None or job.rank == 0:
            print(program)


if __name__ == "__main__":
    main()
