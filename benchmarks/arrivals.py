"""All-gather + matmul of one of 8 ranks, emulated on 2 GPUs: the single peer sends the shards of all other ranks.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.arrivals --out benchmarks/results/arrivals

It stands in for a measurement on 8 GPUs. It runs the `fused` and `push` programs for 8 ranks, but all copies go to the
same peer, each into the memory for the shard of a different rank. Each GPU sends and receives as many shards as with 8
ranks. They have the same size and are sent one after another, each followed by a signal, and each GPU multiplies them
as they arrive. Three things differ from 8 ranks: the barrier and the credits are between two ranks, no rank lags behind
the others, and there are no other implementations to compare with. The floor is cuBLAS alone, or the copies of the same
number of shards alone, from a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import hostir as hi
from benchmarks.allgather_matmul import Judge
from benchmarks.comparison import PATIENCE, Candidate, with_out
from benchmarks.harness import Clock, graphed, table, write
from benchmarks.scores import GRAPH, LARGE, MODELS, MUST, Row, rows
from hostir.job.session import session
from hostir.lower.fused import SMS

TITLE = "All-gather + matmul as ranks of more GPUs meet it, on 2"


@dataclass(frozen=True)
class Way:
    """The way in which shards are sent, and the kernels that multiply them."""

    name: str
    kernels: str
    sms: int = 0
    by_kernel: bool = False


WAYS = (
    Way("fused aten", "aten"),
    Way("fused triton", "triton"),
    Way("fused 2 streams triton", "triton", by_kernel=True),
    Way("push triton", "triton", sms=SMS),
)


@dataclass(frozen=True)
class Scaling:
    """The scales of a matmul of e4m3.

    Fields:
        groups: the number of scales of each row of A; 0 for a single scale of all rows.
        scale_b_shape: the shape of B's scales.
        fast: True for sums in the tensor cores.
    """

    groups: int
    scale_b_shape: tuple[int, int]
    fast: bool


def program_text(row: Row, ranks: int, way: Way, scaling: Scaling | None = None) -> str:
    """Return the program of two ranks that emulate two of `ranks` ranks.

    The peer has the position 1 - %r. After its own rows, the peer multiplies the rows of the position after 1 - %r, so
    a rank sends it these rows first. Scales of rows are sent before all rows, as in the programs of `hi.lower`.
    """
    m, peer, shape = row.M // ranks, "(%r + 1) % 2", f"{row.M // ranks}, {row.K}"
    dtype, product, ahead = "bf16", "matmul %full, %b", ["barrier of %full over didx"]
    operands = f"%a: bf16[1, 2@didx, {shape}], %b: bf16[{row.K}, {row.N}]"
    scales: list[str] = []
    slot = f"((%r + 1) % 2 + %i + 1) % {ranks}"
    by = f" by {way.sms} sms" if way.sms else ""
    signal = f"signal %there[{slot}] = 1 at {peer} over didx"
    copy = [f"%slot = chunk %full[{slot} of {ranks}] axis 1", f"put %a -> %slot at {peer} over didx{by}", signal]
    if way.by_kernel:
        copy = ["set_stream 0", *copy[:2], "set_stream 1", "synchronize 0", f"{signal} by 1 sms"]
    local_copy = [f"%mine = chunk %full[%r of {ranks}] axis 1", f"put %a -> %mine at %r over didx{by}"]
    local_copy += ["signal %there[%r] = 1 at %r over didx"]
    fork, join = ["set_stream 0", "synchronize %user"], [f"synchronize {int(way.by_kernel)}"]
    apart = " own %a"
    if way.sms:
        fork, join, apart = [], [], ""
    if scaling is not None:
        scale_shape, columns = f"{m}, {scaling.groups}", ", ".join(map(str, scaling.scale_b_shape))
        dtype, scale_type = "f8e4m3", f"f32[1, 2@didx, {scale_shape}]" if scaling.groups else "f32[1, 1, 1, 1]"
        operands = f"%a: f8e4m3[1, 2@didx, {shape}], %b: f8e4m3[{row.K}, {row.N}], %scale_a: {scale_type}"
        operands += f", %scale_b: f32[{columns}]"
        row_scales = "%scales" if scaling.groups else "%scale_a"
        fast = " accumulate fast" if scaling.fast else ""
        product = f"scaled_matmul %full, %b scaled {row_scales}, %scale_b to bf16{fast}"
    if scaling is not None and scaling.groups:
        rounds = f"for %i in 0..{ranks - 1} {{"
        ahead, scales = (
            [],
            [
                *(
                    f"%scales: f32[1, {ranks}, {scale_shape}] = allocate_symmetric",
                    "barrier of %scales over didx",
                    rounds,
                ),
                f"%scale_slot = chunk %scales[{slot} of {ranks}] axis 1",
                *(f"put %scale_a -> %scale_slot at {peer} over didx by {SMS} sms", "}"),
                f"%scale_mine = chunk %scales[%r of {ranks}] axis 1",
                "put %scale_a -> %scale_mine at %r over didx",
            ],
        )
    lines = [
        *("%user = current_stream", "%r = rank of %a over didx", *scales),
        *(f"%full: {dtype}[1, {ranks}, {shape}] = allocate_symmetric", f"%there: flag[{ranks}] = allocate_symmetric"),
        *(*fork, *ahead, *(local_copy if way.sms else [])),
        *(f"for %i in 0..{ranks - 1} {{", *copy, "}", "set_stream %user"),
        f"%c: bf16[1, {ranks}, {m}, {row.N}] = allocate",
        *(f"{product} -> %c ready %there >= 1 from %r{apart}", *join),
    ]
    head = [
        "hostir 1",
        "mesh @mesh [didx] = 0 1",
        f"program @arrivals({operands}) -> (%c) streams {1 + way.by_kernel} {{",
    ]
    return "\n".join([*head, *lines, "}"])


@dataclass
class Rows:
    """The operands of a row's product, for a `Judge`."""

    row: Row
    ranks: int
    gathered: torch.Tensor
    b: torch.Tensor


