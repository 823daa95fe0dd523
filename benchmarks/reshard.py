"""Compare changes of sharding without a matmul, compiled by `hi.compile`, with NCCL.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.reshard --out benchmarks/results/reshard
    torchrun --standalone --nproc-per-node 2 -m benchmarks.reshard --device cpu --shrink 64

The rows are a reduce-scatter of partial sums of 8192 x 16384, all-gathers to 64 and to 256 MiB, and all-reduces of 16
KiB to 64 MiB, in bf16. The floor is the time of NCCL. For all-reduces, it is the time of NCCL or of torch, whichever is
faster.

The peers:

    NCCL     reduce_scatter_tensor, all_gather_into_tensor, all_reduce
    torch    torch.ops.symm_mem._low_contention_reduce_scatter and _low_contention_all_gather, by copy engines;
             one_shot_all_reduce and two_shot_all_reduce_

The operands are in symmetric memory, so `torch` copies none of them. Before an all-gather, hostir finds its operand in
the memory that `executor.places` returns. So `fused` and `push` do not copy it either; `ring` and `by copy_engine` do.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.comparison import Judge, Subject, Work, compare, options_parser, summed_rows
from benchmarks.harness import synchronize
from benchmarks.matmul_all_reduce import PARTS, REDUCTIONS, by_nccl, one_shot
from benchmarks.matmul_reduce_scatter import low_contention
from benchmarks.scores import NCCL, ONE_SHOT, Row
from hostir.job.session import Session

PARTIAL = """hostir 1
mesh @mesh [didx] = {ranks}
fusion @reduced(%x: {dtype}[{M}, {N}] partial(didx)) -> (%y) {{
  %y: {dtype}[{M}{rows}, {N}] = reshard %x
}}
"""


def summed(ranks: int, M: int, N: int, dtype: str, *, scattered: bool) -> hi.Program:
    """Return the fusion that sums partial sums: by a reduce-scatter if `scattered` is True, else by an all-reduce."""
    devices, rows = " ".join(map(str, range(ranks))), "@didx" if scattered else ""
    return hi.parse(PARTIAL.format(ranks=devices, dtype=dtype, M=M, N=N, rows=rows))


def all_gather(ranks: int, M: int, N: int, dtype: str) -> hi.Fusion:
    """Return the fusion of an all-gather of rows."""
    with hi.Fusion("all_gather") as fusion:
        x = hi.tensor("x", [M, N], dtype)
        y = hi.reshard(x)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(0, mesh)
    y.set_device_mesh(mesh)
    return fusion


class Scattered(Subject):
    """A reduce-scatter of `x`, `[M, N]`. On GPUs, `x` is in symmetric memory. `y` has this rank's rows of the sum."""

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        super().__init__(row, dtype, job)
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
        sample, exact = summed_rows(self.row.M, self.ranks, self.rank, lambda rows: self.x[rows].double(), self.device)
        return Judge(sample, exact, self.by_nccl().clone())

    def parts(self) -> Mapping[str, Work]:
        return {"nccl": self.by_nccl}

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {NCCL: self.by_nccl, "torch": self.by_torch}

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
    """An all-gather of `x`, `[M / ranks, N]`, to `y`, `[M, N]`. On GPUs, `x` is in symmetric memory.

    So the peer `torch` does not copy `x`. For the same reason, hostir gets `x` in the memory of the executor, if
    `hi.Executor.places` returns a place for it. The trials of `hi.compile` run with `x` there, too.
    """

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        Subject.__init__(self, row, dtype, job)
        self.copies: list[weakref.ref[torch.Tensor]] = []  # of `x`, in the memory of executors
        self.x = self.shared(row.M // self.ranks, row.N)
        self.y = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.renew()

    def renew(self) -> None:
        super().renew()
        for copy in [copy for reference in self.copies if (copy := reference()) is not None]:
            copy.copy_(self.x)
        synchronize(self.device)
        dist.barrier()

    def inputs_of(self, executor: hi.Executor, slices: int) -> Sequence[torch.Tensor]:
        (place,) = executor.places(*self.inputs(slices))
        if place is None:
            return self.inputs(slices)
        self.copies.append(weakref.ref(place))
        return (place.copy_(self.x),)

    def judge(self) -> Judge:
        gathered = self.by_nccl().clone()
        sample = torch.arange(self.rank, self.row.M, self.ranks, device=self.device)
        return Judge(sample, gathered[sample].double(), gathered)

    def by_nccl(self) -> torch.Tensor:
        dist.all_gather_into_tensor(self.y, self.x)
        return self.y

    def by_torch(self) -> torch.Tensor:
        y = torch.ops.symm_mem._low_contention_all_gather(self.x, dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(y)

    def fusion(self, slices: int) -> hi.Fusion:
        return all_gather(self.ranks, self.row.M, self.row.N, self.dtype_name)


class Summed(Scattered):
    """An all-reduce of `x`, `[M, N]`, to `y`. On GPUs, `x` is in symmetric memory.

    The all-reduces of the floor work in place on `zeros`, `[M, N]`. The peer NCCL first copies `x`.
    """

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        Subject.__init__(self, row, dtype, job)
        self.x, self.zeros = self.shared(row.M, row.N), self.shared(row.M, row.N).zero_()
        self.y = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.renew()

    def judge(self) -> Judge:
        exact = self.x.double()
        dist.all_reduce(exact)
        rows = torch.arange(self.row.M, device=self.device)
        return Judge(rows, exact, self.copied(by_nccl))

    def parts(self) -> Mapping[str, Work]:
        return {name: partial(reduce, self.zeros) for name, reduce in zip(PARTS, REDUCTIONS.values(), strict=True)}

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {NCCL: partial(self.copied, by_nccl), ONE_SHOT: partial(one_shot, self.x)}

    def copied(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Copy `x`, and return the result of an in-place reduction of the copy."""
        return reduce(self.y.copy_(self.x))


def subject(row: Row, dtype: torch.dtype, job: Session) -> Subject:
    return {"reduce_scatter": Scattered, "all_gather": Gathered, "all_reduce": Summed}[row.model](row, dtype, job)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    return options_parser(__doc__, "reshard").parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    compare(parse_options(arguments), "reshard", subject, any_rows=True)


if __name__ == "__main__":
    main()
