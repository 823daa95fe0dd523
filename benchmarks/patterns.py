"""Compare pipelined and sequential host programs with hand-written torch: NCCL, then cuBLAS, or in the reverse order.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.patterns --out benchmarks/results/patterns

The rows of the table are the layers of Llama 3 8B, 70B and 405B with tensor parallelism 8, and the shape that nvFuser
published. First, every variant must give the result of the hand-written code. Then all variants are timed in one
process. A ratio above 1 means that hostir is faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.harness import Clock, graphed, table, write
from examples import patterns
from hostir.job.session import Session, session

LAYERS = {"8B": (1792, 4096), "70B": (3584, 8192), "405B": (6656, 16384)}  # N and K of a rank, after an all-gather
ROWS = (4096, 8192, 16384)
FEW_CTAS = 16
BY_HAND = "by hand"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One shape. `collective` is allgather, reduce_scatter or allreduce; N and K are the extents on one rank."""

    label: str
    collective: str
    M: int
    N: int
    K: int


@dataclass(frozen=True)
class Variant:
    """A way to lower and run a fusion. `ctas` is the maximum number of NCCL's thread blocks; 0 leaves it to NCCL."""

    strategy: str
    slices: int = 1
    streams: int = 1
    kernels: str = "aten"
    ctas: int = 0

    def __str__(self) -> str:
        if self.strategy == "sequential":
            return f"sequential {self.kernels}"
        fewer = f" {self.ctas} CTAs" if self.ctas else ""
        return f"S={self.slices} streams={self.streams} {self.kernels}{fewer}"


VARIANTS = (
    Variant("sequential"),
    *(Variant("pipeline", s, n) for s, n in ((2, 2), (4, 2), (4, 4), (8, 4))),
    *(Variant("pipeline", s, n, ctas=FEW_CTAS) for s, n in ((2, 2), (4, 4))),
    *(Variant("pipeline", s, n, kernels="triton") for s, n in ((2, 2), (4, 4))),
)


def rows() -> Iterator[Row]:
    for name, (n, k) in LAYERS.items():
        for m in ROWS:
            yield Row(f"{name} M={m}", "allgather", m, n, k)
    for name, (n, k) in LAYERS.items():
        for m in ROWS:
            yield Row(f"{name} M={m}", "reduce_scatter", m, k, n)
    yield Row("70B M=8192", "allreduce", 8192, 8192, 3584)
    yield Row("nvFuser M=32768", "allgather", 32768, 8192, 16384)


class Case:
    """The tensors of a row on this rank, the hand-written computation, and the fusion."""

    def __init__(self, row: Row, ranks: int, device: torch.device) -> None:
        self.row, self.ranks = row, ranks
        rows_here = row.M // ranks if row.collective == "allgather" else row.M
        self.a = torch.randn(rows_here, row.K, device=device, dtype=BF16)
        self.b = torch.randn(row.K, row.N, device=device, dtype=BF16) / row.K**0.5
        dist.broadcast(self.b, 0) if row.collective == "allgather" else None
        self.full = torch.empty(row.M, row.K if row.collective == "allgather" else row.N, device=device, dtype=BF16)
        self.c = torch.empty(
            row.M // ranks if row.collective == "reduce_scatter" else row.M, row.N, device=device, dtype=BF16
        )

    def communication(self) -> None:
        collective = self.row.collective
        if collective == "allgather":
            dist.all_gather_into_tensor(self.full, self.a)
        elif collective == "reduce_scatter":
            dist.reduce_scatter_tensor(self.c, self.full)
        else:
            dist.all_reduce(self.c)

    def gemm(self) -> None:
        if self.row.collective == "allgather":
            torch.matmul(self.full, self.b, out=self.c)
        else:
            torch.matmul(self.a, self.b, out=self.full if self.row.collective == "reduce_scatter" else self.c)

    def by_hand(self) -> None:
        first, second = (
            (self.communication, self.gemm) if self.row.collective == "allgather" else (self.gemm, self.communication)
        )
        first()
        second()

    def fusion(self, slices: int) -> hi.Fusion:
        row, sizes = self.row, {"ranks": self.ranks, "S": slices, "M": self.row.M, "N": self.row.N, "dtype": "bf16"}
        if row.collective == "allgather":
            return patterns.allgather_matmul(K=row.K, **sizes)
        row_parallel = patterns.row_parallel_scattered if row.collective == "reduce_scatter" else patterns.row_parallel
        return row_parallel(K=row.K * self.ranks, **sizes)

    def operand(self, slices: int) -> torch.Tensor:
        """Return A with the axes that it has in the fusion.

        For an allgather and a reduce_scatter, the axis of the slices is the first axis.
        """
        m, d = self.row.M // (slices * self.ranks), self.ranks
        if self.row.collective == "allgather":
            return self.a.view(slices, 1, m, -1)
        if self.row.collective == "allreduce":
            return self.a
        return self.a.view(d, slices, m, -1).transpose(0, 1).contiguous()

    def agrees(self, out: torch.Tensor, slices: int) -> bool:
        """Return True if a result equals the hand-written one, up to rounding: bf16 sums may be in another order."""
        m = self.row.M // (slices * self.ranks)
        mine = (
            out.reshape(self.c.shape)
            if self.row.collective != "allgather"
            else out.transpose(0, 1).reshape(self.ranks * slices * m, -1)
        )
        off = torch.linalg.vector_norm(mine.float() - self.c.float()) / torch.linalg.vector_norm(self.c.float())
        worst = off.reshape(1).clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst) < 1e-2


