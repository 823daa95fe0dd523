"""Pipelined and sequential host programs against hand-written torch: NCCL, then cuBLAS (or the other way round).

    torchrun --standalone --nproc-per-node 8 -m benchmarks.patterns --out benchmarks/results/patterns

Rows are the layers of Llama 3 8B, 70B and 405B at tensor parallel 8, and the shape that nvFuser published. Every
variant first has to give the hand-written result; then all are timed in one process. Ratios above 1 mean faster than
by hand.
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
    """One shape: `kind` is allgather, reduce_scatter or allreduce; N and K are those of one rank."""

    label: str
    kind: str
    M: int
    N: int
    K: int


@dataclass(frozen=True)
class Variant:
    """How a program is made and run; `ctas` limits NCCL's thread blocks (0: NCCL's own choice)."""

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
    """The tensors of a row on this rank, the hand-written computation, and our fusion of it."""

    def __init__(self, row: Row, ranks: int, device: torch.device) -> None:
        self.row, self.ranks = row, ranks
        rows_here = row.M // ranks if row.kind == "allgather" else row.M
        self.a = torch.randn(rows_here, row.K, device=device, dtype=BF16)
        self.b = torch.randn(row.K, row.N, device=device, dtype=BF16) / row.K**0.5
        dist.broadcast(self.b, 0) if row.kind == "allgather" else None
        self.whole = torch.empty(row.M, row.K if row.kind == "allgather" else row.N, device=device, dtype=BF16)
        self.c = torch.empty(
            row.M // ranks if row.kind == "reduce_scatter" else row.M, row.N, device=device, dtype=BF16
        )

    def communication(self) -> None:
        kind = self.row.kind
        if kind == "allgather":
            dist.all_gather_into_tensor(self.whole, self.a)
        elif kind == "reduce_scatter":
            dist.reduce_scatter_tensor(self.c, self.whole)
        else:
            dist.all_reduce(self.c)

    def gemm(self) -> None:
        if self.row.kind == "allgather":
            torch.matmul(self.whole, self.b, out=self.c)
        else:
            torch.matmul(self.a, self.b, out=self.whole if self.row.kind == "reduce_scatter" else self.c)

    def by_hand(self) -> None:
        first, second = (
            (self.communication, self.gemm) if self.row.kind == "allgather" else (self.gemm, self.communication)
        )
        first()
        second()

    def fusion(self, slices: int) -> hi.Fusion:
        row, sizes = self.row, {"ranks": self.ranks, "S": slices, "M": self.row.M, "N": self.row.N, "dtype": "bf16"}
        if row.kind == "allgather":
            return patterns.allgather_matmul(K=row.K, **sizes)
        made = patterns.row_parallel_scattered if row.kind == "reduce_scatter" else patterns.row_parallel
        return made(K=row.K * self.ranks, **sizes)

    def operand(self, slices: int) -> torch.Tensor:
        """A as the fusion has it: rows by slice first where slices and ranks both divide them."""
        m, d = self.row.M // (slices * self.ranks), self.ranks
        if self.row.kind == "allgather":
            return self.a.view(slices, 1, m, -1)
        if self.row.kind == "allreduce":
            return self.a
        return self.a.view(d, slices, m, -1).transpose(0, 1).contiguous()

    def agrees(self, out: torch.Tensor, slices: int) -> bool:
        """Whether a result is the hand-written one, up to the rounding of bf16 sums in another order."""
        m = self.row.M // (slices * self.ranks)
        mine = (
            out.reshape(self.c.shape)
            if self.row.kind != "allgather"
            else out.transpose(0, 1).reshape(self.ranks * slices * m, -1)
        )
        off = torch.linalg.vector_norm(mine.float() - self.c.float()) / torch.linalg.vector_norm(self.c.float())
        worst = off.reshape(1).clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst) < 1e-2


def measure(joined: Session, row: Row, clock: Clock, groups: dict[int, Any]) -> dict[str, Any]:
    """All figures of a row, in microseconds."""
    torch.manual_seed(joined.rank)
    case = Case(row, joined.size, joined.device)
    case.by_hand()
    found: dict[str, Any] = {"row": row.label, "kind": row.kind, "shape": [row.M, row.N, row.K]}
    parts = clock.race({"gemm": case.gemm, "communication": case.communication})
    found |= parts
    team = tuple(range(joined.size))
    works: dict[str, Callable[[], Any]] = {BY_HAND: case.by_hand}
    for variant in VARIANTS:
        joined.groups.made[team] = groups[variant.ctas]
        program = hi.lower(case.fusion(variant.slices), variant.strategy, variant.streams)
        call = partial(hi.Executor(program, kernels=variant.kernels), case.operand(variant.slices), case.b)
        case.by_hand()
        if not case.agrees(call()[0], variant.slices):
            raise SystemExit(f"{row.label} {row.kind}: '{variant}' differs from the hand-written result")
        works[str(variant)] = call
    found["eager"] = clock.race(works)
    graphs = {name: graphed(work) for name, work in works.items()}
    found["graph"] = clock.race(graphs)
    return found


def best(times: dict[str, float]) -> str:
    """The fastest pipeline."""
    return min((name for name in times if name.startswith("S=")), key=times.__getitem__)


def report(results: list[dict[str, Any]]) -> str:
    """The table: a row a shape, ratios to the hand-written time of the same mode."""
    lines = []
    for r in results:
        share = r["communication"] / (r["gemm"] + r["communication"])
        cells = [f"{r['kind']} {r['row']}", f"{r['gemm']:.0f}", f"{r['communication']:.0f}", f"{share:.0%}"]
        for times in (r["eager"], r["graph"]):
            hand, top = times[BY_HAND], best(times)
            cells += [f"{hand:.0f}", f"{hand / times['sequential aten']:.3f}", f"{hand / times[top]:.3f} ({top})"]
        lines.append(cells)
    modes = [f"{what}, {mode}" for mode in ("eager", "graph") for what in ("by hand us", "sequential", "pipeline")]
    return table(["row", "GEMM us", "collective us", "its share", *modes], lines)


def main() -> None:
    """Measures, and writes the table and the figures on rank 0."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path)
    options.add_argument("--runs", type=int, default=30)
    options.add_argument("--seconds", type=float, default=1e9, help="start no further row after this long")
    given = options.parse_args()
    begun, results = time.monotonic(), []
    with session("cuda") as joined:
        assert joined
        clock = Clock(joined.device, given.runs)
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
            over = torch.tensor([time.monotonic() - begun > given.seconds], dtype=torch.int32, device=joined.device)
            dist.all_reduce(over)
            if over.item():
                break
            results.append(measure(joined, row, clock, groups))
            if joined.rank == 0:
                print(report(results[-1:]).splitlines()[-1], flush=True)
                if given.out:
                    write(
                        given.out,
                        "Pipelines over NCCL against NCCL and cuBLAS by hand",
                        report(results),
                        {"results": results},
                    )
            torch.cuda.empty_cache()
        if joined.rank == 0:
            print(report(results), flush=True)


if __name__ == "__main__":
    main()
