"""Collectives alone, as `hi.compile` makes them of a change of sharding, against NCCL.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.reshard --out benchmarks/results/reshard
    torchrun --standalone --nproc-per-node 2 -m benchmarks.reshard --device cpu --shrink 64

A reduce-scatter of partial sums of 8192 x 16384, all-gathers to 64 and to 256 MiB, and all-reduces of 16 KiB to 64 MiB,
in bf16. The floor is NCCL alone; of all-reduces the best of NCCL and torch.

What it is measured against:

    NCCL     reduce_scatter_tensor, all_gather_into_tensor, all_reduce
    torch    torch.ops.symm_mem._low_contention_reduce_scatter and _low_contention_all_gather, by copy engines;
             one_shot_all_reduce and two_shot_all_reduce_
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.comparison import Judge, Subject, Work, compare, parser, summed_rows
from benchmarks.harness import synchronize
from benchmarks.matmul_all_reduce import ALONE, REDUCTIONS, by_nccl, one_shot
from benchmarks.matmul_reduce_scatter import low_contention
from benchmarks.scores import ONE_SHOT, Row
from hostir.runtime.session import Session

PARTIAL = """hostir 1
mesh @mesh [didx] = {ranks}
fusion @reduced(%x: {dtype}[{M}, {N}] partial(didx)) -> (%y) {{
  %y: {dtype}[{M}{rows}, {N}] = reshard %x
}}
"""


def summed(ranks: int, M: int, N: int, dtype: str, *, scattered: bool) -> hi.Program:
    """Return the fusion that sums up partial sums; `scattered`: each rank gets its rows of the sum, and not all."""
    devices, rows = " ".join(map(str, range(ranks))), "@didx" if scattered else ""
    return hi.parse(PARTIAL.format(ranks=devices, dtype=dtype, M=M, N=N, rows=rows))


def all_gather(ranks: int, M: int, N: int, dtype: str) -> hi.Fusion:
    """Return the fusion that gathers the rows of all ranks."""
    with hi.Fusion("all_gather") as fusion:
        x = hi.tensor("x", [M, N], dtype)
        y = hi.reshard(x)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(0, mesh)
    y.set_device_mesh(mesh)
    return fusion


class Scattered(Subject):
    """Partial sums `x`, `[M, N]`, in symmetric memory on GPUs; and `y`, this rank's rows of their sum."""

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session) -> None:
        super().__init__(row, dtype, joined)
        self.x = self.shared(row.M, row.N)
        self.y = torch.empty(row.M // self.ranks, row.N, dtype=dtype, device=self.device)
        self.renew()

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.x.normal_()
        synchronize(self.device)
        dist.barrier()

    def judge(self) -> Judge:
        found = summed_rows(self.row.M, self.ranks, self.rank, lambda rows: self.x[rows].double(), self.device)
        return Judge(*found, self.by_nccl().clone())

    def parts(self) -> Mapping[str, Work]:
        return {"nccl": self.by_nccl}

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {"NCCL": self.by_nccl, "torch": self.by_torch}

    def by_nccl(self) -> torch.Tensor:
        dist.reduce_scatter_tensor(self.y, self.x)
        return self.y

    def by_torch(self) -> torch.Tensor:
        return low_contention(self.x)

    def fusion(self, slices: int) -> hi.Fusion | hi.Program:
        row = self.row
        return summed(self.ranks, row.M, row.N, self.dtype_name, scattered=len(self.y) < row.M)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return (self.x,)

    def out(self, slices: int) -> torch.Tensor:
        return self.y


class Gathered(Scattered):
    """This rank's rows `x`, `[M / ranks, N]`, in symmetric memory on GPUs; and `y`, `[M, N]`, those of all ranks."""

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session) -> None:
        Subject.__init__(self, row, dtype, joined)
        self.x = self.shared(row.M // self.ranks, row.N)
        self.y = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.renew()

    def judge(self) -> Judge:
        whole = self.by_nccl().clone()
        sample = torch.arange(self.rank, self.row.M, self.ranks, device=self.device)
        return Judge(sample, whole[sample].double(), whole)

    def by_nccl(self) -> torch.Tensor:
        dist.all_gather_into_tensor(self.y, self.x)
        return self.y

    def by_torch(self) -> torch.Tensor:
        y = torch.ops.symm_mem._low_contention_all_gather(self.x, dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(y)

    def fusion(self, slices: int) -> hi.Fusion:
        return all_gather(self.ranks, self.row.M, self.row.N, self.dtype_name)


class Summed(Scattered):
    """Partial sums `x`, `[M, N]`, in symmetric memory on GPUs; and `y`, their sum.

    The floor's all-reduces work in place, on the zeros of `z`; as a peer, one of these has to copy `x` first.
    """

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session) -> None:
        Subject.__init__(self, row, dtype, joined)
        self.x, self.z = self.shared(row.M, row.N), self.shared(row.M, row.N).zero_()
        self.y = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.renew()

    def judge(self) -> Judge:
        exact = self.x.double()
        dist.all_reduce(exact)
        rows = torch.arange(self.row.M, device=self.device)
        return Judge(rows, exact, self.copied(by_nccl))

    def parts(self) -> Mapping[str, Work]:
        return {name: partial(call, self.z) for name, call in zip(ALONE, REDUCTIONS.values(), strict=True)}

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {"NCCL": partial(self.copied, by_nccl), ONE_SHOT: partial(one_shot, self.x)}

    def copied(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The result of a reduction in place, of a copy."""
        return reduce(self.y.copy_(self.x))


def subject(row: Row, dtype: torch.dtype, joined: Session) -> Subject:
    return {"reduce_scatter": Scattered, "all_gather": Gathered, "all_reduce": Summed}[row.model](row, dtype, joined)


# The command line -------------------------------------------------------------------------------------------------
def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    return parser(__doc__, "reshard").parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a line a row, and writes table and figures on rank 0."""
    compare(options(arguments), "reshard", subject, any_rows=True)


if __name__ == "__main__":
    main()
