"""Buffers of host programs: who frees them and when, that outputs are written, and what a statement may overwrite."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hostir.ir.check.indices import constant, differ
from hostir.ir.comm_ops import AllReduce
from hostir.ir.host_ops import Allocate, AsPartial, Chunk, FreeBuffer, Select
from hostir.ir.onesided_ops import AllocateSymmetric, Copy
from hostir.ir.op import Codec, Phase, Statement
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.source import Diagnostic
from hostir.ir.tensor_ops import CONTRACTED, TensorOp
from hostir.ir.types import TensorType
from hostir.ir.values import Expr, Value
from hostir.ir.view_ops import Permute, ViewOp

if TYPE_CHECKING:
    from fractions import Fraction

Cuts = tuple[tuple[Expr, Size], ...]  # piece `index` of `count` equal ones, then a piece of that piece, ...


@dataclass(frozen=True)
class Layer:
    """A tensor as axes in one order, what a view took of each, and which of them it still has, in its own order."""

    form: TensorType
    cuts: tuple[Cuts, ...]
    axes: tuple[int, ...]

    @staticmethod
    def of(type: TensorType) -> Layer:
        return Layer(replace(type.host(), partial=()), ((),) * len(type.axes), tuple(range(len(type.axes))))

    def cut(self, axis: int, index: Expr, count: Size) -> Layer:
        at = self.axes[axis]
        return replace(self, cuts=(*self.cuts[:at], (*self.cuts[at], (index, count)), *self.cuts[at + 1 :]))

    def apart(self, other: Layer) -> bool:
        """Whether two views of one tensor have no element in common, for sure."""
        return any(_apart(a, b) for a, b in zip(self.cuts, other.cuts, strict=True))


@dataclass(frozen=True)
class Region:
    """Which part of which buffer a value is. Equal regions are the same elements in the same order.

    Views by index and permutations stay within one layer; any other view begins a new one on top.
    """

    root: str
    layers: tuple[Layer, ...]

    def seen_by(self, view: ViewOp) -> Region:
        """The region of a view's result."""
        *below, top = self.layers
        n = len(top.axes)
        if isinstance(view, AsPartial):
            return self
        if isinstance(view, Select) and view.axis < n:
            piece = top.cut(view.axis, view.index, view.x.tensor.shape[view.axis])
            axes = top.axes[: view.axis] + top.axes[view.axis + 1 :]
            return Region(self.root, (*below, replace(piece, axes=axes)))
        if isinstance(view, Chunk) and view.axis < n:
            return Region(self.root, (*below, top.cut(view.axis, view.index, view.count)))
        if isinstance(view, Permute) and sorted(view.axes) == list(range(n)):
            return Region(self.root, (*below, replace(top, axes=tuple(top.axes[i] for i in view.axes))))
        return Region(self.root, (*self.layers, Layer.of(view.out.tensor)))

    def apart(self, other: Region) -> bool:
        """Whether two regions have no element in common, for sure."""
        if self.root != other.root:
            return True
        for mine, its in zip(self.layers, other.layers, strict=False):
            if mine.form != its.form:
                return False
            if mine.apart(its):
                return True
            if mine != its:
                return False
        return False


def _apart(a: Cuts, b: Cuts) -> bool:
    """Whether two pieces of one axis have nothing in common, for sure."""
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    if not a or not b:
        return False
    (index, count), (other, others) = a[0], b[0]
    if count == others and differ(index, other, count.value):
        return True
    (low, high), (bottom, top) = _stretch(a), _stretch(b)
    return high <= bottom or top <= low


def _stretch(cuts: Cuts) -> tuple[Fraction, Fraction]:
    """Where a piece begins and ends, the axis being 0 to 1, as far as literals tell."""
    from fractions import Fraction  # seldom needed, and not quickly loaded

    low, width = Fraction(0), Fraction(1)
    for index, count in cuts:
        at, pieces = constant(index), count.value
        if at is None or pieces is None:
            break
        width /= pieces
        low += at * width
    return low, low + width


