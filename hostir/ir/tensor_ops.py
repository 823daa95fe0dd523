"""Define computations on sharded tensors, which fusions and host programs share.

In a fusion, a computation defines its result (`%c: bf16[8, 4] = matmul %a, %b`). In a host program, it writes an
existing buffer (`matmul %a, %b -> %c`). A computation has a `Map` for each operand, which gives the matching axis of
the result for each axis of the operand. Type inference, propagation of shardings and slicing use the maps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from hostir.ir.machine import Done, Ready, meshes_of
from hostir.ir.onesided_ops import epoch_of, flags_of, own_rank, slot_of
from hostir.ir.op import (
    BOTH,
    VALUE_CODECS,
    ZERO,
    Codec,
    Expr,
    FlagOperand,
    Index,
    Int,
    Name,
    Number,
    Phase,
    Read,
    ReadIf,
    Shape,
    Statement,
    UseIf,
    Value,
    Write,
    codecs_of,
    statement,
)
from hostir.ir.sharding import ALONE, CONTRACTED, Map, join
from hostir.ir.sizes import Division, Size, product
from hostir.ir.source import HostIRError, did_you_mean
from hostir.ir.types import FLOATS, FP8, INTEGERS, DType, TensorType

if TYPE_CHECKING:
    from hostir.ir.machine import Frame


MAX_F32, MAX_F64 = (2 - 2.0**-23) * 2.0**127, sys.float_info.max


@dataclass(frozen=True, eq=False, repr=False)
class TensorOp(Statement):
    """The base class of computations. A subclass defines `result` and `maps`; the other methods follow from them."""

    phases: ClassVar[frozenset[Phase]] = BOTH
    uncut: ClassVar[bool] = True
    stand_ins: ClassVar[frozenset[str]] = frozenset()  # fields that replace a part of an operand
    followers: ClassVar[frozenset[str]] = frozenset()  # operands that take the sharding of the other operands
    takes_fp8: ClassVar[bool] = False  # True if operands may be fp8; most computations have no scales for fp8
    takes_integers: ClassVar[bool] = False  # True if all operands may be integers, because nothing is computed

    out: Write

    @property
    def operands(self) -> tuple[Value, ...]:
        return tuple(value for value in self._operands_or_none if value is not None)

    @cached_property
    def following(self) -> frozenset[int]:
        """The positions of the operands that take the sharding of the other operands (see `followers`)."""
        names = [n for n, codec in codecs_of(type(self)).items() if codec is Codec.READ and n not in self.stand_ins]
        present = [n for n in names if getattr(self, n) is not None]
        return frozenset(i for i, n in enumerate(present) if n in self.followers)

    @cached_property
    def _operands_or_none(self) -> list[Value | None]:
        read = (n for n, codec in codecs_of(type(self)).items() if codec is Codec.READ)
        operands = [getattr(self, n) for n in read if n not in self.stand_ins]
        while operands and operands[-1] is None:  # kernels have defaults for trailing operands
            operands.pop()
        return operands

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        """Return the dtype and the unsharded shape of the result. Raise if the operands do not fit each other."""
        raise AssertionError(type(self).__name__)

    def maps(self) -> tuple[Map, ...]:
        """Return a `Map` for each operand. It gives, for each axis of the operand, the matching axis of the result."""
        raise AssertionError(type(self).__name__)

    def check_parts(self, operands: Sequence[TensorType]) -> None:
        """Raise if a rank cannot compute on its parts of operands with these types."""

    def infer(self) -> TensorType:
        """Return the type that the result has if every rank computes on its parts of the operands.

        Raise if the shardings of the operands do not match.
        """
        dtype, shape = self.result()
        check_one_mesh(self, self.operands)
        return join(self, dtype, shape, self.operands, self.maps())

    def verify(self) -> None:
        if not self.takes_fp8 and (narrow := next((v for v in self.operands if v.tensor.dtype.name in FP8), None)):
            raise self.fail(
                f"{self.keyword()} cannot compute with {narrow}, which is {narrow.tensor.dtype}",
                expected="operands in f64, f32, f16 or bf16",
                hint="scaled_matmul multiplies fp8 with its scales; cast converts it to a wider dtype",
            )
        if not self.takes_integers:
            check_integers(self)
        (dtype, shape), declared = self.result(), self.out.tensor
        if declared.dtype != dtype or declared.shape != shape:
            gives = f"{dtype}[{', '.join(map(str, shape))}]"
            raise self.fail(f"{self.out} is {declared}, but {self.keyword()} gives {gives}", expected=gives)

    def verify_layout(self) -> None:
        check_one_mesh(self, [*self.operands, self.out])

    @property
    def linear_in(self) -> Value | None:
        """The operand in which the computation is linear: if it is a partial sum, so is the result."""
        return None

    @property
    def computed(self) -> Value:
        return self.out

    @property
    def summed(self) -> Sequence[Size]:
        if not self.operands:
            return ()
        first, axes = self.operands[0], self.maps()[0]
        return [n for n, axis in zip(first.tensor.local_shape, axes, strict=True) if axis == CONTRACTED]

    def evaluate(self, frame: Frame) -> None:
        if not frame.here(self.out.tensor.mesh):
            return
        if frame[self.out] is None:  # in a fusion the result is a new value
            frame[self.out] = frame.machine.allocate(frame.shape(self.out.tensor), self.out.tensor.dtype)
        if frame.empty(self.out):
            self.pass_over(frame)
            return
        operands = [frame[value] for value in self._operands_or_none]
        flags = self.waits_for(frame), self.raises(frame)
        frame.machine.compute(self.keyword(), frame[self.out], operands, self.options(), *flags)

    def pass_over(self, frame: Frame) -> None:
        """Do what remains to be done if the result has no elements, so that no kernel runs. By default, do nothing."""

    def in_place(self, operand: int) -> bool:
        """Return True if an element of the operand is needed only for the result's element at the same position."""
        maps = self.maps()
        return all(CONTRACTED not in axes for axes in maps) and maps[operand] == tuple(range(len(self.out.tensor.axes)))

    def keeps_axis(self, axis: int) -> bool:
        """Return True if a slice of one element along an axis of the result must keep this axis, with extent 1."""
        return False

    def options(self) -> dict[str, Any]:
        """Return the options of the kernel by name: the fields of the statement that are neither tensors nor flags."""
        return {n: getattr(self, n) for n, c in codecs_of(type(self)).items() if c not in VALUE_CODECS}

    def waits_for(self, frame: Frame) -> Ready | None:
        """Return the flags that the kernel waits for while it runs; None if it waits for no flags."""
        return None

    def raises(self, frame: Frame) -> Done | None:
        """Return the flags that the kernel sets while it runs; None if it sets no flags."""
        return None

    @classmethod
    def form(cls, phase: Phase) -> str:
        return cls.syntax if phase is Phase.HOST else "{out} = " + cls.syntax.replace(" -> {out}", "")


