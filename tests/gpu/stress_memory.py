"""Calls of random sizes on real GPUs, with tensors, symmetric memory and graphs that are freed and made again:

    torchrun --standalone --nproc-per-node N tests/gpu/stress_memory.py [--steps 2000] [--seed N]

Sometimes all executors are replaced by executors of another program, which evict the memory of the old ones. Every rank
makes the same calls, with the same sizes, in the same order. Each rank draws the rest for itself: whether a call has
`out=`, whether tensors are new or reused, whether tensors are dropped, and whether torch's allocator returns free
memory to CUDA. Sometimes all ranks capture a call into a graph and replay it later. Inputs are fresh in each call, and
outputs hold NaN before it. It prints a line at the end, and exits with 1 if a result was wrong or a rank failed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

import hostir as hi
from hostir.call.bounds import relative_error
from hostir.call.executor import Executor
from hostir.job.session import joined, session

NAN = float("nan")
SIZES = (128, 256, 384, 512, 768, 1024)  # rows of a rank
DEPTH = 2048
GENERATION = 250  # steps, after which the executors are replaced
MAX_GRAPHS = 4  # graphs of the caller at a time


def fusion(ranks: int, columns: int) -> hi.Program:
    """Return an all-gather of rows and a matmul with `columns` columns."""
    return hi.parse(
        f"""hostir 1
mesh @mesh [didx] = {" ".join(map(str, range(ranks)))}
fusion @rows(%a: bf16[M@didx, {DEPTH}], %b: bf16[{DEPTH}, {columns}]) -> (%c) {{
  %full: bf16[M, {DEPTH}] = allgather %a over didx
  %c: bf16[M, {columns}] auto = matmul %full, %b
}}
"""
    )


@dataclass
class Captured:
    """A graph of the caller: it reads `a` and `b`, which must keep their addresses, and writes `c`."""

    graph: torch.cuda.CUDAGraph
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor


class Stress:
    """One rank of a run. `shared` draws the same on all ranks; `mine` draws for this rank only."""

    def __init__(self, seed: int) -> None:
        job = joined()
        self.rank, self.ranks = job.rank, job.size
        self.shared, self.mine = Random(seed), Random(f"{seed} {job.rank}")
        self.columns = 64
        self.executors: dict[str, Executor] = {}
        self.tensors: dict[tuple[str, int], list[torch.Tensor]] = {}  # a, b and c of the latest call with `out=`
        self.captured: list[Captured] = []
        self.counts = Counter[str]()
        self.worst = 0.0

    def replace_executors(self) -> None:
        """Drop all executors and their memory, and make executors of a program with more columns."""
        torch.cuda.synchronize()
        self.captured.clear()
        self.tensors.clear()
        self.executors.clear()
        self.columns += 16
        program = fusion(self.ranks, self.columns)
        for strategy in ("fused", "ring", "push"):
            for kernels in ("triton", "aten"):
                self.executors[f"{strategy} {kernels}"] = Executor(hi.lower(program, strategy), kernels=kernels)

    def step(self, number: int) -> None:
        if number % GENERATION == 0:
            self.replace_executors()
        name, rows = self.shared.choice(list(self.executors)), self.shared.choice(SIZES)
        how = self.shared.choices(("call", "capture", "replay"), (90, 2, 8))[0]
        seed = self.shared.randrange(1 << 40)
        if how == "replay" and self.captured:
            captured = self.shared.choice(self.captured)
            self.draw(captured.a, captured.b, seed)
            captured.c.fill_(NAN)
            captured.graph.replay()
            return self.check(how, captured.a, captured.b, captured.c)
        executor = self.executors[name]
        a, b, c = self.tensors_for(name, rows)
        self.draw(a, b, seed)
        if how == "capture":
            return self.capture(executor, a, b)
        eager = self.mine.random() < 0.2
        for _ in range(self.shared.choice((1, 4))):  # equally many calls on all ranks; the fourth is a replay
            c.fill_(NAN)
            (c,) = executor(a, b) if eager else executor(a, b, out=c)
        if not eager:
            self.tensors[name, rows] = [a, b, c]
        self.check("eager" if eager else "out=", a, b, c)
        refusal = executor.graph_refusal
        assert refusal is None or refusal.endswith("issued as fast as a graph"), refusal
        self.forget()

    def tensors_for(self, name: str, rows: int) -> list[torch.Tensor]:
        """Return the tensors of the latest call with this name and number of rows, or new tensors.

        The addresses of new tensors often belonged to freed tensors.
        """
        if (name, rows) in self.tensors and self.mine.random() < 0.6:
            return self.tensors[name, rows]
        a = torch.empty(rows, DEPTH, device="cuda", dtype=torch.bfloat16)
        b = torch.empty(DEPTH, self.columns, device="cuda", dtype=torch.bfloat16)
        return [a, b, torch.empty(rows * self.ranks, self.columns, device="cuda", dtype=torch.bfloat16)]

    def capture(self, executor: Executor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Capture a call into a graph of the caller, after a call with the same shapes; maybe drop an older graph."""
        executor(a, b)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (c,) = executor(a, b)
        self.captured.append(Captured(graph, a.detach(), b.detach(), c))
        self.counts["captures"] += 1
        if len(self.captured) > MAX_GRAPHS:
            del self.captured[self.shared.randrange(MAX_GRAPHS)]

    def forget(self) -> None:
        """Drop some tensors, and return free memory to CUDA, which may reuse its addresses."""
        if self.mine.random() < 0.3:
            self.tensors.pop(self.mine.choice(list(self.tensors) or [None]), None)
        if self.mine.random() < 0.3:
            self.tensors.clear()
        if self.mine.random() < 0.3:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.counts["emptied"] += 1

    def draw(self, a: torch.Tensor, b: torch.Tensor, seed: int) -> None:
        """Fill `a` with random numbers of this rank, and `b` with random numbers that are the same on all ranks."""
        a.copy_(torch.randn(a.shape, generator=torch.Generator("cuda").manual_seed(seed + self.rank), device="cuda"))
        b.copy_(torch.randn(b.shape, generator=torch.Generator("cuda").manual_seed(seed - 1), device="cuda"))

    def check(self, how: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """Compare with the product of rows gathered by NCCL."""
        full = torch.empty(self.ranks * len(a), DEPTH, device="cuda", dtype=torch.bfloat16)
        dist.all_gather_into_tensor(full, a)
        exact = full.double() @ b.double()
        share = relative_error(c, exact) / (1.1 * relative_error(full @ b, exact) + torch.finfo(torch.float32).eps)
        self.worst = max(self.worst, share) if isfinite(share) else float("inf")
        self.counts[how] += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Calls with tensors, symmetric memory and graphs that are freed and made again."
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with session("cuda"):
        stress = Stress(chosen.seed)
        for number in range(chosen.steps):
            stress.step(number)
        memory = joined().groups.memory
        assert memory is not None
        worst = torch.tensor(stress.worst, device="cuda")
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        torch.cuda.synchronize()
        stress.captured.clear()
        good = worst.item() <= 1 and (memory.released > 0 or chosen.steps <= GENERATION)
        if stress.rank == 0:
            done = ", ".join(f"{count} {what}" for what, count in sorted(stress.counts.items()))
            verdict = "ok" if good else "FAILED"
            where = f"{chosen.steps} steps on {stress.ranks} GPUs, seed {chosen.seed}"
            error = f"{worst.item():.2f} of the allowed error"
            released = f"{memory.released} pieces of symmetric memory released"
            print(f"{verdict}: {where}: {error}; {done}, {released}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
