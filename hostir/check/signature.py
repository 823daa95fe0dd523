"""Compute signatures of sizes: a proof of a program for some sizes holds for all sizes with the same signature.

The checker's findings follow from three things:
- the statements that run on each rank;
- the accesses that overlap other accesses, or cover them completely;
- errors while tracing: a view that needs a copy, an index outside its axis, ranks that disagree about a size.

Most of this does not depend on the sizes. Think of each axis of a buffer as the interval from 0 to 1. The axes of a
buffer span a cube, and each element is a cell of the cube. A position in the cube does not depend on extents. The
signature holds the numbers that do matter:

- `select` takes the i-th of n equal slabs of an axis, and `chunk` takes the i-th of n pieces. The number n matters.
- A reshape merges axes with extents e1, .., ek into one axis. A computation by blocks merges the row axes in the same
  way. The position on the merged axis is (i1 + (i2 + .. (ik-1 + u) / ek-1 ..) / e2) / e1, where u is the position on
  the innermost axis. A reshape splits an axis by the same formula. All extents except the innermost matter. The
  innermost extent only says how fine the cells are. A reshape is divided into groups of axes: a group ends where the
  product of the old extents so far and the product of the new extents so far are equal formulas.
- Blocks of rows cut only the first row axis if its extent is divisible by the number of blocks. Then no extent matters.
- Every other statement uses complete tensors, or permutes their axes. No extent matters.

Suppose that two choices of sizes agree in these numbers, and that all divisions are exact. Then each view is the same
part of its buffer's cube, and its boundaries lie between cells. So two views overlap for both choices or for neither.
In the same way, one view covers another for both choices or for neither.

Strides are formulas, too. They decide whether a view exists, whether it is dense, and whether a statement writes
exactly the view that it reads. If the formulas prove such a property, it holds for all sizes. If they do not, it holds
only if some axes happen to have extent 1. Then the signature also says for every extent whether it is 1.

The number of rounds of each loop and the number of flags are part of the signature, so the same statements run. Ranks
compare the sizes of messages. They also compare the sizes of collectives if a collective is inside an `if`. The
signature says which of these sizes are equal to each other.

If a statement does not fit this form, the signature consists of all sizes of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from itertools import product as product_of
from math import lcm
from typing import Any

from hostir.ir.op import Codec, Phase, Shape, Statement, Value, codecs_of
from hostir.ir.program import Program
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.source import HostIRError
from hostir.ir.types import FLAG, TensorType

SizesKey = tuple[Any, ...]


class Signature:
    """Computes signatures of sizes for one host program without structural errors.

    A proof of the program holds for all sizes with the same signature. Programs of the same form share their proofs.
    Programs of one form may differ in the name of the program and in sizes. The sizes may be symbols or numbers.

    Fields:
        names: the symbols of the program.
        proved: a map. Its keys are the signatures for which programs of this form were proved. The value is True if the
            symmetric buffers are resizable (see `hostir.check.Proof`).
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = program.size_names
        walk = _Walk(program)
        extents = [n for v in values_of(program) for n in v.tensor.local_shape]
        self.exact = walk.exact if walk.fits else list(sizes_of(program))
        self.extents = extents if walk.by_chance else []
        self.cut = walk.cut if walk.fits else []
        self.compared = [shapes if len(set(shapes)) > 1 else [] for shapes in walk.compared]
        self.proved = _proved((*_form(program), walk.fits, walk.by_chance, tuple(walk.groups)))

    def of(self, sizes: Mapping[str, int]) -> SizesKey:
        """Return the signature of `sizes`, which has a value for every symbol.

        If a division is not exact, the signature is the program together with the sizes. Then no other sizes have the
        same signature.
        """
        alone = (self.program, *sorted(sizes.items()))
        if min(sizes.values(), default=1) < 1:
            return alone
        try:
            for division in self.program.divisions:
                division.size.bind(sizes)
            exact = [size.bind(sizes) for size in self.exact]
            ones = [size.bind(sizes) == 1 for size in self.extents]
            cut = [_cut(*rows, sizes) for rows in self.cut]
            compared = [[tuple([n.bind(sizes) for n in shape]) for shape in shapes] for shapes in self.compared]
        except HostIRError:
            return alone
        same = [tuple(map(shapes.index, shapes)) for shapes in compared]
        return tuple(exact), tuple(cut), tuple(ones), tuple(same)