def check_one_mesh(op: Statement, values: Sequence[Value]) -> None:
    """Raise if these operands lie on different meshes."""
    meshes = {m.name for m in meshes_of(values) if m}
    if len(meshes) > 1:
        raise op.fail(
            f"operands of {op.keyword()} lie on different meshes: {', '.join(sorted(meshes))}",
            hint="reshard one of them to the mesh of the other",
        )


def check_integers(op: TensorOp) -> None:
    """Raise unless the operands that hold indices are integers, and the other operands are not."""
    indices = [operand.indices for operand in op.index_operands]
    for value in op.operands:
        dtype = value.tensor.dtype
        if value in indices and dtype.name not in INTEGERS:
            expected = f"indices in {' or '.join(INTEGERS)}"
            raise op.fail(f"{value} holds indices, and is {dtype}", expected=expected)
        if value not in indices and dtype.name in INTEGERS:
            raise op.fail(
                f"{op.keyword()} cannot compute with {value}, which is {dtype}",
                expected="operands in f64, f32, f16 or bf16",
                hint="integers are indices, which can be copied, gathered and viewed",
            )


def same_dtype(op: Statement, values: Sequence[Value]) -> DType:
    """Return the common dtype of these operands; raise if they differ."""
    first = values[0]
    for other in values[1:]:
        if other.tensor.dtype != first.tensor.dtype:
            raise op.fail(
                f"mixed dtypes: {first} is {first.tensor.dtype}, {other} is {other.tensor.dtype}",
                expected="operands of one dtype",
                hint=f"cast one of them: hi.cast({other.name}, '{first.tensor.dtype}') in Python, "
                f"'cast {other} to {first.tensor.dtype}' in a text",
            )
    return first.tensor.dtype


def check_contracted(op: Statement, a: Value, b: Value, b_axis: int) -> None:
    """Raise if `b` is not a matrix, or if its axis `b_axis` has another extent than the last axis of `a`."""
    if len(b.tensor.axes) != 2:
        hint = "batched_matmul multiplies matrices in pairs" if len(b.tensor.axes) > 2 else ""
        raise op.fail(f"{b} has {len(b.tensor.axes)} axes", expected="a right side with 2 axes", hint=hint)
    if not a.tensor.axes:
        raise op.fail(f"{a} has no axes", expected="a left side with at least 1 axis")
    check_equal_terms(op, a, b, b_axis)


