"""Record the operations of a program while it is unrolled, and the registers, buffers and views that they use."""

from __future__ import annotations

from math import prod

from hostir.ir.op import Statement, Value
from hostir.ir.program import Program
from hostir.ir.regions import dense_strides, view_strides
from hostir.ir.source import HostIRError, error
from hostir.ir.types import DType
from hostir.plan.operations import (
    CALLER,
    EPOCHS,
    NONE,
    AllocateOp,
    ComputeOp,
    FreeOp,
    Op,
    StatementPlace,
    SymmetricOp,
    ViewOp,
)
from hostir.plan.unrolled import RegisterView


class IssuedOps:
    """The operations that were recorded so far, and the statement and the stream of the next operation.

    Fields:
        issued: the operations.
        place: the statement of the next operation, and its round in each loop.
        stream: the stream of the next operation.
        ordered: the number of operations that were recorded before the latest statement that orders streams.
    """

    def __init__(self) -> None:
        self.issued: list[Op] = []
        self.place: StatementPlace
        self.stream = CALLER
        self.ordered = 0

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.place = StatementPlace(statement, rounds)

    @property
    def here(self) -> tuple[StatementPlace, int]:
        """The first two fields of the next operation: its place and its stream."""
        return self.place, self.stream

    def add(self, op: Op) -> None:
        self.issued.append(op)

    def mark_order(self) -> None:
        """Record that the current statement orders streams.

        Later kernels cannot overlap the copies by SMs before it.
        """
        self.ordered = len(self.issued)

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        return self.place.statement.fail(message, expected=expected, hint=hint)


