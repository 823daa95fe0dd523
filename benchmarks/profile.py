"""Draw pictures of pipelined runs on the GPU: the kernels on their streams, from the CUDA profiler.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.profile --out docs/images
    torchrun --standalone --nproc-per-node 2 -m benchmarks.profile --out docs/images --only sum

`--only sum` draws the pictures whose names begin with `sum`. For each picture, the kernels are also printed, with their
starts and durations.

The pictures show runs of rank 0. The runs are replayed from CUDA graphs, so that launch times do not count.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import hostir as hi
from benchmarks.harness import graphed
from examples import patterns
from hostir.ir.host_ops import Delay
from hostir.ir.program import rewrite
from hostir.ir.types import bind_shape
from hostir.job.session import Session, session
from hostir.machines.trace import Trace

RUNS = 10  # a picture shows the fastest of these runs, without the first one


def kernels(work: Callable[[], None]) -> list[tuple[str, int, float, float]]:
    """Run `work` several times; return the name, stream, start and end (in seconds) of each kernel of the fastest run.

    The fastest run is the one with the shortest time of the slowest rank. `work` must not run an allreduce by NCCL.
    """
    token = torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(RUNS):
            dist.all_reduce(token)  # ranks start together; on the device, this kernel separates two runs
            work()
        torch.cuda.synchronize()
    events = watched.profiler.kineto_results.events()
    device = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA and e.duration_ns() > 0]
    ends = sorted(e.end_ns() for e in device if "AllReduce" in e.name())
    runs = [
        [e for e in device if begin <= e.start_ns() < end and "AllReduce" not in e.name()]
        for begin, end in pairwise([*ends, math.inf])
    ]
    assert len(runs) == RUNS, "the work runs allreduces itself, or there is one rank"
    times = [max(e.end_ns() for e in run) - min(e.start_ns() for e in run) for run in runs]
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    fastest = runs[1 + int(slowest[1:].argmin())]
    return [(e.name(), e.device_resource_id(), e.start_ns() * 1e-9, e.end_ns() * 1e-9) for e in fastest]


PATTERNS = {
    "allgather": patterns.allgather_matmul,
    "reduce_scatter": patterns.row_parallel_scattered,
    "all_reduce": patterns.row_parallel,
}


@dataclass(frozen=True)
class Picture:
    """A picture to draw. `pattern` is a key of `PATTERNS`; N and K are the extents on one rank."""

    file: str
    pattern: str
    M: int
    N: int
    K: int
    slices: int
    streams: int
    delays: bool = True
    strategy: str = "pipeline"
    kernels: str = "aten"

    def __str__(self) -> str:
        strategy = f"{self.slices} slices" if self.strategy == "pipeline" else self.strategy
        without = "" if self.delays else ", without delay"
        by = f", {self.kernels}" if self.kernels != "aten" else ""
        return f"{self.pattern} and matmul, {self.M}x{self.N}x{self.K} a rank, {strategy}{by}{without}"

    def program(self, ranks: int) -> hi.Program:
        """Return the program. If `delays` is False, its `delay` statements are removed, to show their effect."""
        k = self.K if self.pattern == "allgather" else self.K * ranks
        fusion = PATTERNS[self.pattern](ranks=ranks, S=self.slices, M=self.M, N=self.N, K=k, dtype="bf16")
        program = hi.lower(fusion, self.strategy, streams=self.streams)
        if self.delays:
            return program
        return program.with_body(rewrite(program.body, lambda s: () if isinstance(s, Delay) else (s,)))


PICTURES = (
    Picture("pipeline.svg", "allgather", 4096, 6656, 16384, slices=4, streams=4),
    Picture("with-delay.svg", "allgather", 8192, 1792, 4096, slices=2, streams=2),
    Picture("without-delay.svg", "allgather", 8192, 1792, 4096, slices=2, streams=2, delays=False),
    Picture("reduce-scatter.svg", "reduce_scatter", 8192, 8192, 3584, slices=2, streams=2),
    Picture("small.svg", "reduce_scatter", 4096, 4096, 1792, slices=2, streams=2),
    Picture("fused.svg", "allgather", 4096, 3584, 8192, slices=1, streams=1, strategy="fused", kernels="triton"),
    Picture("fused-small.svg", "allgather", 4096, 1792, 4096, slices=1, streams=1, strategy="fused", kernels="triton"),
    *[
        Picture(f"sum-{name}-{m}-{strategy.split()[-1]}.svg", pattern, m, n, k, 1, streams, True, strategy, kernels)
        for pattern, name, m, n, k, candidates in (
            ("reduce_scatter", "8B", 2048, 4096, 1792, (("fused", 1, "triton"), ("ring", 1, "triton"))),
            ("reduce_scatter", "8B", 8192, 4096, 1792, (("fused", 1, "triton"), ("chain", 2, "cublas"))),
            ("reduce_scatter", "70B", 2048, 8192, 3584, (("fused", 1, "triton"), ("ring", 1, "triton"))),
            ("reduce_scatter", "70B", 8192, 8192, 3584, (("fused", 1, "triton"), ("chain", 2, "cublas"))),
            ("all_reduce", "70B", 16, 8192, 3584, (("push", 1, "triton"), ("sequential by low_latency", 1, "triton"))),
        )
        for strategy, streams, kernels in candidates
    ],
)


def short(name: str) -> str:
    """Return the name that the picture shows for a kernel. The beginning of the name decides the colour."""
    if "nccl" in name:
        return "allgather (NCCL)" if "AllGather" in name else "reduce_scatter (NCCL)"
    if "spin" in name or "sleep" in name:
        return "delay"
    if "Memcpy" in name:
        return "put to a peer" if "PtoP" in name else "copy within the GPU"
    if name.startswith("_end"):
        return "end of the call"
    return "matmul" if any(part in name for part in ("gemm", "nvjet", "matmul", "cutlass")) else name.split("(")[0][:40]


def draw(joined: Session, picture: Picture, folder: Path) -> None:
    """Profile one program, and write its picture on rank 0."""
    program, device = picture.program(joined.size), joined.device
    inputs = [torch.randn(bind_shape(v.tensor.local_shape, {}), device=device).bfloat16() for v in program.inputs]
    executor = hi.Executor(program, kernels=picture.kernels)
    replay = graphed(partial(executor, *inputs))
    spans = kernels(replay)
    if joined.rank == 0:
        trace = Trace(f"{picture}, rank 0 of {joined.size}")
        lanes = {s: f"stream {i}" for i, s in enumerate(sorted({k[1] for k in spans if "nccl" not in k[0]}))}
        for name, stream, start, end in spans:
            trace.add(0, "communication" if "nccl" in name else lanes[stream], short(name), start, end)
        folder.mkdir(parents=True, exist_ok=True)
        trace.to_svg(folder / picture.file)
        first = min(k[2] for k in spans)
        total = max(k[3] for k in spans) - first
        print(f"{picture.file}: {len(spans)} kernels, {total * 1e6:.0f} us", flush=True)
        for name, stream, start, end in sorted(spans, key=lambda k: k[2]):
            print(f"    {(start - first) * 1e6:8.1f} {(end - start) * 1e6:8.1f} us  stream {stream}  {short(name)}")


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="the beginning of the names of the pictures to draw (default: all)")
    options = parser.parse_args()
    pictures = [each for each in PICTURES if each.file.startswith(options.only)]
    if not pictures:
        parser.error(f"no picture begins with {options.only!r}; there are {', '.join(each.file for each in PICTURES)}")
    with session("cuda") as joined:
        assert joined
        for picture in pictures:
            draw(joined, picture, options.out)


if __name__ == "__main__":
    main()