def check_equal_terms(op: Statement, a: Value, b: Value, b_axis: int) -> None:
    """Raise if the last axis of `a` and the axis `b_axis` of `b`, over which a product sums, have different extents."""
    k, other = a.tensor.shape[-1], b.tensor.shape[b_axis]
    if k != other:
        raise op.fail(
            f"contraction of different sizes: {a} has {k} in its last axis, {b} has {other} in axis {b_axis}",
            expected=f"{b} with {k} in axis {b_axis}",
        )


BY_BLOCKS = "<? ready {ready} >= {epoch}?><? done {done} = {raised}?><? from {first}?><? own {own}?>"


@dataclass(frozen=True, eq=False, repr=False)
class ByBlocks(TensorOp):
    """The base class of computations that may run block by block. A block is a part of the rows, and has a flag.

    With `ready`, the kernel waits for the flags of the rows that it reads before it computes a block of the result.
    With `done`, the kernel sets a flag after each block of the result. All these flags are flags of this rank.
    """

    stand_ins: ClassVar[frozenset[str]] = frozenset({"own"})

    ready: UseIf = field(default=None, kw_only=True)
    epoch: Index = field(default=ZERO, kw_only=True)
    done: UseIf = field(default=None, kw_only=True)
    raised: Index = field(default=ZERO, kw_only=True)
    first: Index = field(default=ZERO, kw_only=True)
    own: ReadIf = field(default=None, kw_only=True)

    @classmethod
    def form(cls, phase: Phase) -> str:
        """Return the syntax template. A fusion has no flags, so its template has no part for them."""
        form = super().form(phase)
        return form if phase is Phase.HOST else form.removesuffix(BY_BLOCKS)

    @property
    def rows(self) -> Value:
        """The operand that is split into blocks of rows. Each block has a flag in `ready`."""
        raise AssertionError(type(self).__name__)

    def verify(self) -> None:
        super().verify()
        for flags in (self.ready, self.done):
            if flags is not None:
                flags_of(self, flags)
        if self.own is not None:
            self._stands_in(self.own)
        if self.first != ZERO:
            self._begins()

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.operands if self.own is None else (*self.operands, self.own)

    @property
    def flag_operands(self) -> tuple[FlagOperand, ...]:
        operands: list[FlagOperand] = []
        if self.ready is not None:
            operands.append(FlagOperand(self.ready, None, self.epoch, self.rows_in_blocks(), self.own))
        if self.done is not None:
            operands.append(FlagOperand(self.done, None, self.raised, (self.out,), raises=True))
        return tuple(operands)

    def rows_in_blocks(self) -> tuple[Value, ...]:
        """Return the tensors with rows that are split into blocks, one block for each flag of `ready`."""
        return self.rows, self.out

    @property
    def scale_of_rows(self) -> Value | None:
        """The operand with a scale for each row of the operand `rows`; None if there is no such operand."""
        return None

    @property
    def along(self) -> tuple[int, ...]:
        """The positions of operands with the same rows as the operand `rows`.

        To compute a block of the result, the kernel reads only the block's rows of these operands.
        """
        return ()

    def waiting(self, flags: Value, epoch: Expr, first: Expr, own: Value | None) -> Statement | None:
        if self.ready is not None or own == self.rows:
            return None
        changed = replace(self, ready=flags, epoch=epoch, first=first, own=own)
        try:
            changed.verify()
        except HostIRError:
            return None
        return changed

    def _stands_in(self, rows: Value) -> None:
        if self.ready is None:
            message = f"'own' rows replace one block, or one source, and this {self.keyword()} waits for no blocks"
            raise self.fail(message, hint="write 'ready %flags >= 1' before 'own'")
        same_dtype(self, [self.rows, rows])
        if rows.tensor.shape[-1:] != self.rows.tensor.shape[-1:]:
            raise self.fail(f"{rows} is {rows.type}, {self.rows} is {self.rows.type}", expected="rows of one length")

    def _begins(self) -> None:
        """Raise if the statement names a first block, but has no blocks, because it has neither `ready` nor `done`."""
        if self.ready is None and self.done is None:
            message = f"'from' names the first of several blocks, and this {self.keyword()} has no blocks"
            raise self.fail(
                message, hint="write 'ready %flags >= 1' or 'done %flags = 1' before 'from', or leave it out"
            )

    def verify_layout(self) -> None:
        others = (v for v in (self.ready, self.done, self.own) if v)
        check_one_mesh(self, [*self.operands, self.out, *others])

    def divisions(self) -> Iterator[Division]:
        for flags, x in ((self.ready, self.rows), (self.done, self.out)):
            if flags is not None:
                blocks = flags.tensor.shape[0]
                why = f"the rows of {x} are {blocks} equal blocks, one for each flag of {flags}"
                yield Division(product(x.tensor.local_shape[:-1]) / blocks, why, self.span)

    def pass_over(self, frame: Frame) -> None:
        """Wait for the flags of `ready`, and set the flags of `done`, although no kernel runs.

        Other ranks signal and wait for these flags even if the result has no elements.
        """
        # The length of a row of flags may depend on a size that is 0. Then there are no flags.
        if self.ready is not None and self.ready.tensor.shape[0].bind(frame.sizes):
            ready = self.waits_for(frame)
            assert ready is not None
            for block in ready.awaited:
                frame.machine.wait_signal(ready.flags, block, ready.epoch)
        if self.done is not None and self.done.tensor.shape[0].bind(frame.sizes):
            done = self.raises(frame)
            assert done is not None
            for block in done.order:
                frame.machine.signal(done.flags, block, done.epoch, own_rank(self, frame))

    def options(self) -> dict[str, Any]:
        return {n: x for n, x in super().options().items() if n not in ("epoch", "raised", "first")}

    def waits_for(self, frame: Frame) -> Ready | None:
        """Return the flags that the kernel waits for; None if it waits for no flags.

        Raise if the number of flags does not divide the number of rows. Raise if the number of rows of `own` is not the
        number of rows of a block.
        """
        if self.ready is None:
            return None
        blocks = self._blocks(frame, self.ready, self.rows)
        first, epoch = slot_of(self, frame, self.ready, self.first), epoch_of(self, frame, self.epoch)
        rows = prod(frame.shape(self.rows.tensor)[:-1])
        if self.own is not None and (count := prod(frame.shape(self.own.tensor)[:-1])) != rows // blocks:
            raise self.fail(
                f"{self.own} has {count} rows", expected=f"{rows // blocks} rows, as a block of {self.rows}"
            )
        replaced = frame[self.own], blocks, first, int(self.own is not None)
        return Ready(frame[self.ready], epoch, first, blocks, *replaced, along=self.along)

    def raises(self, frame: Frame) -> Done | None:
        """Return the flags that the kernel sets; None if it sets no flags.

        Raise if the number of flags does not divide the number of rows.
        """
        if self.done is None:
            return None
        blocks, epoch = self._blocks(frame, self.done, self.out), epoch_of(self, frame, self.raised)
        first = slot_of(self, frame, self.done, self.first) if self.ready is None else 0
        return Done(frame[self.done], epoch, first, blocks, self.along)

    def _blocks(self, frame: Frame, flags: Value, x: Value) -> int:
        """Return the number of flags in a row of flags. Raise if it does not divide the number of rows of `x`."""
        blocks, rows = flags.tensor.shape[0].bind(frame.sizes), prod(frame.shape(x.tensor)[:-1])
        if not blocks or rows % blocks:
            expected = "equal blocks, a flag for each"
            raise self.fail(f"{blocks} flags do not divide the {rows} rows of {x}", expected=expected)
        return blocks


