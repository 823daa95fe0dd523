"""Compare a sum over ranks with its residual and RMS norm, compiled by `hi.compile`, with torch.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.all_reduce_norm --out benchmarks/results/all_reduce_norm
    torchrun --standalone --nproc-per-node 2 -m benchmarks.all_reduce_norm --fp8 --out benchmarks/results/norm_fp8
    torchrun --standalone --nproc-per-node 2 -m benchmarks.all_reduce_norm --device cpu --shrink 64

The rows are few rows of a transformer, as in decoding: the sum of a row-parallel layer, the residual that is added to
it, and the norm before the next layer. With `--fp8`, the rows are also quantized, with a scale for each row. The floor
is the time of the fastest all-reduce alone by NCCL or torch.

The peers. Inductor compiles what follows the all-reduce:

    NCCL               all_reduce
    torch one-shot     torch.ops.symm_mem.one_shot_all_reduce
    torch two-shot     torch.ops.symm_mem.two_shot_all_reduce_

The summands of the peers lie where a matmul would have left them: for torch's kernels in symmetric memory. NCCL and
two-shot work in place. So these summands are written anew before a result is checked, and add up while calls are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everywhere

import hostir as hi
from benchmarks.comparison import Candidate, Judge, Subject, Work, compare, options_parser
from benchmarks.harness import synchronize
from benchmarks.matmul_all_reduce import PARTS, REDUCTIONS, by_nccl
from benchmarks.scores import NCCL, ONE_SHOT, TWO_SHOT, Result, Row
from hostir.job.session import Session

EPS = 1e-6
LIMIT = torch.finfo(torch.float8_e4m3fn).max
LEAST_SCALE = 2.0**-126
FUSION = """hostir 1
mesh @mesh [didx] = {ranks}
fusion @norm(%x: {rows} partial(didx), %r: {rows}, %w: {dtype}[{N}]) -> ({outputs}) {{
  %y: {rows} = reshard %x
  %added: {rows} = add %y, %r
  %normed: {rows} = rms_norm %added eps {eps} times %w
{quantized}}}
"""
QUANTIZED = """  %scales: f32[{M}, 1] = row_scales %normed to f8e4m3
  %quantized: f8e4m3[{M}, {N}] = quantize %normed by %scales to f8e4m3
"""


def norm(ranks: int, M: int, N: int, dtype: str, *, fp8: bool) -> hi.Program:
    """Return the fusion. Its first output has the normalized rows, and its last one the sum with the residual."""
    sizes = {"M": M, "N": N, "dtype": dtype, "rows": f"{dtype}[{M}, {N}]", "eps": EPS}
    outputs = "%quantized, %scales, %added" if fp8 else "%normed, %added"
    devices, quantized = " ".join(map(str, range(ranks))), QUANTIZED.format(**sizes) if fp8 else ""
    return hi.parse(FUSION.format(ranks=devices, outputs=outputs, quantized=quantized, **sizes))


def following(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, ...]:
    """Return what follows a sum: the normalized rows, with scales if they are quantized, and the new residual."""
    added = total + residual
    normed = F.rms_norm(added, (added.shape[-1],), weight, EPS)
    return (*quantized(normed), added) if fp8 else (normed, added)


def quantized(normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in fp8, and the scale of each row."""
    rows = normed.float()
    scales = (rows.abs().amax(-1, keepdim=True) / LIMIT).clamp_min(LEAST_SCALE)
    return (rows / scales).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn), scales


class NormJudge(Judge):
    """Judge of normalized rows. It writes the summands anew before each call, because some peers add to them.

    Args:
        refill: a function that writes the summands.
        scales: the scale of each row, for quantized rows; None for others.
        exact: the normalized rows in float64.
        unfused: the normalized rows as torch computes them; quantized rows are multiplied by their scales.
    """

    def __init__(self, refill: Work, scales: torch.Tensor | None, exact: torch.Tensor, unfused: torch.Tensor) -> None:
        self.refill, self.scales = refill, scales
        super().__init__(torch.arange(len(exact), device=exact.device), exact, unfused)

    def rows_of(self, c: torch.Tensor) -> torch.Tensor:
        return c if self.scales is None else c.float() * self.scales

    def check(self, candidate: Candidate) -> float:
        def call() -> torch.Tensor:
            self.refill()
            return candidate.call()

        return super().check(Candidate(candidate.name, candidate.mode, candidate.ours, call))


