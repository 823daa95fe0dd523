"""Matmul + all-reduce: ours against the peers, as scores against what no schedule can beat; and layers of a decoder.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_all_reduce --out benchmarks/results/ar
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_all_reduce --decode --out benchmarks/results/decode
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_all_reduce --device cpu --shrink 64 --rows 70B:2048

Rows are the second weights of the MLPs of Llama 3 as tensor parallel 8 has them, 70B unless named. floor =
max(cuBLAS alone, the best all-reduce alone), and a score is floor/time, as for `benchmarks.matmul_reduce_scatter`.
Few rows have to be as fast as the best peer that is issued in the same way.

With `--decode`, 80 layers of the MLP with replicated ends one after another, each with weights of its own: the loop of
a decoder without its attention, in one CUDA graph. Ours is one program that is called for each layer.

What it is measured against:

    NCCL + cuBLAS      torch.matmul, then all_reduce
    torch one-shot     torch.matmul, then torch.ops.symm_mem.one_shot_all_reduce
    torch two-shot     the same with two_shot_all_reduce_
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

import hostir as hi
from benchmarks.comparison import (
    PATIENCE,
    PIECES,
    SAMPLE,
    Candidate,
    Entrant,
    Judge,
    Subject,
    Work,
    compare,
    parser,
    peer,
    replayed,
)
from benchmarks.harness import synchronize
from benchmarks.scores import BY_HAND, COMPILED, FIRST, GRAPH, KINDS, ONE_SHOT, TWO_SHOT, Result, Row
from examples import patterns
from hostir.choice.platforms import Platform
from hostir.runtime.kernels.matmul import matmul as triton_matmul
from hostir.runtime.session import Session

LAYERS = 80
OTHERS = tuple(model for model in KINDS["all_reduce"].models if model != FIRST[0])  # measured where they are named


def one_shot(part: torch.Tensor) -> torch.Tensor:
    """torch's all-reduce in one step; `part` is symmetric memory."""
    return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", dist.group.WORLD.group_name)


def two_shot(part: torch.Tensor) -> torch.Tensor:
    """torch's all-reduce in two steps, in place; `part` is symmetric memory."""
    return torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", dist.group.WORLD.group_name)


def by_nccl(part: torch.Tensor) -> torch.Tensor:
    """NCCL's all-reduce, in place."""
    dist.all_reduce(part)
    return part


REDUCTIONS = {BY_HAND: by_nccl, ONE_SHOT: one_shot, TWO_SHOT: two_shot}