@dataclass(frozen=True, eq=False, repr=False)
class Contraction(ByBlocks):
    """The base class of matrix products. They sum over the last axis of `a`."""

    contracts: ClassVar[bool] = True

    a: Read

    @property
    def rows(self) -> Value:
        return self.a

    @property
    def right_side(self) -> tuple[Value, int]:
        return self.operands[1], self.maps()[1].index(CONTRACTED)

    def keeps_axis(self, axis: int) -> bool:
        return axis == len(self.out.tensor.axes) - 1  # the columns


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Matmul(Contraction):
    """`out[..., N] = a[..., K] @ b[K, N]`, accumulated in f32, or in f64 if the operands are f64.

    With `ready %flags >= epoch from first`, the rows of `a` (its leading axes flattened) are split into equal blocks,
    one for each flag. One kernel computes all blocks. It begins with block `first`, and computes each block after the
    block's flag has reached the epoch. From its start to its end, the kernel holds all SMs, or all except one if a
    `signal ... by 1 sms` precedes the matmul.

    With `own %x` as well, the kernel reads the rows of block `first` from `%x` instead of `a`. It does not wait for the
    flag of that block. The block's rows of `a` are undefined.

    With `done %flags = epoch from first`, the rows of the result are split into equal blocks, one for each flag of this
    rank. The kernel computes block `first` first, then the following blocks, and sets the flag of each block to the
    epoch once the block has been written. With both `ready` and `done`, `from` names a block of `ready`.

    In a host program `plus %c` adds the product to the contents of `%c`, which is also the result. Triton rounds once.
    cuBLAS rounds the product, adds, and rounds again. `plus` cannot be combined with `ready`.

    Example: %c: bf16[4, 8, 16, 32] = matmul %a: bf16[4, 8, 16, 64], %b: bf16[64, 32]
    """

    syntax = "matmul {a}, {b}<? plus {addend}?> -> {out}" + BY_BLOCKS
    b: Read
    addend: ReadIf = field(default=None, kw_only=True)

    @classmethod
    def form(cls, phase: Phase) -> str:
        form = super().form(phase)
        return form if phase is Phase.HOST else form.replace("<? plus {addend}?>", "")

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype = same_dtype(self, [self.a, self.b])
        check_contracted(self, self.a, self.b, 0)
        return dtype, (*self.a.tensor.shape[:-1], self.b.tensor.shape[1])

    def verify(self) -> None:
        super().verify()
        if self.addend is not None and self.addend != self.out:
            raise self.fail(f"it adds to {self.addend}, but its result is {self.out}", expected=f"'plus {self.out}'")
        if self.addend is not None and self.ready is not None:
            raise self.fail("it adds to its result and waits for flags", expected="either 'plus' or 'ready'")

    def infer(self) -> TensorType:
        return super().infer() if self.addend is None else replace(self, addend=None).infer()

    def maps(self) -> tuple[Map, ...]:
        rows = len(self.a.tensor.axes) - 1
        return ((*range(rows), CONTRACTED), (CONTRACTED, rows), tuple(range(rows + 1)))[: len(self.operands)]

    @property
    def along(self) -> tuple[int, ...]:
        return () if self.addend is None else (2,)

    def in_place(self, operand: int) -> bool:
        return self.addend is not None and operand == 2


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Linear(Contraction):
    """`out[..., N] = a[..., K] @ weight[N, K]^T + bias[N]`, where the bias is optional.

    Sums are accumulated in f32, or in f64 if the operands are f64. `ready`, `done`, `from` and `own` have the same
    meaning as in `matmul`.

    Example: %c: f32[16, 32] = linear %a: f32[16, 64], %w: f32[32, 64], %bias: f32[32]
    """

    syntax = "linear {a}, {weight}<?, {bias}?> -> {out}" + BY_BLOCKS
    weight: Read
    bias: ReadIf = None

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype = same_dtype(self, self.operands)
        check_contracted(self, self.a, self.weight, 1)
        n = self.weight.tensor.shape[0]
        if self.bias is not None and self.bias.tensor.shape != (n,):
            raise self.fail(f"the bias {self.bias} is {self.bias.type}", expected=f"one axis of {n}")
        return dtype, (*self.a.tensor.shape[:-1], n)

    def maps(self) -> tuple[Map, ...]:
        rows = len(self.a.tensor.axes) - 1
        return ((*range(rows), CONTRACTED), (rows, CONTRACTED), (rows,))[: len(self.operands)]


