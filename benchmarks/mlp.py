"""An MLP with sequence-sharded input and output as one program: column parallel, activation, row parallel.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.mlp --out benchmarks/results/mlp
    torchrun --standalone --nproc-per-node 2 -m benchmarks.mlp --gated
    torchrun --standalone --nproc-per-node 2 -m benchmarks.mlp --device cpu --shrink 64 --rows 70B:2048

A row of the table is an MLP of Llama 3 with tensor parallelism 8, with gelu. With `--gated` the activation is silu(x @
gate) * (x @ up), as in Llama. floor = max(the computation alone, the all-gather and the reduce-scatter one after the
other). For hostir, a call with `out=` of what `hi.compile` has chosen in its trial is scored. In a pipeline, the axis
of the slices is outside the axis of the ranks.

The peers:

    NCCL + cuBLAS   all_gather_into_tensor, matmul, activation, matmul, reduce_scatter_tensor
    torch fused     fused_all_gather_matmul, activation, fused_matmul_reduce_scatter of torch.ops.symm_mem
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.comparison import PIECES, Judge, Subject, Work, compare, options_parser, summed_rows
from benchmarks.harness import synchronize
from benchmarks.scores import BENCHMARKS, BY_HAND, FIRST, TORCH, Row
from hostir.job.session import Session

OTHERS = tuple(model for model in BENCHMARKS["mlp"].models if model != FIRST[0])  # measured only if named


def mlp(ranks: int, slices: int, M: int, K: int, H: int, dtype: str, *, gated: bool) -> hi.Fusion:
    """Return the fusion of an MLP on `[M, K]`. With several slices, x is `[slices, ranks, rows, K]`.

    The axis of the slices is then a Stream axis of the result.
    """
    rows = [M] if slices == 1 else [slices, ranks, M // (slices * ranks)]
    with hi.Fusion("mlp") as fusion:
        x = hi.tensor("x", [*rows, K], dtype)
        first = [hi.tensor(name, [K, H], dtype) for name in (("gate", "up") if gated else ("up",))]
        down = hi.tensor("down", [H, K], dtype)
        products = [x @ w for w in first]
        y = (hi.silu(products[0]) * products[1] if gated else hi.gelu(products[0])) @ down
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    for w in first:
        w.shard(1, mesh)
    down.shard(0, mesh)
    for t in (x, y):
        t.shard(0 if slices == 1 else 1, mesh)
    if slices > 1:
        y.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


class Operands(Subject):
    """The tensors of a row on this rank. N of the row is the width of the hidden layer on one rank.

    Fields:
        x: `[M / ranks, K]`, this rank's rows; on GPUs in symmetric memory.
        together: `[K, N * weights]`, the weights before the activation, stored by columns.
        first: views of these weights, each `[K, N]`.
        down: `[N, K]`, the weight after the activation, stored by columns.
        gathered: `[M, K]`, the rows of all ranks.
        products: `[M, N * weights]`, the matmuls before the activation.
        part: `[M, K]`, this rank's partial sum of the result.
        y: `[M / ranks, K]`, this rank's rows of the result.
    """

    slices = (2, 4)

    def __init__(self, row: Row, dtype: torch.dtype, job: Session, *, gated: bool = False) -> None:
        super().__init__(row, dtype, job)
        self.gated = gated
        M, H, K = row.M, row.N, row.K
        empty = partial(torch.empty, dtype=dtype, device=self.device)
        self.x = self.shared(M // self.ranks, K)
        self.together = (torch.randn(H * (1 + gated), K, device=self.device) / K**0.5).to(dtype).t()
        self.first = self.together.chunk(1 + gated, dim=1)
        self.down = (torch.randn(K, H, device=self.device) / H**0.5).to(dtype).t()
        self.gathered, self.products = empty(M, K), empty(M, H * (1 + gated))
        self.part, self.y = empty(M, K), empty(M // self.ranks, K)
        self.renew()

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.x.normal_()
        synchronize(self.device)
        dist.barrier()
        self.by_hand()

    def judge(self) -> Judge:
        row = self.row
        self.by_hand()
        sample, exact = summed_rows(row.M, self.ranks, self.rank, self.exact_part, self.device)
        in_pieces = []
        for n in (1, *(n for n in sorted({*PIECES, self.ranks}) if n > 1)):
            pieces = [self.activated([x @ w for w in self.first]) @ self.down for x in self.gathered.chunk(n)]
            torch.cat(pieces, out=self.part)
            self.scatter()
            in_pieces.append(self.y.clone())
        return Judge(sample, exact, in_pieces[0], in_pieces[1:])

    def exact_part(self, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows of this rank's partial sum, in float64."""
        x = self.gathered[rows].double()
        return self.activated([x @ w.double() for w in self.first]) @ self.down.double()

    def activated(self, products: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the activation of the results of the first layer's matmuls."""
        if not self.gated:
            return (
                torch.ops.aten.gelu.out(products[0], out=out)
                if out is not None
                else torch.nn.functional.gelu(*products)
            )
        return torch.mul(torch.nn.functional.silu(products[0]), products[1], out=out)

    def parts(self) -> Mapping[str, Work]:
        return {"gemm": self.compute, "nccl": self.communicate}

    def about(self) -> dict[str, float | bool]:
        row = self.row
        return {"flops": 2 * row.M * row.N * row.K * (2 + self.gated), "gated": self.gated}

    def compute(self) -> None:
        torch.matmul(self.gathered, self.together, out=self.products)
        hidden = self.activated(self.products.chunk(1 + self.gated, dim=1))
        torch.matmul(hidden, self.down, out=self.part)

    def gather(self) -> None:
        dist.all_gather_into_tensor(self.gathered, self.x)

    def scatter(self) -> None:
        dist.reduce_scatter_tensor(self.y, self.part)

    def communicate(self) -> None:
        self.gather()
        self.scatter()

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {BY_HAND: self.by_hand, TORCH: self.fused}

    def by_hand(self) -> torch.Tensor:
        self.gather()
        self.compute()
        self.scatter()
        return self.y

    def fused(self) -> torch.Tensor:
        ops, group = torch.ops.symm_mem, dist.group.WORLD.group_name
        _, products = ops.fused_all_gather_matmul(self.x, [*self.first], 0, group, return_A=False)
        return ops.fused_matmul_reduce_scatter(self.activated(products), self.down, "sum", 0, group)

    def fusion(self, slices: int) -> hi.Fusion:
        row = self.row
        return mlp(self.ranks, slices, row.M, row.K, row.N * self.ranks, self.dtype_name, gated=self.gated)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        x = self.x if slices == 1 else self.x.view(slices, 1, -1, self.row.K)
        return x, *self.first, self.down

    def out(self, slices: int) -> torch.Tensor:
        return self.y if slices == 1 else self.y.view(slices, 1, -1, self.row.K)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = options_parser(__doc__, "mlp", without=OTHERS)
    parser.add_argument("--gated", action="store_true", help="silu(x @ gate) * (x @ up) instead of gelu(x @ up)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    options = parse_options(arguments)
    if options.gated and options.out is not None:
        options.out = options.out.with_name(f"{options.out.name}_gated")
    compare(options, "mlp", partial(Operands, gated=options.gated))


if __name__ == "__main__":
    main()