def measure(joined: Session, row: Row, clock: Clock, groups: dict[int, Any]) -> dict[str, Any]:
    """Return all figures of a row, in microseconds."""
    torch.manual_seed(joined.rank)
    case = Case(row, joined.size, joined.device)
    case.by_hand()
    figures: dict[str, Any] = {"row": row.label, "kind": row.collective, "shape": [row.M, row.N, row.K]}
    parts = clock.race({"gemm": case.gemm, "communication": case.communication})
    figures |= parts
    team = tuple(range(joined.size))
    works: dict[str, Callable[[], Any]] = {BY_HAND: case.by_hand}
    for variant in VARIANTS:
        joined.groups.made[team] = groups[variant.ctas]
        program = hi.lower(case.fusion(variant.slices), variant.strategy, variant.streams)
        call = partial(hi.Executor(program, kernels=variant.kernels), case.operand(variant.slices), case.b)
        case.by_hand()
        if not case.agrees(call()[0], variant.slices):
            raise SystemExit(f"{row.label} {row.collective}: '{variant}' differs from the hand-written result")
        works[str(variant)] = call
    figures["eager"] = clock.race(works)
    graphs = {name: graphed(work) for name, work in works.items()}
    figures["graph"] = clock.race(graphs)
    return figures


def best(times: dict[str, float]) -> str:
    """Return the name of the fastest pipeline."""
    return min((name for name in times if name.startswith("S=")), key=times.__getitem__)


def report(results: list[dict[str, Any]]) -> str:
    """Return a table with a row for each shape, and ratios to the hand-written time of the same mode."""
    lines = []
    for r in results:
        share = r["communication"] / (r["gemm"] + r["communication"])
        cells = [f"{r['kind']} {r['row']}", f"{r['gemm']:.0f}", f"{r['communication']:.0f}", f"{share:.0%}"]
        for times in (r["eager"], r["graph"]):
            hand, top = times[BY_HAND], best(times)
            cells += [f"{hand:.0f}", f"{hand / times['sequential aten']:.3f}", f"{hand / times[top]:.3f} ({top})"]
        lines.append(cells)
    modes = [f"{name}, {mode}" for mode in ("eager", "graph") for name in ("by hand us", "sequential", "pipeline")]
    return table(["row", "GEMM us", "collective us", "its share", *modes], lines)


def main() -> None:
    """Measure all rows, and write the table and the figures on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no more rows after this time")
    options = parser.parse_args()
    begun, results = time.monotonic(), []
    with session("cuda") as joined:
        assert joined
        clock = Clock(joined.device, options.runs)
        fewer = joined.groups.options["pg_options"]
        fewer.config.max_ctas = FEW_CTAS
        everyone = list(range(joined.size))
        groups = {
            0: dist.new_group(everyone, **joined.groups.options),
            FEW_CTAS: dist.new_group(everyone, pg_options=fewer),
        }
        for group in groups.values():
            dist.all_reduce(torch.zeros(1, device=joined.device), group=group)
        for row in rows():
            over = torch.tensor([time.monotonic() - begun > options.seconds], dtype=torch.int32, device=joined.device)
            dist.all_reduce(over)
            if over.item():
                break
            results.append(measure(joined, row, clock, groups))
            if joined.rank == 0:
                print(report(results[-1:]).splitlines()[-1], flush=True)
                if options.out:
                    write(
                        options.out,
                        "Pipelines over NCCL against NCCL and cuBLAS by hand",
                        report(results),
                        {"results": results},
                    )
            torch.cuda.empty_cache()
        if joined.rank == 0:
            print(report(results), flush=True)


if __name__ == "__main__":
    main()