class Operands(Subject):
    """A row's tensors on this rank.

    Fields:
        a: `[M, K]`, this rank's columns.
        b: `[K, N]`, this rank's rows; stored by columns, as the weight of a linear layer is.
        part: `[M, N]`, what this rank adds to the result; on GPUs in symmetric memory.
        zeros: the same, which stay 0 however often they are summed up.
        c: `[M, N]`, the result.
    """

    slices = (2, 4)

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session) -> None:
        super().__init__(row, dtype, joined)
        self.a = torch.empty(row.M, row.K, dtype=dtype, device=self.device)
        self.b = (torch.randn(row.N, row.K, device=self.device) / row.K**0.5).to(dtype).t()
        self.part, self.zeros = self.shared(row.M, row.N), self.shared(row.M, row.N).zero_()
        self.c = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.renew()

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.a.normal_()
        self.multiply()

    def judge(self) -> Judge:
        sample = torch.randint(self.row.M, (SAMPLE,), generator=torch.Generator().manual_seed(self.row.M)).unique()
        sample = sample.to(self.device)
        exact = self.a[sample].double() @ self.b.double()
        dist.all_reduce(exact)
        in_pieces = []
        for n in (1, *(n for n in sorted({*PIECES, self.ranks}) if n > 1)):
            torch.cat([x @ self.b for x in self.a.chunk(n)], out=self.part)
            in_pieces.append(by_nccl(self.part).clone())
        return Judge(sample, exact, in_pieces[0], in_pieces[1:])

    def parts(self) -> Mapping[str, Work]:
        found: dict[str, Work] = {"gemm": self.multiply}
        found |= {name: partial(reduce, self.zeros) for name, reduce in zip(ALONE, REDUCTIONS.values(), strict=True)}
        if self.on_gpu:
            found["triton"] = partial(triton_matmul, self.a, self.b, self.part)
        return found

    def multiply(self) -> None:
        torch.matmul(self.a, self.b, out=self.part)

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {name: partial(self.reduced, reduce) for name, reduce in REDUCTIONS.items()}

    def reduced(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        self.multiply()
        return reduce(self.part)

    def fusion(self, slices: int) -> hi.Fusion:
        row, ranks = self.row, self.ranks
        return patterns.row_parallel(ranks, slices, row.M, row.K * ranks, row.N, self.dtype_name)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.a, self.b

    def out(self, slices: int) -> torch.Tensor:
        return self.c


ALONE = ("nccl", "one_shot", "two_shot")  # what these reductions are called where they are timed alone


# Layers of a decoder ----------------------------------------------------------------------------------------------
class Decoder(Subject):
    """Layers of an MLP one after another, `x + gelu(x @ w1) @ w2`, on few rows.

    Fields:
        x: `[M, N]`, the same on every rank.
        weights: for each layer `w1`, `[N, K]`, and `w2`, `[K, N]`: this rank's.
        part: `[M, N]`, in symmetric memory on GPUs.
        found: two results of layers, in turn.
    """

    def __init__(self, row: Row, dtype: torch.dtype, joined: Session, *, layers: int) -> None:
        super().__init__(row, dtype, joined)
        self.x = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.weights = [(self.weight(row.K, row.N, 1.0), self.weight(row.N, row.K, 0.1)) for _ in range(layers)]
        self.part = self.shared(row.M, row.N)
        self.found = [torch.empty_like(self.x) for _ in range(2)]
        self.renew()

    def weight(self, columns: int, rows: int, scale: float) -> torch.Tensor:
        """A new one, stored by columns; scaled so that the layers change x a little each."""
        return (scale * torch.randn(columns, rows, device=self.device) / rows**0.5).to(self.dtype).t()

    def about(self) -> Result:
        return {"flops": 4 * self.row.M * self.row.N * self.row.K * len(self.weights), "layers": len(self.weights)}

    def renew(self) -> None:
        synchronize(self.device)
        self.x.normal_()
        dist.broadcast(self.x, 0)

    def judge(self) -> Judge:
        exact = self.x.double()
        for w1, w2 in self.weights:
            part = torch.nn.functional.gelu(exact @ w1.double()) @ w2.double()
            dist.all_reduce(part)
            exact = exact + part
        return Judge(torch.arange(self.row.M, device=self.device), exact, self.reduced(by_nccl).clone())

    def parts(self) -> Mapping[str, Work]:
        return {"gemm": partial(self.reduced, lambda part: part)}

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        return {name: partial(self.reduced, reduce) for name, reduce in REDUCTIONS.items()}

    def reduced(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = self.x
        for w1, w2 in self.weights:
            torch.matmul(torch.nn.functional.gelu(x @ w1), w2, out=self.part)
            x = x + reduce(self.part)
        return x

    def entrants(self, modes: Sequence[str], only: Sequence[str], platform: Platform) -> Iterator[Entrant]:
        for name, call in self.peers().items():
            yield from (Entrant(name, mode, partial(peer, name, mode, call)) for mode in modes)
        for name in (COMPILED, *only):
            yield from (Entrant(name, mode, partial(self.ours, name, mode)) for mode in modes)

    def ours(self, name: str, mode: str) -> Candidate:
        strategy = "auto" if name == COMPILED else name
        executor = hi.compile(self.fusion(1), strategy, timeout=PATIENCE, calls="graph" if mode == GRAPH else "out")
        executor.watchdog = None

        def layers() -> torch.Tensor:
            x = self.x
            for i, weights in enumerate(self.weights):
                (x,) = executor(x, *weights, out=self.found[i % 2])
            return x

        choice = str(executor.choice.taken).replace(",", "") if name == COMPILED and mode == modes_of(self)[-1] else ""
        return Candidate(name, mode, True, replayed(layers) if mode == GRAPH else layers, choice)

    def fusion(self, slices: int) -> hi.Fusion:
        row, ranks = self.row, self.ranks
        return patterns.mlp_replicated(ranks, slices, row.M, row.N, row.K * ranks, self.dtype_name)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.x, *self.weights[0]

    def out(self, slices: int) -> torch.Tensor:
        return self.found[0]


def modes_of(of: Subject) -> tuple[str, ...]:
    """The modes in which ours is measured: on CPU processes there are no graphs."""
    return ("eager", GRAPH) if of.on_gpu else ("eager",)


# The command line -------------------------------------------------------------------------------------------------
def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    known = argparse.ArgumentParser(add_help=False)
    known.add_argument("--decode", action="store_true", help="layers of a decoder instead of one matmul")
    decode = known.parse_known_args(arguments)[0].decode
    options = parser(__doc__, "decode") if decode else parser(__doc__, "all_reduce", without=OTHERS)
    options.add_argument("--decode", action="store_true", help="layers of a decoder instead of one matmul")
    options.add_argument("--layers", type=int, default=LAYERS, help="of the decoder (%(default)s)")
    return options.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a line a row, and writes table and figures on rank 0."""
    given = options(arguments)
    if given.decode:
        return compare(given, "decode", partial(Decoder, layers=given.layers), any_rows=True)
    compare(given, "all_reduce", Operands, any_rows=True)


if __name__ == "__main__":
    main()
