"""Matmul + all-reduce: hostir and its peers, scored against the floor; and the layers of a decoder.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_all_reduce --out benchmarks/results/ar
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_all_reduce --decode --out benchmarks/results/decode
    torchrun --standalone --nproc-per-node 2 -m benchmarks.matmul_all_reduce --device cpu --shrink 64 --rows 70B:2048

A row of the table is a shape: the second weight of the MLP of Llama 3 with tensor parallelism 8. By default the model
is 70B. floor = max(cuBLAS alone, the best all-reduce alone), and a score is floor/time, as for
`benchmarks.matmul_reduce_scatter`. With few rows, hostir must be as fast as the best peer of the same mode.

With `--decode`, 80 MLPs with replicated input and output run one after another in one CUDA graph, each with different
weights. This is the loop of a decoder without attention. hostir calls one program for each layer.

The peers:

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
    name_of,
    options_parser,
    peer,
    replayed,
    settled,
)
from benchmarks.harness import synchronize
from benchmarks.scores import BENCHMARKS, BY_HAND, COMPILED, FIRST, GRAPH, ONE_SHOT, TWO_SHOT, Result, Row
from examples import patterns
from hostir.choice.platforms import Platform
from hostir.job.session import Session
from hostir.kernels.matmul.matmul import matmul as triton_matmul

LAYERS = 80
OTHERS = tuple(
    model for model in BENCHMARKS["all_reduce"].models if model != FIRST[0]
)  # measured only if they are named


def one_shot(part: torch.Tensor) -> torch.Tensor:
    """All-reduce in one step, as torch does it; `part` is symmetric memory."""
    return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", dist.group.WORLD.group_name)


def two_shot(part: torch.Tensor) -> torch.Tensor:
    """All-reduce in two steps and in place, as torch does it; `part` is symmetric memory."""
    return torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", dist.group.WORLD.group_name)


def by_nccl(part: torch.Tensor) -> torch.Tensor:
    """All-reduce in place by NCCL."""
    dist.all_reduce(part)
    return part


REDUCTIONS = {BY_HAND: by_nccl, ONE_SHOT: one_shot, TWO_SHOT: two_shot}
PARTS = ("nccl", "one_shot", "two_shot")  # the names of these reductions as parts of the floor


class Operands(Subject):
    """A row's tensors on this rank.

    Fields:
        a: `[M, K]`, this rank's columns.
        b: `[K, N]`, this rank's rows; stored by columns, like the weight of a linear layer.
        part: `[M, N]`, this rank's partial sum; on GPUs in symmetric memory.
        zeros: `[M, N]` in symmetric memory, for all-reduces that are timed alone. Its sums stay 0.
        c: `[M, N]`, the result.
    """

    slices = (2, 4)

    def __init__(self, row: Row, dtype: torch.dtype, job: Session) -> None:
        super().__init__(row, dtype, job)
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
        parts: dict[str, Work] = {"gemm": self.multiply}
        parts |= {name: partial(reduce, self.zeros) for name, reduce in zip(PARTS, REDUCTIONS.values(), strict=True)}
        if self.on_gpu:
            parts["triton"] = partial(triton_matmul, self.a, self.b, self.part)
        return parts

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


class Decoder(Subject):
    """MLP layers that run one after another on few rows. Each layer computes `x + gelu(x @ w1) @ w2`.

    Fields:
        x: `[M, N]`, the same on every rank.
        weights: this rank's `w1`, `[N, K]`, and `w2`, `[K, N]`, of each layer.
        part: `[M, N]`, a partial sum; on GPUs in symmetric memory.
        results: two buffers that the layers use in turn for their results.
    """

    def __init__(self, row: Row, dtype: torch.dtype, job: Session, *, layers: int) -> None:
        super().__init__(row, dtype, job)
        self.x = torch.empty(row.M, row.N, dtype=dtype, device=self.device)
        self.weights = [(self.weight(row.K, row.N, 1.0), self.weight(row.N, row.K, 0.1)) for _ in range(layers)]
        self.part = self.shared(row.M, row.N)
        self.results = [torch.empty_like(self.x) for _ in range(2)]
        self.renew()

    def weight(self, columns: int, rows: int, scale: float) -> torch.Tensor:
        """Return a random weight, stored by columns. If `scale` is small, a layer changes x only a little."""
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
        estimate = ""
        if name == COMPILED:
            call = lambda executor: executor(self.x, *self.weights[0], out=self.results[0])  # noqa: E731
            executor, estimate = settled(self.fusion(1), mode, call)
        else:
            executor = hi.compile(self.fusion(1), name, timeout=PATIENCE)
        executor.watchdog = None

        def layers() -> torch.Tensor:
            x = self.x
            for i, weights in enumerate(self.weights):
                (x,) = executor(x, *weights, out=self.results[i % 2])
            return x

        choice = name_of(executor.choice.taken) if name == COMPILED and mode == modes_of(self)[-1] else ""
        return Candidate(name, mode, True, replayed(layers) if mode == GRAPH else layers, choice, estimate)

    def fusion(self, slices: int) -> hi.Fusion:
        row, ranks = self.row, self.ranks
        return patterns.mlp_replicated(ranks, slices, row.M, row.N, row.K * ranks, self.dtype_name)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.x, *self.weights[0]

    def out(self, slices: int) -> torch.Tensor:
        return self.results[0]


def modes_of(subject: Subject) -> tuple[str, ...]:
    """Return the modes to measure. Without CUDA graphs, on a CPU, `eager` is the only one."""
    return ("eager", GRAPH) if subject.on_gpu else ("eager",)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    first = argparse.ArgumentParser(add_help=False)  # `--decode` decides which rows there are
    first.add_argument("--decode", action="store_true")
    decode = first.parse_known_args(arguments)[0].decode
    parser = options_parser(__doc__, "decode") if decode else options_parser(__doc__, "all_reduce", without=OTHERS)
    parser.add_argument("--decode", action="store_true", help="layers of a decoder instead of one matmul")
    parser.add_argument("--layers", type=int, default=LAYERS, help="the number of layers of the decoder (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    options = parse_options(arguments)
    if options.decode:
        return compare(options, "decode", partial(Decoder, layers=options.layers), any_rows=True)
    compare(options, "all_reduce", Operands, any_rows=True)


if __name__ == "__main__":
    main()