class NormedSum(Subject):
    """A row's tensors on this rank.

    Fields:
        x: `[M, N]`, this rank's summands; on GPUs in symmetric memory.
        part: `[M, N]`, the summands of the peers that work in place; on GPUs in symmetric memory.
        zeros: the same, for all-reduces that are timed alone. Its sums stay 0.
        residual: `[M, N]`, the same on every rank.
        weight: `[N]`, the same on every rank.
        outs: the tensors for the results of hostir.
        fp8: True if the rows are quantized.
    """

    def __init__(self, row: Row, dtype: torch.dtype, job: Session, *, fp8: bool) -> None:
        super().__init__(row, dtype, job)
        self.fp8, shape = fp8, (row.M, row.N)
        self.x, self.part, self.zeros = self.shared(*shape), self.shared(*shape), self.shared(*shape).zero_()
        self.residual = torch.empty(shape, dtype=dtype, device=self.device)
        self.weight = torch.empty(row.N, dtype=dtype, device=self.device)
        rows = [torch.empty_like(self.residual) for _ in range(2)]
        scales = torch.empty(row.M, 1, device=self.device)
        self.outs = [rows[0].to(torch.float8_e4m3fn), scales, rows[1]] if fp8 else rows
        self.rest = torch.compile(following, dynamic=False) if self.on_gpu else following
        self.renew()

    def about(self) -> Result:
        return {"fp8": self.fp8}

    def renew(self) -> None:
        synchronize(self.device)
        dist.barrier()
        self.x.normal_()
        for x in (self.residual, self.weight):
            dist.broadcast(x.normal_(), 0)
        self.refill()
        synchronize(self.device)
        dist.barrier()

    def refill(self) -> None:
        self.part.copy_(self.x)

    def judge(self) -> Judge:
        exact, weight = self.x.double(), self.weight.double()
        dist.all_reduce(exact)
        exact = F.rms_norm(exact + self.residual, (self.row.N,), weight, EPS)
        self.refill()
        normed, _ = following(by_nccl(self.part), self.residual, self.weight, fp8=False)
        if not self.fp8:
            return NormJudge(self.refill, None, exact, normed)
        values, scales = quantized(normed)
        return NormJudge(self.refill, scales, exact, values.float() * scales)

    def parts(self) -> Mapping[str, Work]:
        return {name: partial(reduce, self.zeros) for name, reduce in zip(PARTS, REDUCTIONS.values(), strict=True)}

    def peers(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        reductions = dict(zip((NCCL, ONE_SHOT, TWO_SHOT), REDUCTIONS.values(), strict=True))
        return {name: partial(self.by_torch, reduce) for name, reduce in reductions.items()}

    def by_torch(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return self.rest(reduce(self.part), self.residual, self.weight, self.fp8)[0]

    def fusion(self, slices: int) -> hi.Program:
        return norm(self.ranks, self.row.M, self.row.N, self.dtype_name, fp8=self.fp8)

    def inputs(self, slices: int) -> Sequence[torch.Tensor]:
        return self.x, self.residual, self.weight

    def out(self, slices: int) -> Sequence[torch.Tensor]:
        return self.outs


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = options_parser(__doc__, "all_reduce_norm")
    parser.add_argument("--fp8", action="store_true", help="quantize the normalized rows, with a scale for each row")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows, print a line for each, and write the table and the figures on rank 0."""
    options = parse_options(arguments)
    compare(options, "all_reduce_norm", partial(NormedSum, fp8=options.fp8), any_rows=True)


if __name__ == "__main__":
    main()
