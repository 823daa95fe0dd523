"""Define host program statements: buffers, views by index, streams, handles and loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hostir.ir.op import (
    Body,
    Define,
    Expr,
    Extent,
    Free,
    Index,
    Int,
    Name,
    Phase,
    Shape,
    Statement,
    StreamRef,
    Sync,
    Use,
    ViewStrides,
    statement,
)
from hostir.ir.sharding import refine
from hostir.ir.sizes import Division, Size, product
from hostir.ir.types import Axis, Factor, Kind, TensorType
from hostir.ir.view_ops import ViewStatement

if TYPE_CHECKING:
    from hostir.ir.machine import Frame

HOST = frozenset({Phase.HOST})


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Allocate(Statement):
    """Allocates a dense, uninitialised buffer. Each rank of the mesh allocates memory for its part of the tensor.

    Example: %x: bf16[4, 8@didx, 32] = allocate
    """

    syntax = "{out} = allocate"
    on_host = True
    uncut = True
    out: Define

    def verify(self) -> None:
        if not isinstance(self.out.type, TensorType):
            raise self.fail(f"allocate gives a tensor, not a {self.out.type}", expected="a tensor type after the name")

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.out.tensor.mesh):
            frame[self.out] = frame.machine.allocate(frame.shape(self.out.tensor), self.out.tensor.dtype)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class FreeBuffer(Statement):
    """Frees a buffer. No statement that is issued later may access it.

    Example: free %x: bf16[4, 8@didx, 32]
    """

    syntax = "free {x}"
    uncut = True
    x: Free

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.x.tensor.mesh):
            frame.machine.free(frame[self.x])


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Select(ViewStatement):
    """A view of `x` at one index of an axis, by default axis 0. The result lacks this axis.

    The axis must not be sharded.

    Example: %y: f32[8@didx, 32] = select %x: f32[4, 8@didx, 32][%i]
    """

    phases: ClassVar[frozenset[Phase]] = HOST
    syntax = "{out} = select {x}[{index}]<? axis {axis}?>"
    index: Index
    axis: Int = 0

    def infer(self) -> TensorType:
        type = self.x.tensor
        if self.axis >= len(type.axes):
            raise self.fail(f"{self.x} has no axis {self.axis}", expected=f"an axis below {len(type.axes)}")
        if marks := type.axes[self.axis].marks:
            raise self.fail(
                f"axis {self.axis} of {self.x} lies over {marks[0]}", hint="select another axis, or use chunk"
            )
        return type.with_axes(a for i, a in enumerate(type.axes) if i != self.axis)

    def verify(self) -> None:
        self.infer()

    def strides(self, of: ViewStrides) -> Shape:
        return of.without(self.axis)

    def view(self, frame: Frame, x: Any) -> Any:
        index, extent = frame.index(self.index), self.x.tensor.shape[self.axis].bind(frame.sizes)
        if not 0 <= index < extent:
            raise self.fail(f"index {index} is outside axis {self.axis} of {self.x}", expected=f"0 to {extent - 1}")
        return frame.machine.select(x, self.axis, index)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Chunk(ViewStatement):
    """A view of one of `count` equal pieces of an axis of `x`, by default axis 0. The result has all axes of `x`.

    If the axis is sharded, each rank's part of the axis is cut into `count` pieces.

    Example: %y: f32[16, 8@didx] = chunk %x: f32[16, 32@didx][%i of 4] axis 1
    """

    phases: ClassVar[frozenset[Phase]] = HOST
    syntax = "{out} = chunk {x}[{index} of {count}]<? axis {axis}?>"
    index: Index
    count: Extent
    axis: Int = 0

    def _cut(self) -> tuple[Size, Axis]:
        """Return the number of blocks that are cut into pieces, and the type of one piece of the axis.

        If the axis is sharded, each rank's block is cut into pieces. Otherwise the axis is one block.
        """
        type = self.x.tensor
        if self.axis >= len(type.axes):
            raise self.fail(f"{self.x} has no axis {self.axis}", expected=f"an axis below {len(type.axes)}")
        outer, mesh, axis = Size(), type.mesh, type.axes[self.axis]
        for factor in axis.factors:
            if factor.on is None or mesh is None:
                break
            outer = outer * mesh.size(factor.on)
            if not type.local_factor(factor).is_one:
                break
        cut = refine(axis, outer, self.count, mesh)
        if cut is None:
            raise self.fail(
                f"axis {self.axis} of {self.x}, {axis}, cannot be cut in {self.count} equal pieces",
                expected=f"each rank's part to divide by {self.count}",
            )
        before, inner = cut
        return outer, Axis((*before, *inner)).normal()

    def infer(self) -> TensorType:
        piece = self._cut()[1]
        return self.x.tensor.with_axes(piece if i == self.axis else a for i, a in enumerate(self.x.tensor.axes))

    def verify(self) -> None:
        self.infer()

    def divisions(self) -> Iterator[Division]:
        type = self.x.tensor
        marks = [mark for mark in type.axes[self.axis].marks if type.mesh and mark in type.mesh.axes]
        ranks = product([Size(type.mesh.size(mark)) for mark in marks if type.mesh])
        sharded = "" if ranks.is_one else f"sharded over {ranks} ranks and "
        why = f"{self.x} is {sharded}cut in {self.count} pieces (chunk)"
        for factor in self.out.tensor.axes[self.axis].factors:
            yield Division(self.out.tensor.local_factor(factor), why, self.span)

    def strides(self, of: ViewStrides) -> Shape:
        return of.same()

    def view(self, frame: Frame, x: Any) -> Any:
        index, count = frame.index(self.index), self.count.bind(frame.sizes)
        if not 0 <= index < count:
            pieces = f"0 to {count - 1}" if count else f"{self.count} of at least 1"
            raise self.fail(f"piece {index} is outside axis {self.axis} of {self.x}", expected=pieces)
        unsharded = frame.machine.rank is None
        return frame.machine.chunk(x, self.axis, self._cut()[0].bind(frame.sizes) if unsharded else 1, count, index)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class AsPartial(ViewStatement):
    """A view with the type of a partial sum: each rank's buffer is one term. An in-place allreduce needs such a view.

    If an axis of `x` is sharded over the mesh axis `over`, each rank's part of `x` is its term.

    Example: %p: f32[16, 32] partial(didx) = as_partial %x: f32[16, 32] over didx
    """

    phases: ClassVar[frozenset[Phase]] = HOST
    syntax = "{out} = as_partial {x} over {over}"
    over: Name

    def infer(self) -> TensorType:
        type = self.x.tensor
        if type.mesh is None or self.over not in type.mesh.axes or self.over in type.partial:
            raise self.fail(f"{self.x} cannot hold partial sums over '{self.over}'", expected="an axis of its mesh")
        axes = [self._local(type, axis) if self.over in axis.marks else axis for axis in type.axes]
        return replace(type.with_axes(axes), partial=tuple(sorted((*type.partial, self.over))))

    def _local(self, type: TensorType, axis: Axis) -> Axis:
        """Return an axis that is sharded over `over`, as a rank holds it."""
        return Axis(tuple(Factor(type.local_factor(f)) if f.on == self.over else f for f in axis.factors)).normal()

    def verify(self) -> None:
        self.infer()

    def strides(self, of: ViewStrides) -> Shape:
        return of.same()

    def view(self, frame: Frame, x: Any) -> Any:
        return x


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Dense(ViewStatement):
    """The same elements in dense memory: `x` itself if it is dense at run time, else a copy of it.

    `x` is an input, or a view of an input. The strides of an input are known only at run time, because the caller
    chooses them. A copy is made on the current stream, and it exists until the end of the call. Since the result may or
    may not be a copy, no statement may write the input or the result.

    Example: %y: f32[8@didx, 32] = dense %x: f32[8@didx, 32]
    """

    phases: ClassVar[frozenset[Phase]] = HOST
    syntax = "{out} = dense {x}"
    on_host = False
    may_copy = True

    def infer(self) -> TensorType:
        return self.x.tensor

    def verify(self) -> None:
        self.infer()

    def strides(self, of: ViewStrides) -> Shape:
        return of.dense()

    def view(self, frame: Frame, x: Any) -> Any:
        return frame.machine.dense(x)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Wait(Statement):
    """The current stream waits for a communication. From here on, this stream may read the result.

    Example: wait %h: handle
    """

    syntax = "wait {handle}"
    orders = Sync.WAIT
    uncut = True
    handle: Use

    def verify(self) -> None:
        if self.handle.type is not Kind.HANDLE:
            raise self.fail(
                f"{self.handle} is not a communication in flight",
                expected="a handle",
                hint="wait for the %h of '%h = allgather ...'",
            )

    def evaluate(self, frame: Frame) -> None:
        handle = frame[self.handle]
        if handle is not None:
            frame.machine.wait(handle)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class CurrentStream(Statement):
    """The current stream, to which statements are issued. At the start of a call it is the caller's stream.

    Example: %user = current_stream
    """

    syntax = "{out} = current_stream"
    uncut = True
    out: Define

    def infer(self) -> Kind:
        return Kind.STREAM

    def evaluate(self, frame: Frame) -> None:
        frame[self.out] = frame.machine.current_stream()


@statement
@dataclass(frozen=True, eq=False, repr=False)
class SetStream(Statement):
    """Makes a stream the current stream. The operand is a stream value, or the index of a worker stream in the pool.

    Example: set_stream %i % 2
    """

    syntax = "set_stream {stream}"
    uncut = True
    stream: StreamRef

    @property
    def sets_stream(self) -> Expr:
        return self.stream

    def evaluate(self, frame: Frame) -> None:
        frame.machine.set_stream(frame.stream(self.stream))


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Synchronize(Statement):
    """The current stream waits for all work that was issued to another stream so far. The host does not wait.

    Example: synchronize 1
    """

    syntax = "synchronize {stream}"
    orders = Sync.STREAMS
    uncut = True
    stream: StreamRef

    def evaluate(self, frame: Frame) -> None:
        frame.machine.synchronize(frame.stream(self.stream))


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Delay(Statement):
    """Delays the current stream for a short time, so that a communication on another stream gets SMs first.

    If a computation fills the device, a communication cannot start until the first thread blocks of the computation
    have ended. A delay orders nothing: without it, the program has the same results. Machines without SMs ignore it.
    The idea comes from the delay in torch's fused matmul + reduce-scatter.

    Example: delay 5 us
    """

    syntax = "delay {microseconds} us"
    uncut = True
    microseconds: Int

    def evaluate(self, frame: Frame) -> None:
        frame.machine.delay(self.microseconds)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class For(Statement):
    """Runs the body once for each index from 0 to `count` - 1, in this order. Every rank runs every round.

    Example: for %i in 0..4 { set_stream %i % 2 }
    """

    syntax = "for {index} in 0..{count} {body}"
    uncut = True
    index: Define
    count: Extent
    body: Body

    def infer(self) -> Kind:
        return Kind.INDEX

    @property
    def repeats(self) -> Size:
        return self.count

    def rounds(self, frame: Frame) -> Iterator[tuple[int, ...]]:
        for index in range(self.count.bind(frame.sizes)):
            frame[self.index] = index
            yield (index,)