@statement
@dataclass(frozen=True, eq=False, repr=False)
class BatchedMatmul(TensorOp):
    """`out[..., M, N] = a[..., M, K] @ b[..., K, N]`: a product of two matrices for each index of the leading axes.

    The operands have equal leading axes, in any number. Sums are accumulated in f32, or in f64 if the operands are f64.

    Example: %c: bf16[8, 16, 32] = batched_matmul %a: bf16[8, 16, 64], %b: bf16[8, 64, 32]
    """

    syntax = "batched_matmul {a}, {b} -> {out}"
    contracts: ClassVar[bool] = True

    a: Read
    b: Read

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype, a, b = same_dtype(self, [self.a, self.b]), self.a.tensor.shape, self.b.tensor.shape
        if len(a) < 2 or a[:-2] != b[:-2] or len(a) != len(b):
            raise self.fail(
                f"batches of matrices do not match: {self.a} is {self.a.type}, {self.b} is {self.b.type}",
                expected="[..., M, K] and [..., K, N] with equal leading axes",
            )
        check_equal_terms(self, self.a, self.b, len(b) - 2)
        return dtype, (*a[:-1], b[-1])

    def maps(self) -> tuple[Map, ...]:
        batch = range(len(self.a.tensor.axes) - 2)
        return (*batch, len(batch), CONTRACTED), (*batch, CONTRACTED, len(batch) + 1)

    @property
    def right_side(self) -> tuple[Value, int]:
        return self.b, len(self.b.tensor.axes) - 2

    def keeps_axis(self, axis: int) -> bool:
        return axis >= len(self.out.tensor.axes) - 2  # the rows and the columns


