"""The error of a result relative to the unsharded reference, and the largest that is allowed.

The error of a result relative to the unsharded reference, and the largest allowed.

The reference is computed in float64. A result passes when its error is at most 1.1 times that of the unsharded torch
computation in the program's own dtypes, on the same inputs, times what sums over ranks add. A sum over R ranks rounds
to the dtype each partial sum, and rounding errors are independent and add up in squares: where the sum itself is made
in f32, as on the CPU, it adds 1 to the square. NCCL's ring also rounds every sum of the first j partial sums, of size
sqrt(j/R), which makes it (R + 1) / 2. Half a unit of f32 is added for another order of summation, and, as a few
elements are no statistics, what the roundings of n elements may be off by chance: 1/sqrt(n) of a unit or two.
Of a program all in f64 the reference is no better than the results, and both computations mostly agree bit for bit:
64 units of f64 are added instead, which sums of 16,000 products reach, and no step rounded to f32.

An output of partial sums is compared as their sum in float64, not rounded again. Where they nearly cancel, what
rounded them is large beside it, and no bound would hold that still finds mistakes. For that alone up to one output in
ten of a single element is called a mismatch, up to one in 40 of 4 elements; of 16, none in 1,800.

A host program of single ranks has no unsharded meaning. What it does on simulated ranks in program order stands for
it, in float64 and in the program's own dtypes (see `hostir.cli.run`), with its sums over ranks, made in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch

from hostir.ir.program import Program
from hostir.kernels.dtypes import torch_dtype

SLACK = 1.1
CHANCE = 1.5  # units in the last place, by which one element's roundings may differ


@dataclass(frozen=True)
class Comparison:
    """The error of one output relative to the reference's norm, and the largest that is allowed."""

    output: str
    error: float
    bound: float

    @property
    def good(self) -> bool:
        return isfinite(self.error) and self.error <= self.bound

    def __str__(self) -> str:
        verdict = "ok" if self.good else "MISMATCH"
        return f"%{self.output}: error {self.error:.2e}, at most {self.bound:.2e} allowed: {verdict}"


def of_single_ranks(source: Program) -> bool:
    """Whether single ranks do different things in a program, so that whole tensors do not define its results.

    What a fusion computes does not depend on ranks, however it is lowered.
    """
    return any(s.one_sided or s.per_rank for s in source.walk())


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """`|got - expected| / |expected|` in the Frobenius norm; NaN anywhere gives NaN."""
    difference = torch.linalg.vector_norm(got.to(expected.dtype) - expected)
    norm = torch.linalg.vector_norm(expected)
    return float(difference / norm) if norm else float(difference)


def reductions(program: Program, *, ring: bool = False) -> float:
    """Return what a host program's sums over ranks add to the square of the error, relative to one rounding.

    `ring`: they are made by NCCL, in the dtype, hop by hop.
    """
    return sum((s.addends + 1) / 2 if ring and s.collective else 1 for s in program.walk() if s.addends)


def bound(
    plain: torch.Tensor, expected: torch.Tensor, sums: float, dtype: torch.dtype | None = None, *, exact: bool = False
) -> float:
    """Return the largest error allowed; `plain` is the unsharded computation in the program's own dtypes.

    `dtype` is the result's; None: that of `plain`, which a sum of partial sums need not have. `exact`: every step that
    leads to the result is in f64.
    """
    chance = CHANCE * torch.finfo(dtype or plain.dtype).eps / sqrt(max(plain.numel(), 1))
    slack = chance + (64 * torch.finfo(torch.float64).eps if exact else torch.finfo(torch.float32).eps / 2)
    return (SLACK * relative_error(plain, expected) + slack) * sqrt(1 + sums)


def compare(
    program: Program,
    got: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    ring: bool = False,
    summed: bool = False,
) -> list[Comparison]:
    """Compare the outputs of a host program with the reference, on whole tensors, with partial sums unrounded.

    `ring` as for `reductions`; `summed`: `plain` has rounded the sums over ranks too, as on a CPU.
    """
    sums = reductions(program, ring=ring)
    if summed:
        sums = (1 + sums) / (1 + reductions(program)) - 1
    computed = (s.computed for s in program.walk())
    exact = all(v.tensor.dtype.name == "f64" for v in (*program.inputs, *computed) if v is not None)
    return [
        Comparison(v.name, relative_error(g, e), bound(p, e, sums, torch_dtype(v.tensor.dtype), exact=exact))
        for v, g, p, e in zip(program.outputs, got, plain, expected, strict=True)
    ]