class Buffers:
    """What a host program does to its buffers. Fed with statements in program order, by whoever walks the program."""

    def __init__(self, program: Program) -> None:
        self.inputs = {v.name for v in program.inputs}
        self.regions = {v.name: Region(v.name, (Layer.of(v.tensor),)) for v in program.inputs}
        self.written: set[str] = set()
        self.symmetric: set[str] = set()
        self.freed: dict[str, Statement] = {}

    def lifetimes(self, s: Statement, outside: Collection[str]) -> Iterator[Diagnostic]:
        """Findings about memory that has ended. `outside` are the names from outside the loop that `s` stands in."""
        used = {region.root: v for v in reversed(s.uses(Phase.HOST)) if (region := self.regions.get(v.name))}
        for root, value in reversed(used.items()):
            if root in self.freed:
                what = "it was freed" if value.name == root else f"%{root} was freed, of which it is a view"
                yield Diagnostic(
                    f"{value} is used after {what}", s.span, notes=((self.freed[root].span, "freed here"),)
                )
        for value in s.values(Codec.WRITE):
            if region := self.regions.get(value.name):
                self.written.add(region.root)
        if isinstance(s, FreeBuffer) and (region := self.regions.get(s.x.name)):
            yield from self._free(s, region.root, outside)
        if isinstance(s, (Allocate, AllocateSymmetric)) and isinstance(s.out.type, TensorType):
            self.regions[s.out.name] = Region(s.out.name, (Layer.of(s.out.type),))
            self.written.discard(s.out.name)
            self.symmetric.discard(s.out.name)
            self.freed.pop(s.out.name, None)
        if isinstance(s, AllocateSymmetric):
            self.symmetric.add(s.out.name)
        if isinstance(s, ViewOp) and isinstance(s.out.type, TensorType) and (region := self.regions.get(s.x.name)):
            self.regions[s.out.name] = region.seen_by(s)

    def _free(self, s: FreeBuffer, root: str, outside: Collection[str]) -> Iterator[Diagnostic]:
        if root in self.inputs:
            yield Diagnostic(
                f"{s.x} is {'' if s.x.name == root else 'a view of '}an input: an input is the caller's to free",
                s.span,
                hint="take this line out",
            )
        elif root in self.symmetric:
            yield Diagnostic(
                f"{s.x} is {'' if s.x.name == root else 'a view of '}a symmetric buffer: it lasts from call to call",
                s.span,
                hint="take this line out",
            )
        elif root in outside:
            yield Diagnostic(f"{s.x} would be freed in every round", s.span, hint=f"free %{root} behind the loop")
        else:
            self.freed.setdefault(root, s)

    def reach(self, s: Statement) -> Iterator[Diagnostic]:
        """Findings about a sound statement that names memory of a peer which the peer has not laid open."""
        if not isinstance(s, Copy) or (region := self.regions.get(s.remote.name)) is None:
            return
        if region.root not in self.symmetric:
            yield Diagnostic(
                f"{s.keyword()} cannot reach {_told(s.remote, region.root)} at a peer",
                s.span,
                expected="a buffer of allocate_symmetric, or a view of one",
            )

    def overlaps(self, s: Statement) -> Iterator[Diagnostic]:
        """Findings about a sound statement that overwrites what it reads. A peer's memory is not this rank's."""
        out = next(s.values(Codec.WRITE), None)
        if isinstance(s, Copy) or out is None or (target := self.regions.get(out.name)) is None:
            return
        for place, operand in enumerate(s.values(Codec.READ)):
            source = self.regions.get(operand.name)
            if source is None or source.apart(target) or (source == target and _in_place(s, place)):
                continue
            if operand == out:
                message = f"{s.keyword()} writes {out} while it reads it"
            else:
                message = f"{s.keyword()} writes {out} while it reads {operand}, and both are memory of %{target.root}"
            yield Diagnostic(
                message,
                s.span,
                expected="memory that none of the operands lies in; only elementwise statements and allreduce may "
                "write the very view that they read",
                hint="allocate a buffer for the result",
            )
            return

    def freed_outputs(self, outputs: Collection[Value]) -> Iterator[Diagnostic]:
        for value, region in self._outputs(outputs):
            if region.root in self.freed:
                yield Diagnostic(f"the output {_told(value, region.root)} was freed", self.freed[region.root].span)

    def unwritten_outputs(self, outputs: Collection[Value]) -> Iterator[Diagnostic]:
        for value, region in self._outputs(outputs):
            if region.root not in self.written | self.inputs:
                yield Diagnostic(
                    f"the output {_told(value, region.root)} is never written",
                    value.span,
                    expected="a statement that writes it",
                )

    def _outputs(self, outputs: Collection[Value]) -> Iterator[tuple[Value, Region]]:
        """The outputs that are memory of the program, each once."""
        for value in dict.fromkeys(outputs):
            if value.name in self.regions:
                yield value, self.regions[value.name]


def _told(value: Value, root: str) -> str:
    return f"{value}" if value.name == root else f"{value}, a view of %{root},"


def _in_place(s: Statement, place: int) -> bool:
    """Whether a statement may write the memory of an operand: each element of it is read for that of the result."""
    if isinstance(s, AllReduce):
        return True
    if not isinstance(s, TensorOp) or any(CONTRACTED in axes for axes in s.maps()):
        return False
    return s.maps()[place] == tuple(range(len(s.out.tensor.axes)))