@dataclass(frozen=True, eq=False, repr=False)
class Binary(TensorOp):
    """The base class of elementwise computations on two tensors.

    The tensors are broadcast as in torch: axes are aligned from the last one, and an axis of extent 1 is expanded.
    """

    x: Read
    y: Read

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype = same_dtype(self, [self.x, self.y])
        long, short = sorted((self.x.tensor.shape, self.y.tensor.shape), key=len, reverse=True)
        shape = list(long)
        for i, size in enumerate(short, len(long) - len(short)):
            if shape[i] != size and not shape[i].is_one and not size.is_one:
                raise self.fail(
                    f"shapes do not align: {self.x} is {self.x.type}, {self.y} is {self.y.type}",
                    expected="equal sizes from the last axis on, or 1",
                )
            shape[i] = size if shape[i].is_one else shape[i]
        return dtype, tuple(shape)

    def maps(self) -> tuple[Map, ...]:
        shape = self.result()[1]
        return _broadcast(self.x, shape), _broadcast(self.y, shape)

    def keeps_axis(self, axis: int) -> bool:
        # The other operand has an axis at the same place or further out, and is broadcast along `axis`. Shapes are
        # aligned at their last axes, so without `axis` the axes of that operand would be aligned with the wrong axes.
        inner = len(self.out.tensor.axes) - 1 - axis
        return any(axis not in map and len(map) > inner for map in self.maps())


def _broadcast(value: Value, shape: Shape) -> Map:
    """Return the map of an operand that is broadcast to a result of this shape."""
    lead = len(shape) - len(value.tensor.axes)
    return tuple(i + lead if s == shape[i + lead] else ALONE for i, s in enumerate(value.tensor.shape))


def _broadcasts(small: Shape, shape: Shape) -> bool:
    """Return True if a tensor of the shape `small` can be broadcast to `shape`, as in torch."""
    aligned = zip(reversed(small), reversed(shape), strict=False)
    return len(small) <= len(shape) and all(size == extent or size.is_one for size, extent in aligned)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Add(Binary):
    """Elementwise sum. The sum of two partial sums over the same mesh axes is a partial sum over these axes.

    Example: %z: f32[16, 32] = add %x: f32[16, 32], %y: f32[32]
    """

    syntax = "add {x}, {y} -> {out}"

    def infer(self) -> TensorType:
        partial = self.x.tensor.partial
        if not partial or self.y.tensor.partial != partial:
            return super().infer()
        x, y = (replace(v, type=replace(v.tensor, partial=())) for v in self.operands)
        return replace(replace(self, x=x, y=y).infer(), partial=partial)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Mul(Binary):
    """Elementwise product.

    Example: %z: f32[16, 32] = mul %x: f32[16, 32], %y: f32[16, 32]
    """

    syntax = "mul {x}, {y} -> {out}"


@dataclass(frozen=True, eq=False, repr=False)
class Unary(TensorOp):
    """The base class of elementwise computations on one tensor."""

    x: Read

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        return self.x.tensor.dtype, self.x.tensor.shape

    def maps(self) -> tuple[Map, ...]:
        return (tuple(range(len(self.x.tensor.axes))),)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Relu(Unary):
    """`max(x, 0)`.

    Example: %y: f16[16, 32] = relu %x: f16[16, 32]
    """

    syntax = "relu {x} -> {out}"


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Gelu(Unary):
    """The exact Gaussian error linear unit, `x * (1 + erf(x / sqrt 2)) / 2`.

    Example: %y: bf16[16, 32] = gelu %x: bf16[16, 32]
    """

    syntax = "gelu {x} -> {out}"


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Silu(Unary):
    """`x / (1 + exp(-x))`.

    Example: %y: bf16[16, 32] = silu %x: bf16[16, 32]
    """

    syntax = "silu {x} -> {out}"