def _cut(axes: Shape, counts: Shape, share: tuple[Size, Size], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the extents of row axes that belong to the signature; () if the blocks cut only the first row axis.

    Args:
        axes: the extents of the row axes of one tensor.
        counts: numbers of blocks; the rows are cut into their least common multiple.
        share: two numbers of blocks. If the tensor holds `own` rows, the first is the number of blocks that these rows
            replace, and the second is the number of all blocks. For any other tensor, the two numbers are equal.
        sizes: the values of all symbols.
    """
    if len(axes) < 2:
        return ()
    mine, others = (n.bind(sizes) for n in share)
    if axes[0].bind(sizes) % (lcm(*(n.bind(sizes) for n in counts)) * mine // others) == 0:
        return ()
    return tuple(n.bind(sizes) for n in axes[:-1])


class _Walk:
    """Walks over a program once, and collects the sizes that decide its signatures.

    Fields:
        exact: sizes whose values are part of the signature.
        messages, collectives: shapes, or element counts, that ranks compare.
        branched: True if ranks may issue collectives in different orders.
        groups: for each group of axes in a reshape, the ends of the group in the old and in the new shape.
        cut: for each tensor whose rows are cut into blocks, the arguments of `_cut`.
        symmetric: the shape of each symmetric buffer.
        strides: the strides of each value.
        buffers: for each value, the name of its buffer.
        by_chance: True if the sizes decide whether some view exists, is dense, or equals another view.
        fits: False if the signature has to consist of all sizes of the program.
    """

    def __init__(self, program: Program) -> None:
        self.exact: list[Size] = []
        self.messages: list[Shape] = []
        self.groups: list[tuple[int, int]] = []
        self.collectives: list[Shape] = []
        self.cut: list[tuple[Shape, tuple[Size, ...], tuple[Size, Size]]] = []
        self.branched = False
        self.symmetric: dict[str, Shape] = {}
        self.strides: dict[str, Shape] = {v.name: _packed(v.tensor.local_shape) for v in program.inputs}
        self.buffers: dict[str, str] = {v.name: v.name for v in program.inputs}
        self.by_chance = False
        self.fits = True
        self.body(program.body, branch=False)

    @property
    def compared(self) -> tuple[list[Shape], ...]:
        """Return the shapes that ranks compare.

        These are the shapes of messages and, if ranks may issue collectives in different orders, the shapes of
        collectives.
        """
        return (self.messages, *((self.collectives,) if self.branched else ()))

    def body(self, body: tuple[Statement, ...], branch: bool) -> None:
        for s in body:
            self.statement(s, branch)
            for inner in s.bodies:
                self.body(inner, branch or s.conditional)

    def statement(self, s: Statement, branch: bool) -> None:
        self.exact += [getattr(s, name) for name, codec in codecs_of(type(s)).items() if codec is Codec.SIZE]
        for value in s.named:
            if isinstance(value.type, TensorType) and value.type.dtype == FLAG:
                self.exact += value.type.shape
        (self.collectives if s.collective else self.messages).extend(s.compared)
        self.branched |= branch and s.collective
        if s.needs_dense:
            self.by_chance |= not all(map(self.is_dense, s.values(Codec.READ, Codec.WRITE)))
        if s.viewed is not None:
            self.view(s, s.viewed)
        elif any(use.rows for use in s.flag_operands):
            self.in_blocks(s)
        elif s.buffer is not None:
            name, shape = s.buffer.name, s.buffer.tensor.local_shape
            self.strides[name], self.buffers[name] = _packed(shape), name
            self.fits &= not s.symmetric or self.symmetric.setdefault(name, shape) == shape
        for x, out in product_of(s.values(Codec.READ), s.values(Codec.WRITE)):
            one = self.buffers[x.name] == self.buffers[out.name]
            self.by_chance |= one and self.strides[x.name] != self.strides[out.name]
        self.fits &= s.known_uncut()  # unknown statements may do anything to their tensors

    def is_dense(self, x: Value) -> bool:
        """Return True if the strides of a tensor are dense for all sizes."""
        pairs = zip(x.tensor.local_shape, self.strides[x.name], _packed(x.tensor.local_shape), strict=True)
        return all(extent.is_one or stride == packed for extent, stride, packed in pairs)

    def view(self, s: Statement, x: Value) -> None:
        out = s.defines(Phase.HOST)
        assert out is not None
        strides = s.strides(_Strides(self, x.tensor.local_shape, self.strides[x.name]))
        self.fits &= strides is not None
        self.strides[out.name] = _packed(out.tensor.local_shape) if strides is None else strides
        self.buffers[out.name] = out.name if s.may_copy else self.buffers[x.name]

    def regrouped(self, old: Shape, strides: Shape, new: Shape) -> Shape:
        """Return the strides that a view has after it is reshaped from shape `old` to shape `new`.

        `strides` are its strides before. Record the extents that matter.
        """
        merged: list[Size] = []
        i = j = 0
        for end, until in _groups(old, new):
            self.groups.append((end, until))
            before, after = old[i:end], new[j:until]
            if before == after:
                merged += strides[i:end]
            else:
                self.exact += [*before[:-1], *after[:-1]]
                self.by_chance |= not _nested(before, strides[i:end])
                inner = next((s for n, s in zip(before[::-1], strides[i:end][::-1], strict=True) if not n.is_one), ONE)
                merged += [inner * step for step in _packed(after)]
            i, j = end, until
        self.fits &= product(old) == product(new)
        return tuple(merged)

    def in_blocks(self, s: Statement) -> None:
        """Record the sizes that decide how a computation cuts the rows of its tensors into blocks.

        All axes but the last are row axes. But the first axis of the operand of a sum is not a row axis: it numbers the
        sources.
        """
        (out,) = s.values(Codec.WRITE)
        counts: list[Size] = []  # the number of blocks is their least common multiple
        local: dict[str, tuple[Size, Size]] = {}  # by tensor of `own` rows: the blocks that it replaces, and all blocks
        sources: dict[str, int] = {}  # by tensor: 1 if its first axis holds the sources of a sum
        for use in s.flag_operands:
            flags, x = use.flags.tensor.shape[0], use.rows[0]
            results = flags
            if not use.raises and out not in use.rows:
                self.exact.append(x.tensor.shape[0])
                results, sources[x.name] = flags / x.tensor.shape[0], 1
            counts.append(results)
            if use.own_rows is not None:
                blocks = _rows(use.own_rows) * flags / _rows(x)
                self.exact.append(blocks)
                local[use.own_rows.name] = blocks, results
        for value in s.values(Codec.READ, Codec.WRITE):
            shape, skipped = value.tensor.local_shape, sources.get(value.name, 0)
            self.by_chance |= not _nested(shape[:-1], self.strides[value.name][:-1])
            leading = shape[skipped:-1]
            if len(leading) == len(out.tensor.axes) - 1:
                self.cut.append((leading, tuple(counts), local.get(value.name, (ONE, ONE))))
            else:
                self.exact += leading[:-1]


@dataclass(frozen=True)
class _Strides:
    """Computes the strides of views of a tensor from its shape and strides. Records the extents that matter."""

    walk: _Walk
    shape: Shape
    strides: Shape

    def same(self) -> Shape:
        return self.strides

    def without(self, axis: int) -> Shape:
        self.walk.exact.append(self.shape[axis])
        return self.strides[:axis] + self.strides[axis + 1 :]

    def permuted(self, axes: tuple[int, ...]) -> Shape:
        return tuple(self.strides[axis] for axis in axes)

    def reshaped(self, shape: Shape) -> Shape:
        return self.walk.regrouped(self.shape, self.strides, shape)

    def dense(self) -> Shape:
        return _packed(self.shape)


def _packed(shape: Shape) -> Shape:
    """Return the strides of a dense tensor of this shape."""
    return tuple(product(shape[i + 1 :]) for i in range(len(shape)))


def _rows(x: Value) -> Size:
    return product(x.tensor.local_shape[:-1])


def _nested(shape: Shape, strides: Shape) -> bool:
    """Return True if axes with this shape and these strides can be merged into one axis for all sizes."""
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if not n.is_one]
    return all(outer == n * s for (_, outer), (n, s) in pairwise(axes))


def _groups(old: Shape, new: Shape) -> Iterator[tuple[int, int]]:
    """Divide a reshape into the smallest groups of axes that can be reshaped separately.

    Yield two indices for each group: the index after its last axis in the old shape, and the same in the new shape.
    """
    start = 0
    for i in range(1, len(old)):
        outer = product(old[:i])
        end = next((j for j in range(start, len(new) + 1) if product(new[:j]) == outer), None)
        if end is not None:
            yield i, end
            start = end
    yield len(old), len(new)


def values_of(program: Program) -> Iterator[Value]:
    """Yield every tensor that a program names."""
    for value in (*program.inputs, *(v for s in program.walk() for v in s.named)):
        if isinstance(value.type, TensorType):
            yield value


def sizes_of(program: Program) -> Iterator[Size]:
    """Yield every size in a program that must be an integer."""
    for value in values_of(program):
        yield from value.tensor.shape
        yield from value.tensor.local_shape
    for s in program.walk():
        yield from (getattr(s, f) for f, c in codecs_of(type(s)).items() if c is Codec.SIZE)


@lru_cache(maxsize=256)
def _proved(form: SizesKey) -> dict[SizesKey, bool]:
    """Return the signatures for which programs of one form were proved (see `_form`). Callers add to this dictionary.

    The value of a signature is True if the symmetric buffers are resizable.
    """
    return {}


def forget_forms() -> None:
    """Forget all signatures for which programs were proved."""
    _proved.cache_clear()


def _form(program: Program) -> SizesKey:
    """Return the form of a program: a key without the program's sizes, name and positions in the text."""
    ends = (tuple(_form_of_value(v) for v in values) for values in (program.inputs, program.outputs))
    return (*ends, program.meshes, program.streams, tuple(map(_form_of_statement, program.body)))


def _form_of_value(value: Value) -> SizesKey:
    if not isinstance(value.type, TensorType):
        return value.name, value.type
    type = value.type
    return value.name, type.dtype, type.mesh, type.partial, tuple(axis.marks for axis in type.axes)


def _form_of_statement(s: Statement) -> SizesKey:
    parts: list[Any] = [type(s)]
    for name, codec in codecs_of(type(s)).items():
        it = getattr(s, name)
        if codec is Codec.BLOCK:
            it = tuple(map(_form_of_statement, it))
        elif isinstance(it, Value):
            it = _form_of_value(it)
        parts.append(None if codec is Codec.SIZE else it)
    return tuple(parts)
