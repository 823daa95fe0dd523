"""Compute the reference results of a program on whole tensors, and the error that a result may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch

from hostir.ir.machine import Done, Exchange, OptionalMethods, Ready, interpret
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.ir.types import DType
from hostir.runtime.kernels.aten import KERNELS
from hostir.runtime.sharding import bind_sizes, torch_dtype

# The reference --------------------------------------------------------------------------------------------------------
# Defines what a program computes: its statements run one after another, each at once, on whole tensors.
#
# Here a sharded axis is an axis, a partial sum is the sum, and every communication copies. Nothing is fast, and nothing
# depends on ranks, streams or order, so that all other machines can be compared with it.


class Whole:
    """A tensor with memory of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get(self) -> torch.Tensor:
        """Return its elements, perhaps in shared memory: they must not be written."""
        return self.tensor

    def put(self, elements: torch.Tensor) -> None:
        """Replace its elements."""
        self.tensor = elements


@dataclass(frozen=True)
class WholeView:
    """Part of a tensor: the elements of `part(parent)`, a strided view, in the shape `shape`.

    A piece of a sharded axis is some rows of every rank's part: not one strided view, but two steps.
    """

    parent: Whole | WholeView
    part: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]

    def get(self) -> torch.Tensor:
        """Return its elements, perhaps in shared memory: they must not be written."""
        return self.part(self.parent.get()).reshape(self.shape)

    def put(self, elements: torch.Tensor) -> None:
        """Replace its elements in the parent."""
        whole = self.parent.get().clone()
        part = self.part(whole)
        part.copy_(elements.reshape(part.shape))
        self.parent.put(whole)


WholeHandle = Whole | WholeView


class Reference(OptionalMethods):
    """The machine that holds whole tensors, on one device.

    `dtype` is what it computes in; None stands for what programs declare.
    """

    rank: int | None = None

    def __init__(self, dtype: torch.dtype | None = torch.float64, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = device

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> Whole:
        if symmetric:
            raise _no_ranks()
        return Whole(torch.full(shape, float("nan"), dtype=self.dtype or torch_dtype(dtype), device=self.device))

    def free(self, x: WholeHandle) -> None:
        x.put(torch.full_like(x.get(), float("nan")))

    def select(self, x: WholeHandle, axis: int, index: int) -> WholeView:
        shape = tuple(x.get().shape)
        return WholeView(x, lambda t: t.select(axis, index), (*shape[:axis], *shape[axis + 1 :]))

    def chunk(self, x: WholeHandle, axis: int, outer: int, count: int, index: int) -> WholeView:
        shape = tuple(x.get().shape)
        inner = shape[axis] // (outer * count)
        pieces = (outer, count, inner)
        return WholeView(
            x,
            lambda t: t.unflatten(axis, pieces).select(axis + 1, index),
            (*shape[:axis], outer * inner, *shape[axis + 1 :]),
        )

    def reshape(self, x: WholeHandle, shape: tuple[int, ...]) -> WholeView:
        return WholeView(x, lambda t: t, shape)

    def permute(self, x: WholeHandle, axes: tuple[int, ...]) -> WholeView:
        shape = x.get().shape
        return WholeView(x, lambda t: t.permute(axes), tuple(shape[axis] for axis in axes))

    def dense(self, x: WholeHandle) -> WholeHandle:
        return x

    def compute(
        self,
        kind: str,
        out: WholeHandle,
        operands: Sequence[WholeHandle | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        result = torch.empty_like(out.get(), memory_format=torch.contiguous_format)
        assert done is None
        assert ready is None  # whole tensors have no flags: to allocate some is refused
        KERNELS[kind](result, *(None if x is None else x.get() for x in operands), **options)
        out.put(result)

    def communicate(self, exchange: Exchange, x: WholeHandle | None, out: WholeHandle | None) -> None:
        if x is not None and out is not None:  # as they always are: whole tensors lie on every mesh
            out.put(x.get().reshape(out.get().shape))

    def wait(self, handle: None) -> None:
        """Do nothing: communications have ended when they are issued."""

    def current_stream(self) -> int:
        return 0

    def set_stream(self, stream: int) -> None:
        """Do nothing: there is one stream."""

    def synchronize(self, stream: int) -> None:
        """Do nothing: statements have ended when they are issued."""

    def copy(self, x: WholeHandle, out: WholeHandle, source: int, target: int, sms: int = 0) -> None:
        raise _no_ranks()

    def signal(self, flags: WholeHandle, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        raise _no_ranks()

    def wait_signal(self, flags: WholeHandle, slot: int, epoch: int) -> None:
        raise _no_ranks()

    def barrier(self, team: tuple[int, ...]) -> None:
        raise _no_ranks()


def _no_ranks() -> HostIRError:
    """Fail: programs with statements that name ranks are refused before."""
    return error("whole tensors have no ranks", hint="run the program on simulated or real ranks")


@torch.no_grad()
def reference(
    program: Program,
    inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[torch.Tensor, ...]:
    """Return the whole outputs of a fusion or a host program, from whole inputs.

    Computes in `dtype`, or in the program's own dtypes where it is None, on the device of the inputs. `sizes` need name
    only the symbols that do not follow from the inputs' shapes. Raises HostIRError for inputs that do not fit.
    """
    bound = bind_sizes(program, inputs, sizes)
    handles = [Whole(x.to(dtype or x.dtype)) for x in inputs]
    device = inputs[0].device if inputs else "cpu"
    outputs = interpret(program, Reference(dtype, device), bound, handles)
    return tuple(x.get().clone() for x in outputs if x is not None)


# Error bounds ---------------------------------------------------------------------------------------------------------
# The error of a result relative to the unsharded reference, and the largest allowed.
#
# The reference is computed in float64. A result passes when its error is at most 1.1 times that of the unsharded torch
# computation in the program's own dtypes, on the same inputs, times what sums over ranks add. A sum over R ranks rounds
# to the dtype each partial sum, and rounding errors are independent and add up in squares: where the sum itself is made
# in f32, as on the CPU, it adds 1 to the square. NCCL's ring also rounds every sum of the first j partial sums, of size
# sqrt(j/R), which makes it (R + 1) / 2. Half a unit of f32 is added for another order of summation, and, as a few
# elements are no statistics, what the roundings of n elements may be off by chance: 1/sqrt(n) of a unit or two.
# Of a program all in f64 the reference is no better than the results, and both computations mostly agree bit for bit:
# 64 units of f64 are added instead, which sums of 16,000 products reach, and no step rounded to f32.
#
# An output of partial sums is compared as their sum in float64, not rounded again. Where they nearly cancel, what
# rounded them is large beside it, and no bound would hold that still finds mistakes. For that alone up to one output in
# ten of a single element is called a mismatch, up to one in 40 of 4 elements; of 16, none in 1,800.
#
# A host program of single ranks has no unsharded meaning. What it does on simulated ranks in program order stands for
# it, in float64 and in the program's own dtypes (see `hostir.cli.run`), with its sums over ranks, made in f32.

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