def check_number(op: Unary, number: float) -> None:
    """Raise if `number` is not finite in the dtype in which `op` computes: f64 if its operand is f64, else f32."""
    dtype = op.x.tensor.dtype
    if abs(number) > (MAX_F64 if dtype.name == "f64" else MAX_F32):  # also True for an infinity
        expected = f"a finite number{'' if dtype.name == 'f64' else ' that f32 can hold'}"
        raise op.fail(f"{op.keyword()} of {dtype} by {number}", expected=expected)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Scale(Unary):
    """`x * factor`, where `factor` is a number. It is computed in f32 (in f64 if `x` is f64), and rounded once.

    Example: %y: bf16[16, 32] = scale %x: bf16[16, 32] by 0.5
    """

    syntax = "scale {x} by {factor} -> {out}"
    factor: Number

    def verify(self) -> None:
        super().verify()
        check_number(self, self.factor)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Offset(Unary):
    """`x + amount`, where `amount` is a number. It is computed in f32 (in f64 if `x` is f64), and rounded once.

    Example: %y: bf16[16, 32] = offset %x: bf16[16, 32] by -1.0
    """

    syntax = "offset {x} by {amount} -> {out}"
    amount: Number

    def verify(self) -> None:
        super().verify()
        check_number(self, self.amount)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class DenseCopy(Unary):
    """Copies a tensor to a dense buffer. Lowering inserts it where a statement needs another memory layout.

    Example: %y: f32[16, 32] = copy %x: f32[16, 32]
    """

    syntax = "copy {x} -> {out}"
    takes_fp8: ClassVar[bool] = True
    takes_integers: ClassVar[bool] = True

    def infer(self) -> TensorType:
        return self.x.tensor  # the copy of a partial sum is a partial sum


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Cast(Unary):
    """The same values in another dtype, rounded to nearest even.

    A partial sum must be reduced before a cast that rounds. After a cast to a wider dtype, it is still a partial sum.

    Example: %y: bf16[16, 32] = cast %x: f32[16, 32] to bf16
    """

    syntax = "cast {x} to {dtype} -> {out}"
    takes_fp8: ClassVar[bool] = True
    dtype: Name

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        if self.dtype not in FLOATS:
            problem = "cast cannot round to" if self.dtype in INTEGERS else "unknown dtype"
            expected, hint = f"one of: {', '.join(FLOATS)}", did_you_mean(self.dtype, FLOATS)
            raise self.fail(f"{problem} '{self.dtype}'", expected=expected, hint=hint)
        return FLOATS[self.dtype], self.x.tensor.shape

    @property
    def exact(self) -> bool:
        """True if the new dtype represents every value of the old dtype exactly.

        Then a sum after the cast is at least as accurate as a sum before the cast.
        """
        return self.result()[0].bytes > self.x.tensor.dtype.bytes and self.x.tensor.dtype.name not in FP8

    def infer(self) -> TensorType:
        partial = self.x.tensor.partial
        self.result()  # raises for an unknown dtype
        if not partial or not self.exact:
            return super().infer()
        x = replace(self.x, type=replace(self.x.tensor, partial=()))
        return replace(replace(self, x=x).infer(), partial=partial)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Sum(ByBlocks, Unary):
    """The sum over one axis, accumulated in f32, or in f64 if `x` is f64. The result does not have this axis.

    With `ready %flags >= epoch`, the axis must be 0, and each index of axis 0 is a source. The rows of `x` (all axes
    but the last, flattened) are split into equal blocks, one for each flag. Each block of the result waits for the
    corresponding block of every source. Sources are always added in the order of their indices.

    With `from i own %mine`, `%mine` replaces source `i`. The sum does not wait for the flags of source `i`, and does
    not read index `i` of `x`. The contents of `x` at this index are undefined. `done` sets a flag after each block of
    the result, as in `matmul`.

    With `plus %z`, the statement adds a tensor, which is broadcast to the shape of the result as in `add`. `then gelu`
    (or `relu`, `silu`) applies the function to the sum. Everything is computed in f32 (in f64 if `x` is f64) and
    rounded once.

    Example: %y: f32[32] = sum %x: f32[16, 32] axis 0 plus %z: f32[32] then relu
    """

    syntax = "sum {x} axis {axis}<? plus {addend}?><? then {activation}?> -> {out}" + BY_BLOCKS
    axis: Int
    addend: ReadIf = field(default=None, kw_only=True)
    activation: Name = field(default="", kw_only=True)

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        shape, dtype = self.x.tensor.shape, same_dtype(self, self.operands)
        if self.axis >= len(shape):
            raise self.fail(f"{self.x} has no axis {self.axis}", expected=f"an axis below {len(shape)}")
        kept = *shape[: self.axis], *shape[self.axis + 1 :]
        if self.addend is not None and not _broadcasts(self.addend.tensor.shape, kept):
            raise self.fail(
                f"{self.addend} is {self.addend.type}, and the sum has shape [{', '.join(map(str, kept))}]",
                expected="equal sizes from the last axis on, or 1",
            )
        if self.activation and self.activation not in ACTIVATIONS:
            expected, hint = f"one of: {', '.join(ACTIVATIONS)}", did_you_mean(self.activation, ACTIVATIONS)
            raise self.fail(f"unknown function '{self.activation}'", expected=expected, hint=hint)
        return dtype, kept

    def maps(self) -> tuple[Map, ...]:
        summed = tuple(CONTRACTED if i == self.axis else i - (i > self.axis) for i in range(len(self.x.tensor.axes)))
        return (summed,) if self.addend is None else (summed, _broadcast(self.addend, self.result()[1]))

    @property
    def addends(self) -> int:
        """The number of sources if the sum waits for flags, because each source is then the partial sum of a rank.

        Without flags, it is 0.
        """
        return 0 if self.ready is None else self.x.tensor.shape[0].value or 0

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options().items() if value != ""}

    @property
    def rows(self) -> Value:
        return self.x

    def rows_in_blocks(self) -> tuple[Value, ...]:
        return (self.x,)

    def verify(self) -> None:
        super().verify()
        if self.ready is not None and self.axis != 0:
            raise self.fail(
                f"it waits for flags and sums over axis {self.axis} of {self.x}",
                expected="'axis 0': the sources, each with the blocks of the result",
            )

    def _begins(self) -> None:
        super()._begins()
        if self.ready is not None and self.own is None:
            message = "'from' names the source whose rows are 'own', and this sum has no own rows"
            raise self.fail(message, hint="write 'own %rows' after 'from', or leave 'from' out")

    def waits_for(self, frame: Frame) -> Ready | None:
        """Return the flags that the kernel waits for; None if it waits for no flags.

        Raise if the flags are not split evenly over the sources, or if they do not divide the rows of a source.
        """
        if self.ready is None:
            return None
        blocks, epoch = self._blocks(frame, self.ready, self.x), epoch_of(self, frame, self.epoch)
        shape, source = frame.shape(self.x.tensor), frame.index(self.first)
        if not shape[0] or blocks % shape[0]:
            raise self.fail(
                f"{blocks} flags do not divide the {shape[0]} sources of {self.x}",
                expected="as many flags for each source",
            )
        results = blocks // shape[0]
        if self.own is None:
            return Ready(frame[self.ready], epoch, 0, blocks, None, results)
        if not 0 <= source < shape[0]:
            raise self.fail(f"{self.x} has no source {source}", expected=f"0 to {shape[0] - 1}")
        if (count := prod(frame.shape(self.own.tensor)[:-1])) != prod(shape[1:-1]):
            raise self.fail(
                f"{self.own} has {count} rows", expected=f"{prod(shape[1:-1])} rows, as a source of {self.x}"
            )
        return Ready(frame[self.ready], epoch, 0, blocks, frame[self.own], results, source * results, results)