class RegisterTable:
    """The numbered registers of a program while it is unrolled, with their buffers and views.

    A register holds a tensor or a handle. A buffer is identified by the register that holds all of its elements. A view
    becomes an operation only if another operation uses it. So a chain of select, chunk and reshape becomes one strided
    view of its buffer, which a run makes once.

    Fields:
        buffers: for each register, the buffer of its tensor; NONE for a handle.
        contents: for each buffer, the tensor of all its elements.
        dtypes, names: for each buffer, its dtype and its name in the program.
        allocated: for each buffer that a run allocates, the operation that allocates it.
        symmetric: for each symmetric buffer, the operation that provides it.
        homes: the symmetric buffers by name, rounds and rank.
        views: for each tensor that an operation uses, its register.
        freed: the buffers that the program has freed.
    """

    def __init__(self, program: Program, rank: int, ops: IssuedOps) -> None:
        self.program = program
        self.rank = rank
        self.ops = ops
        self.buffers: list[int] = [NONE]
        self.contents: dict[int, RegisterView] = {}
        self.dtypes: dict[int, DType] = {}
        self.names: dict[int, str] = {}
        self.allocated: dict[int, AllocateOp] = {}
        self.symmetric: dict[int, SymmetricOp] = {}
        self.homes: dict[tuple[str, tuple[int, ...], int], int] = {}
        self.views: dict[RegisterView, int] = {}
        self.freed: set[int] = set()

    def new_register(self, buffer: int = NONE) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def add_buffer(self, buffer: int, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> RegisterView:
        """Record the layout and dtype of a new buffer, and return the tensor of all its elements."""
        contents = self.contents[buffer] = RegisterView(buffer, shape, strides)
        self.buffers[buffer] = self.views[contents] = buffer
        self.dtypes[buffer] = dtype
        return contents

    def input(self, value: Value, layout: tuple[tuple[int, ...], tuple[int, ...]] | None) -> RegisterView | None:
        """Add a register for an input; return the input as a tensor.

        `layout` holds the shape and the strides of the input. If this rank holds no part of the input, `layout` and the
        result are None.
        """
        buffer = self.new_register()
        self.names[buffer] = value.name
        return None if layout is None else self.add_buffer(buffer, layout[0], value.tensor.dtype, layout[1])

    def allocate(self, shape: tuple[int, ...], dtype: DType, name: str = "") -> RegisterView:
        buffer = self.new_register()
        self.names[buffer] = name
        op = self.allocated[buffer] = AllocateOp(*self.ops.here, buffer, shape, dtype)
        self.ops.add(op)
        return self.add_buffer(buffer, shape, dtype, dense_strides(shape))

    def symmetric_buffer(
        self, name: str, rounds: tuple[int, ...], rank: int, shape: tuple[int, ...], dtype: DType
    ) -> RegisterView:
        """Return a symmetric buffer of a rank as a tensor.

        The first use appends the operation that provides the buffer.
        """
        home = name, rounds, rank
        if home in self.homes:
            return self.contents[self.homes[home]]
        buffer = self.homes[home] = self.new_register()
        self.names[buffer] = name
        op = self.symmetric[buffer] = SymmetricOp(*self.ops.here, buffer, name, rounds, shape, dtype, rank)
        self.ops.add(op)
        return self.add_buffer(buffer, shape, dtype, dense_strides(shape))

    def at_rank(self, x: RegisterView, rank: int) -> RegisterView:
        """Return a view with the layout of `x`, but of the symmetric buffer on `rank`.

        Raise a HostIRError if the buffer of `x` is not symmetric.
        """
        op, name = self.symmetric.get(x.buffer), self.names[x.buffer]
        if op is None:
            raise self.ops.fail(f"%{name} is not symmetric", expected="a view of a buffer from allocate_symmetric")
        return x._replace(buffer=self.symmetric_buffer(op.name, op.rounds, rank, op.shape, op.dtype).buffer)

    def flags(self, flags: RegisterView, epoch: int, rank: int | None = None) -> int:
        """Return the register of the flags on `rank`. By default this is the current rank.

        Raise a HostIRError if `epoch` is too large for a flag.
        """
        if epoch >= EPOCHS:
            raise self.ops.fail(f"epoch {epoch} of a flag", expected=f"at most {EPOCHS - 1}")
        return self.register(self.at_rank(flags, self.rank if rank is None else rank))

    def register(self, x: RegisterView | None) -> int:
        """Return the register of a tensor. If it has no register yet, append an operation that makes the view."""
        if x is None:
            return NONE
        self.check_not_freed(x)
        register = self.views.get(x)
        if register is None:
            register = self.views[x] = self.new_register(x.buffer)
            index, (place, stream) = x.index_in(self.contents[x.buffer]), self.ops.here
            self.ops.add(ViewOp(place, stream, register, *x, index))
        return register

    def free(self, x: RegisterView) -> None:
        self.check_not_freed(x)
        self.freed.add(x.buffer)
        if x.buffer in self.allocated:
            self.ops.add(FreeOp(*self.ops.here, x.buffer))

    def check_not_freed(self, x: RegisterView) -> None:
        if x.buffer in self.freed:
            raise self.ops.fail(
                "the memory of an operand was freed earlier", hint="free it after its last use, and once"
            )

    def check_dense(self, x: RegisterView, message: str) -> None:
        if not x.dense:
            expected = f"the strides of a dense {list(x.shape)}, not {list(x.strides)}"
            raise self.fail_layout(x, message, expected)

    def view(self, x: RegisterView, shape: tuple[int, ...]) -> RegisterView:
        strides = view_strides(x.shape, x.strides, shape)
        if strides is None:
            message = f"shape {list(x.shape)} with strides {list(x.strides)} cannot be seen as {list(shape)}"
            raise self.fail_layout(x, message, "memory that lies in the order of the new shape")
        return RegisterView(x.buffer, shape, strides, x.offset)

    def block(self, x: RegisterView | None, index: int, count: int) -> RegisterView:
        """Return block number `index` of a dense tensor, as a vector.

        The tensor is divided into `count` equal blocks.
        """
        assert x is not None
        size, rest = divmod(prod(x.shape), count)
        if rest:
            raise self.ops.fail(f"{prod(x.shape)} elements do not divide into {count} blocks")
        return RegisterView(x.buffer, (size,), (1,), x.offset + index * size)

    def copy(self, x: int, out: int) -> None:
        """Append a copy from the tensor in register `x` to the tensor in register `out`."""
        dtype = self.dtypes[self.buffers[out]]
        self.ops.add(ComputeOp(*self.ops.here, "copy", dtype, out, (x,), {}))

    def fail_layout(self, x: RegisterView, message: str, expected: str) -> HostIRError:
        """Return an error about the layout of the tensor `x`.

        If `x` is a view of an input that is not dense, the error is about the input.
        """
        contents = self.contents[x.buffer]
        if x.buffer > len(self.program.inputs) or contents.dense:
            return self.ops.fail(message, expected=expected, hint="copy it to a buffer of its own first")
        value, shape, strides = self.program.inputs[x.buffer - 1], list(contents.shape), list(contents.strides)
        return error(
            f"input {value} of rank {self.rank} is not contiguous: shape {shape}, strides {strides}",
            value.span,
            hint=f"pass {value.name}.contiguous(), or have the program read '%{value.name}_dense = dense {value}'",
            notes=((self.ops.place.statement.span, message),),
        )
