"""Unroll a program for one rank and one set of shapes: flat operations in the order of issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

from hostir.ir.machine import Done, Exchange, Frame, Observer, OptionalMethods, Ready, interpret, uncollected
from hostir.ir.message_ops import MESSAGES
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
    BarrierOp,
    CollectiveOp,
    ComputeOp,
    CopyOp,
    DelayOp,
    FreeOp,
    MarkOp,
    MessagesOp,
    Op,
    SignalOp,
    StatementPlace,
    SymmetricOp,
    SynchronizeOp,
    ViewOp,
    WaitOp,
    WaitSignalOp,
)
from hostir.plan.unrolled import RegisterView, UnrolledProgram


def teams_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the members, ascending, of every team of two or more ranks that communicates, in program order.

    The order is the same on every rank, as all ranks must make their process groups in one order.
    """
    teams = (team for statement in program.walk() if statement.collective for team in statement.teams)
    return tuple(dict.fromkeys(team for team in teams if len(team) > 1))


def message_teams_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the teams of two or more ranks whose ranks send each other messages, as `teams_of` does."""
    teams = (team for statement in program.walk() if not statement.collective for team in statement.teams)
    return tuple(dict.fromkeys(team for team in teams if len(team) > 1))


# The machine that records operations instead of running them, for one rank and one set of shapes.
#
# A view becomes an operation only when another operation uses it: a chain of select, chunk and reshape is one strided
# view of its buffer, made once in a run.

COLLECTIVES = ("allgather", "allreduce", "reduce_scatter", "alltoall")


class Strided(Protocol):
    """A tensor of any library: unrolling needs only its shape, and its strides in elements."""

    @property
    def shape(self) -> Sequence[int]:
        """The extents of its axes."""

    def stride(self) -> Sequence[int]:
        """Return the strides of its axes."""


@uncollected()
def unroll(
    program: Program, rank: int, sizes: Mapping[str, int], inputs: Sequence[Strided | None] | None = None
) -> UnrolledProgram:
    """Unroll a program for one rank, and for inputs with the shapes and strides of `inputs`, by default dense ones.

    Raises HostIRError for what no machine can do: a stream outside the pool, a view that needs a copy, a communication
    of a tensor that is not dense, or that nothing waits for, a use after free, a peer's memory that is not symmetric.
    """
    unroller = Unroller(program, rank, sizes)
    given = unroller.take_dense() if inputs is None else unroller.take(inputs)
    return unroller.finish(interpret(program, unroller, sizes, given, unroller))


@dataclass(frozen=True)
class StreamValue:
    """A stream value, as returned by `current_stream`."""

    number: int


@dataclass
class Flight:
    """The handle of a communication while unrolling: the operation that starts it."""

    op: Op
    waited: bool = False


@dataclass
class Unroller(Observer, OptionalMethods):
    """The machine that records operations instead of running them."""

    program: Program
    rank: int
    sizes: Mapping[str, int]
    ops: list[Op] = field(default_factory=list)
    buffers: list[int] = field(default_factory=lambda: [NONE])
    freed: set[int] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    stream: int = CALLER

    def __post_init__(self) -> None:
        self.wholes: dict[int, RegisterView] = {}  # by buffer: all of it as a tensor
        self.dtypes: dict[int, DType] = {}  # of buffers
        self.names: dict[int, str] = {}  # of buffers
        self.allocated: dict[int, AllocateOp] = {}  # by buffer
        self.symmetric: dict[int, SymmetricOp] = {}
        self.homes: dict[tuple[str, tuple[int, ...], int], int] = {}  # symmetric buffers, by name, round and rank
        self.barriers: dict[tuple[int, ...], int] = {}  # by team: the number of its barriers so far
        self.views: dict[RegisterView, int] = {}
        self.marked: set[int] = set()  # handles of MarkOps that another stream waits for
        self.ordered = 0  # the number of operations before the latest statement that orders streams
        self.alone: Flight | None = None  # the latest message of this rank to itself, in a team of one

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.place = StatementPlace(statement, rounds)

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        return self.place.statement.fail(message, expected=expected, hint=hint)

    def fail_layout(self, x: RegisterView, message: str, expected: str) -> HostIRError:
        """Return the error for a tensor's layout; it names the input if the tensor is a view of a strided one."""
        whole = self.wholes[x.buffer]
        if x.buffer > len(self.program.inputs) or whole.dense:
            return self.fail(message, expected=expected, hint="copy it to a buffer of its own first")
        value, shape, strides = self.program.inputs[x.buffer - 1], list(whole.shape), list(whole.strides)
        return error(
            f"input {value} of rank {self.rank} is not contiguous: shape {shape}, strides {strides}",
            value.span,
            hint=f"pass {value.name}.contiguous(), or have the program read '%{value.name}_dense = dense {value}'",
            notes=((self.place.statement.span, message),),
        )

    def take(self, inputs: Sequence[Strided | None]) -> list[RegisterView | None]:
        """Return a tensor with the layout of each input, None for those that this rank does not hold."""
        layouts = [None if x is None else (tuple(x.shape), tuple(x.stride())) for x in inputs]
        return [self.input(value, layout) for value, layout in zip(self.program.inputs, layouts, strict=True)]

    def take_dense(self) -> list[RegisterView | None]:
        """Return a dense tensor for each input that this rank holds."""
        frame, parts = Frame(self, self.sizes), list[RegisterView | None]()
        for value in self.program.inputs:
            shape = frame.shape(value.tensor)
            parts.append(self.input(value, (shape, dense_strides(shape)) if frame.here(value.tensor.mesh) else None))
        return parts

    def input(self, value: Value, layout: tuple[tuple[int, ...], tuple[int, ...]] | None) -> RegisterView | None:
        buffer = self.new_register()
        self.names[buffer] = value.name
        return None if layout is None else self.whole(buffer, layout[0], value.tensor.dtype, layout[1])

    # The machine protocol -----------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> RegisterView:
        name = next((v.name for v in self.place.statement.named), "")
        if not symmetric:
            part = self.buffer(shape, dtype)
            self.names[part.buffer] = name
            return part
        part = self.home(name, self.place.rounds, self.rank, shape, dtype)
        if part.shape != shape or self.dtypes[part.buffer] != dtype:
            raise self.fail(f"%{name} was allocated before with another shape or dtype", expected="one shape and dtype")
        return part

    def free(self, x: RegisterView) -> None:
        self.check_held(x)
        self.freed.add(x.buffer)
        if x.buffer in self.allocated:
            self.ops.append(FreeOp(self.place, self.stream, x.buffer))

    def select(self, x: RegisterView, axis: int, index: int) -> RegisterView:
        shape, strides, offset = x.shape, x.strides, x.offset + index * x.strides[axis]
        return RegisterView(x.buffer, shape[:axis] + shape[axis + 1 :], strides[:axis] + strides[axis + 1 :], offset)

    def chunk(self, x: RegisterView, axis: int, outer: int, count: int, index: int) -> RegisterView:
        shape = x.shape
        cut = self.view(x, (*shape[:axis], outer, count, shape[axis] // (outer * count), *shape[axis + 1 :]))
        return self.view(self.select(cut, axis + 1, index), (*shape[:axis], shape[axis] // count, *shape[axis + 1 :]))

    def reshape(self, x: RegisterView, shape: tuple[int, ...]) -> RegisterView:
        return self.view(x, shape)

    def permute(self, x: RegisterView, axes: tuple[int, ...]) -> RegisterView:
        shape, strides = tuple([x.shape[axis] for axis in axes]), tuple([x.strides[axis] for axis in axes])
        return RegisterView(x.buffer, shape, strides, x.offset)

    def dense(self, x: RegisterView) -> RegisterView:
        if x.dense:
            return x
        copy = self.buffer(x.shape, self.dtypes[x.buffer])
        self.copy_to(copy.buffer, self.register(x))
        return copy

    def compute(
        self,
        kind: str,
        out: RegisterView,
        operands: Sequence[RegisterView | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        if ready is not None:
            flags, own = self.flags(ready.flags, ready.epoch), ready.own
            ready = replace(ready, flags=flags, own=None if own is None else self.register(own))
        if done is not None:
            done = replace(done, flags=self.flags(done.flags, done.epoch))
        registers, target, dtype = tuple(map(self.register, operands)), self.register(out), self.dtypes[out.buffer]
        if ready is not None:
            overlapped, reserved = room(self.ops, self.ordered, self.stream)
            ready = replace(ready, overlapped_sms=overlapped, reserved_sms=reserved)
        self.ops.append(ComputeOp(self.place, self.stream, kind, dtype, target, registers, options, ready, done))

    def communicate(self, exchange: Exchange, x: RegisterView | None, out: RegisterView | None) -> Flight:
        for part, what in ((x, "sends"), (out, "fills")):
            if part is not None:
                self.check_dense(part, f"the tensor that {exchange.kind} {what} is not dense")
        if exchange.kind not in COLLECTIVES:
            return self.messages(exchange, x, out)
        if len(exchange.team) == 1 or exchange.kind == "allreduce":
            self.copy_here(x, out)
        if len(exchange.team) == 1:
            return self.start(MarkOp(self.place, self.stream, self.new_register()))
        registers = self.register(out if exchange.kind == "allreduce" else x), self.register(out), self.new_register()
        return self.start(CollectiveOp(self.place, self.stream, exchange.kind, exchange.team, *registers))

    def wait(self, handle: Flight | None) -> None:
        assert handle is not None
        handle.waited = True
        self.follow(handle)

    def current_stream(self) -> StreamValue:
        return StreamValue(self.stream)

    def set_stream(self, stream: StreamValue | int) -> None:
        self.stream = self.number(stream)

    def synchronize(self, stream: StreamValue | int) -> None:
        other, self.ordered = self.number(stream), len(self.ops)
        if other != self.stream:
            self.ops.append(SynchronizeOp(self.place, self.stream, other))

    def delay(self, microseconds: int) -> None:
        self.ops.append(DelayOp(self.place, self.stream, microseconds))

    def copy(self, x: RegisterView, out: RegisterView, source: int, target: int, sms: int = 0) -> None:
        for part in (x, out) if sms else ():
            self.check_dense(part, "a copy by SMs, of a tensor that is not dense")
        x = x if source == self.rank else self.at_rank(x, source)
        out = out if target == self.rank and not sms else self.at_rank(out, target)
        self.ops.append(CopyOp(self.place, self.stream, self.register(x), self.register(out), sms))

    def signal(self, flags: RegisterView, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        register = self.flags(flags, epoch, peer)
        self.ops.append(SignalOp(self.place, self.stream, register, slot, epoch, peer, sms))

    def wait_signal(self, flags: RegisterView, slot: int, epoch: int) -> None:
        register = self.flags(flags, epoch)
        self.ops.append(WaitSignalOp(self.place, self.stream, register, slot, epoch))

    def barrier(self, team: tuple[int, ...]) -> None:
        number = self.barriers.get(team, 0)
        self.barriers[team], self.ordered = number + 1, len(self.ops)
        if len(team) > 1:
            self.ops.append(BarrierOp(self.place, self.stream, team, number))

    # Registers ----------------------------------------------------------------------------------------------------
    def new_register(self, buffer: int = NONE) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def buffer(self, shape: tuple[int, ...], dtype: DType) -> RegisterView:
        buffer = self.new_register()
        op = self.allocated[buffer] = AllocateOp(self.place, self.stream, buffer, shape, dtype)
        self.ops.append(op)
        return self.whole(buffer, shape, dtype, dense_strides(shape))

    def home(self, name: str, rounds: tuple[int, ...], rank: int, shape: tuple[int, ...], dtype: DType) -> RegisterView:
        """Return a rank's symmetric buffer as a tensor; its first use adds the operation that provides it."""
        place = name, rounds, rank
        if place in self.homes:
            return self.wholes[self.homes[place]]
        buffer = self.homes[place] = self.new_register()
        self.names[buffer] = name
        op = SymmetricOp(self.place, self.stream, buffer, name, rounds, shape, dtype, rank)
        self.symmetric[buffer] = op
        self.ops.append(op)
        return self.whole(buffer, shape, dtype, dense_strides(shape))

    def at_rank(self, x: RegisterView, rank: int) -> RegisterView:
        """Return the same view of a rank's buffer. Raises for a view of memory that is not symmetric."""
        own, name = self.symmetric.get(x.buffer), self.names[x.buffer]
        if own is None:
            raise self.fail(f"%{name} is not symmetric", expected="a view of a buffer from allocate_symmetric")
        return x._replace(buffer=self.home(own.name, own.rounds, rank, own.shape, own.dtype).buffer)

    def check_dense(self, x: RegisterView, message: str) -> None:
        if not x.dense:
            expected = f"the strides of a dense {list(x.shape)}, not {list(x.strides)}"
            raise self.fail_layout(x, message, expected)

    def flags(self, flags: RegisterView, epoch: int, rank: int | None = None) -> int:
        """Return the register of flags of a rank, by default this one. Raises for an epoch that no flag can hold."""
        if epoch >= EPOCHS:
            raise self.fail(f"epoch {epoch} of a flag", expected=f"at most {EPOCHS - 1}")
        return self.register(self.at_rank(flags, self.rank if rank is None else rank))

    def whole(self, buffer: int, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> RegisterView:
        """Record the layout and dtype of a new buffer, and return all of it as a tensor."""
        whole = self.wholes[buffer] = RegisterView(buffer, shape, strides)
        self.buffers[buffer] = self.views[whole] = buffer
        self.dtypes[buffer] = dtype
        return whole

    def register(self, x: RegisterView | None) -> int:
        """Return the register of a tensor; add a view operation if it has none yet."""
        if x is None:
            return NONE
        self.check_held(x)
        found = self.views.get(x)
        if found is None:
            found = self.views[x] = self.new_register(x.buffer)
            index = x.index_in(self.wholes[x.buffer])
            self.ops.append(ViewOp(self.place, self.stream, found, *x, index))
        return found

    def check_held(self, x: RegisterView) -> None:
        if x.buffer in self.freed:
            raise self.fail("the memory of an operand was freed earlier", hint="free it after its last use, and once")

    def view(self, x: RegisterView, shape: tuple[int, ...]) -> RegisterView:
        strides = view_strides(x.shape, x.strides, shape)
        if strides is None:
            seen = f"shape {list(x.shape)} with strides {list(x.strides)} cannot be seen as {list(shape)}"
            raise self.fail_layout(x, seen, "memory that lies in the order of the new shape")
        return RegisterView(x.buffer, shape, strides, x.offset)

    def number(self, stream: StreamValue | int) -> int:
        if isinstance(stream, StreamValue):
            return stream.number
        if not 0 <= stream < self.program.streams:
            pool = self.program.streams
            raise self.fail(
                f"no stream {stream} in a pool of {pool}",
                expected=f"0 to {pool - 1}" if pool else "a program with 'streams N' in its head",
            )
        return stream

    def start(self, op: Op) -> Flight:
        self.ops.append(op)
        self.flights.append(Flight(op))
        return self.flights[-1]

    def follow(self, handle: Flight) -> None:
        """Make the current stream wait for a communication."""
        self.ordered = len(self.ops)
        if isinstance(handle.op, MarkOp):
            if handle.op.stream == self.stream:
                return
            self.marked.add(handle.op.handle)
        self.ops.append(WaitOp(self.place, self.stream, handle.op.starts))

    def copy_here(self, x: RegisterView | None, out: RegisterView | None) -> None:
        """Add a copy between dense tensors of equal size; none if they are the same memory."""
        source, target = self.register(self.block(x, 0, 1)), self.register(self.block(out, 0, 1))
        if source != target:
            self.copy_to(target, source)

    def copy_to(self, out: int, x: int) -> None:
        self.ops.append(ComputeOp(self.place, self.stream, "copy", self.dtypes[self.buffers[out]], out, (x,), {}))

    def messages(self, exchange: Exchange, x: RegisterView | None, out: RegisterView | None) -> Flight:
        collective, alone = exchange.kind not in MESSAGES, len(exchange.team) == 1
        if alone and not collective and self.alone is not None:  # messages run one after another
            self.follow(self.alone)
        sends, receives = [], []
        for move in exchange.moves or ():
            if move.source == move.target and (collective or alone):
                self.copy_here(self.block(x, *move.take), self.block(out, *move.put))
                continue
            if move.source == self.rank:
                sends.append((self.register(self.block(x, *move.take)), move.target))
            if move.target == self.rank:
                receives.append((self.register(self.block(out, *move.put)), move.source))
        if sends or receives:
            pieces = tuple(sends), tuple(receives), collective
            return self.start(MessagesOp(self.place, self.stream, exchange.team, *pieces, self.new_register()))
        flight = self.start(MarkOp(self.place, self.stream, self.new_register()))
        if not collective:
            self.alone = flight
        return flight

    def block(self, x: RegisterView | None, index: int, count: int) -> RegisterView:
        assert x is not None
        size, rest = divmod(prod(x.shape), count)
        if rest:
            raise self.fail(f"{prod(x.shape)} elements do not divide into {count} blocks")
        return RegisterView(x.buffer, (size,), (1,), x.offset + index * size)

    def finish(self, outputs: Sequence[RegisterView | None]) -> UnrolledProgram:
        if flight := next((f for f in self.flights if not f.waited), None):
            raise flight.op.place.statement.fail(
                "nothing waits for this communication", hint="add 'wait' with its handle before the result is read"
            )
        self.stream = CALLER
        registers = tuple(self.register(self.callers(x)) for x in outputs)
        held = range(1, 1 + len(self.program.inputs))
        ops = tuple(op for op in self.ops if not isinstance(op, MarkOp) or op.handle in self.marked)
        return UnrolledProgram(
            *(self.program, self.rank, self.sizes, ops, held, registers),
            *(tuple(self.buffers), {register: x for x, register in self.views.items()}, self.dtypes),
            *(self.allocated, self.symmetric),
        )

    def callers(self, x: RegisterView | None) -> RegisterView | None:
        """Return an output that the caller may keep: a copy if it is symmetric, as the next call reuses such memory."""
        if x is None or x.buffer not in self.symmetric:
            return x
        self.place = self.symmetric[x.buffer].place
        taken = self.buffer(x.shape, self.dtypes[x.buffer])
        self.copy_to(taken.buffer, self.register(x))
        return taken


def room(ops: Sequence[Op], ordered: int, stream: int) -> tuple[int, int]:
    """Return the SMs that a waiting kernel does not get if issued to `stream` now: `overlapped_sms`, `reserved_sms`.

    Args:
        ops: the operations before it in the call.
        ordered: how many of them precede the latest statement that orders streams.
        stream: its stream.
    """
    reserved = any(isinstance(op, SignalOp) and op.sms for op in ops)
    return _copying(ops[ordered:], stream), int(reserved)


def _copying(ops: Sequence[Op], stream: int) -> int:
    """Return the number of SMs of the copies that a waiting kernel issued next may overlap; 0 if there are none."""
    latest = (op for op in reversed(ops) if not op.defines)
    last = next(latest, None)
    if isinstance(last, SignalOp) and not last.sms and last.stream == stream:
        last = next(latest, None)
    return last.sms if isinstance(last, CopyOp) and last.stream == stream else 0