ACTIVATIONS = tuple(cls.keyword() for cls in (Relu, Gelu, Silu))  # the functions that a sum may apply


@statement
@dataclass(frozen=True, eq=False, repr=False)
class RmsNorm(TensorOp):
    """`x / sqrt(mean(x^2) + eps) * weight` for each row of `x`. A row spans the last axis, which must not be sharded.

    It is computed in f32 (in f64 if `x` is f64), and rounded once. Without `times %weight` the weights are 1.

    Example: %y: bf16[16, 32] = rms_norm %x: bf16[16, 32] eps 1e-06 times %w: bf16[32]
    """

    syntax = "rms_norm {x} eps {eps}<? times {weight}?> -> {out}"
    x: Read
    eps: Number
    weight: ReadIf = field(default=None, kw_only=True)

    def result(self) -> tuple[DType, tuple[Size, ...]]:
        dtype, shape = same_dtype(self, self.operands), self.x.tensor.shape
        if self.eps < 0:
            raise self.fail(f"eps is {self.eps}", expected="at least 0")
        if not shape:
            raise self.fail(f"{self.x} has no axes", expected="rows")
        if self.weight is not None and self.weight.tensor.shape != shape[-1:]:
            raise self.fail(f"the weight {self.weight} is {self.weight.type}", expected=f"one axis of {shape[-1]}")
        return dtype, shape

    def maps(self) -> tuple[Map, ...]:
        rows: Map = (*range(len(self.x.tensor.axes) - 1), ALONE)
        return (rows, (ALONE,))[: len(self.operands)]

    def verify_layout(self) -> None:
        super().verify_layout()
        if marks := self.out.tensor.host().axes[-1].marks:
            raise self.fail(
                f"the rows of {self.out} are sharded over {', '.join(marks)}",
                expected="complete rows on each rank",
                hint="gather the last axis first, or shard the rows",
            )
