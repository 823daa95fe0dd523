"""The error of a result relative to the unsharded reference, and the largest error that is allowed.

The reference is computed in float64. The *plain computation* is unsharded torch code in the program's dtypes, on
the same inputs. The allowed error is

    (1.1 * error of the plain computation + slack) * sqrt(1 + s)

- The slack has two parts. Here a unit is the machine epsilon of a dtype. The first part is half a unit of f32: it
  allows for another order of summation. The second part is 1.5/sqrt(n) units of the result's dtype, for a result of n
  elements: it allows for chance, because the norm over a few elements varies.
- s accounts for the sums over ranks. Rounding errors are independent, so their squares add up. Every sum over R ranks
  adds to s the squared error of its roundings, in units of the squared error of one rounding of the result. A sum that
  is computed in f32, as on the CPU, rounds each partial sum to the dtype, and adds 1 to s. NCCL's ring and a chain of
  matmuls (`hostir.lower.chain`) also round the sum of the first j partial sums, for every j. Such a sum has the size
  sqrt(j/R), relative to the result. So both add (R + 1) / 2 to s.

If a program computes only in f64, the reference is as inexact as the results. It is then mostly equal to the plain
computation, bit for bit. The slack then has 64 units of f64 instead of half a unit of f32. The errors of sums of 16,000
products stay within 64 units. The error of a step that rounds to f32 is larger.

If an output is a partial sum, its parts are added in float64 without another rounding, and the sum is compared. When
the parts nearly cancel, their rounding errors are large relative to the sum. A bound that allowed for this would miss
real mistakes. So correct outputs are sometimes called mismatches: up to 1 in 10 of the outputs with one element, up to
1 in 40 of the outputs with 4 elements, and 0 in 1,800 of the outputs with 16 elements.

A host program with statements for single ranks has no unsharded meaning. Its reference and its plain computation are
runs on simulated ranks in program order (see `hostir.cli.run`). The reference runs in float64, and the plain
computation runs in the program's dtypes. Both include the sums over ranks, computed in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod, sqrt

import torch

from hostir.ir.op import Codec
from hostir.ir.program import Program
from hostir.ir.types import INTEGERS
from hostir.kernels.dtypes import torch_dtype

SLACK = 1.1
CHANCE = 1.5  # units in the last place by which the rounding of one element may differ


@dataclass(frozen=True)
class Comparison:
    """The error of one output, and the largest allowed error, both relative to the norm of the reference."""

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
    """Return True if a program has statements for single ranks. Its results are then not defined on unsharded tensors.

    A fusion never has such statements.
    """
    return any(s.one_sided or s.per_rank for s in source.walk())


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return `|got - expected| / |expected|` in the Frobenius norm; NaN if a tensor holds NaN."""
    if not expected.is_floating_point():
        got, expected = got.double(), expected.double()
    difference = torch.linalg.vector_norm(got.to(expected.dtype) - expected)
    norm = torch.linalg.vector_norm(expected)
    return float(difference / norm) if norm else float(difference)


def reductions(program: Program, *, ring: bool = False) -> float:
    """Return `s` for a host program: the squared rounding errors that its sums over ranks add to a result.

    The module's docstring explains `s`. Its unit is the square of one rounding error. `ring` is True if NCCL computes
    the sums in the program's dtypes, from rank to rank. A sum of a symmetric buffer adds what ranks have sent.
    """
    slots = _symmetric(program)
    sums = (
        s
        for s in program.walk()
        if s.addends or (s.summed and not s.contracts and not slots.isdisjoint(v.name for v in s.reads))
    )
    chains = (s.buffer.tensor for s in program.walk() if s.symmetric and s.buffer is not None)
    ranks = [prod(type.mesh.size(over) for over in type.partial) for type in chains if type.partial and type.mesh]
    return sum((s.addends + 1) / 2 if ring and s.collective else 1 for s in sums) + sum((n + 1) / 2 for n in ranks)


def _symmetric(program: Program) -> set[str]:
    """Return the names of symmetric buffers, and of views of them. A sum of their slots adds up what ranks have put."""
    names = {s.buffer.name for s in program.walk() if s.symmetric and s.buffer is not None}
    for s in program.walk():
        names |= {v.name for v in s.values(Codec.DEFINE)} if s.viewed is not None and s.viewed.name in names else set()
    return names


def bound(
    plain: torch.Tensor, expected: torch.Tensor, sums: float, dtype: torch.dtype | None = None, *, exact: bool = False
) -> float:
    """Return the largest allowed error of a result, relative to the norm of the reference.

    Args:
        plain: the result of the plain computation.
        expected: the reference.
        sums: the value that `reductions` returns.
        dtype: the dtype of the result; None for the dtype of `plain`. The two dtypes may differ if `plain` is a sum of
            partial sums.
        exact: True if every step that leads to the result is in f64.
    """
    if not plain.is_floating_point():  # integers are only moved
        return 0.0
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
    """Compare the unsharded outputs of a host program with the reference. Return one comparison for each output.

    Args:
        program: the host program.
        got: the outputs of the program. An output that is a partial sum was summed over the ranks without rounding.
        plain: the results of the plain computation.
        expected: the reference.
        ring: the same as in `reductions`.
        summed: True if the plain computation also rounds its sums over ranks, as on a CPU.
    """
    sums = reductions(program, ring=ring)
    if summed:
        sums = (1 + sums) / (1 + reductions(program)) - 1
    computed = (s.computed for s in program.walk())
    dtypes = {v.tensor.dtype.name for v in (*program.inputs, *computed) if v is not None}
    exact = dtypes - INTEGERS.keys() <= {"f64"}
    return [
        Comparison(v.name, relative_error(g, e), bound(p, e, sums, torch_dtype(v.tensor.dtype), exact=exact))
        for v, g, p, e in zip(program.outputs, got, plain, expected, strict=True)
    ]