class Bench:
    """Measures rows, one after another, on both ranks in step."""

    def __init__(self, ranks: int, repeats: int, device: torch.device) -> None:
        self.ranks, self.clock, self.device = ranks, Clock(device, repeats), device
        self.rank = dist.get_rank()

    def measure(self, row: Row) -> dict[str, Any]:
        """Return the times of replays, in microseconds. The result of each way is checked before the way is timed."""
        m = row.M // self.ranks
        a = symm_mem.empty(m, row.K, dtype=torch.bfloat16, device=self.device)
        peer_rows = symm_mem.rendezvous(a, dist.group.WORLD).get_buffer(1 - self.rank, a.shape, a.dtype)
        a.normal_()
        b = (torch.randn(row.N, row.K, device=self.device) / row.K**0.5).bfloat16().t()
        torch.cuda.synchronize()
        dist.barrier()
        gathered = peer_rows.repeat(self.ranks, 1)
        gathered[self.rank * m : (self.rank + 1) * m] = a
        copies, c = torch.empty_like(gathered), torch.empty(row.M, row.N, dtype=torch.bfloat16, device=self.device)

        def pull() -> None:
            for part in copies.chunk(self.ranks)[1:]:
                part.copy_(peer_rows)

        judge = Judge(Rows(row, self.ranks, gathered, b))
        works = {"gemm": graphed(partial(torch.matmul, gathered, b, out=c)), "copies": graphed(pull)}
        for way in WAYS:
            candidate = self.candidate(row, way, a, b)
            judge.check(candidate)
            works[way.name] = candidate.call
        times = self.clock.race(works)
        host = self.clock.host({way.name: works[way.name] for way in WAYS})
        torch.cuda.synchronize()
        dist.barrier()  # no rank frees symmetric memory while the other uses it
        floor = max(times["gemm"], times["copies"])
        best = min((way.name for way in WAYS), key=times.__getitem__)
        about = {"model": row.model, "M": row.M, "N": row.N, "K": row.K, "ranks": self.ranks}
        scores = {"floor_us": floor, "best": best, "score": round(floor / times[best], 3)}
        return {**about, "times": times, "host_us": host, **scores}

    def candidate(self, row: Row, way: Way, a: torch.Tensor, b: torch.Tensor) -> Candidate:
        executor = hi.Executor(hi.parse(program_text(row, self.ranks, way)), kernels=way.kernels, timeout=PATIENCE)
        m = row.M // self.ranks
        rows, c = a.view(1, 1, m, row.K), torch.empty(1, self.ranks, m, row.N, dtype=a.dtype, device=a.device)
        return with_out(way.name, executor, (rows, b), c, GRAPH)


def report(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a line for each row."""
    names = ["gemm", "copies", *(way.name for way in WAYS)]
    lines = [
        [
            f"{r['model']} M={r['M']}",
            *(f"{r['times'][name]:.0f}" for name in names),
            f"{r['host_us'][r['best']]:.0f}",
            f"{r['score']:.2f}",
            f"{MUST[r['model']][r['M']]:.2f}" if r["ranks"] == 8 and r["M"] in MUST[r["model"]] else "-",
        ]
        for r in results
    ]
    return table(["row", *names, "host of the best", "best score", "to reach on 8"], lines)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT_RANKS.json and OUT_RANKS.md")
    parser.add_argument("--ranks", type=int, default=8, help="the number of ranks to emulate (default: %(default)s)")
    parser.add_argument(
        "--rows", type=rows, default=None, help="the rows, such as 8B:2048,70B (default: M from 2048 on)"
    )
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each program (default: %(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    options = parse_options()
    selected = options.rows or [Row(model, m, *MODELS[model]) for model in MUST for m in LARGE]
    results: list[dict[str, Any]] = []
    with session("cuda") as job, torch.no_grad():
        if job is None or job.size != 2:
            sys.exit("start it with torchrun, two processes, a GPU each")
        torch.manual_seed(job.rank)
        bench = Bench(options.ranks, options.repeats, job.device)
        for row in selected:
            results.append(bench.measure(row))
            torch.cuda.empty_cache()
            if job.rank == 0:
                times = "  ".join(f"{name} {t:.0f}" for name, t in results[-1]["times"].items())
                print(f"{row}: {times}  score {results[-1]['score']:.2f}", flush=True)
                if options.out:
                    path = options.out.with_name(f"{options.out.name}_{options.ranks}")
                    write(path, TITLE, report(results), {"rows": results})


if __name__ == "__main__":
    main()
