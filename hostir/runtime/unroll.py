"""Unroll a program for one rank and one set of shapes: flat operations in the order of issue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import get_annotations
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from hostir.ir.comm_ops import MESSAGES
from hostir.ir.machine import Done, Exchange, Frame, Observer, OptionalMethods, Ready, interpret, uncollected
from hostir.ir.op import Statement, Value
from hostir.ir.program import Program, format_statement
from hostir.ir.regions import dense_strides, is_dense, view_strides
from hostir.ir.source import HostIRError, error
from hostir.ir.types import DType
from hostir.runtime.order import CALLER, NONE, RankOrder

# Operations -----------------------------------------------------------------------------------------------------------
# A program unrolled for one rank and one set of shapes is a list of operations in issue order.
#
# It has no names, loops, indices or symbols: only operations on numbered registers, each of which knows its statement.
# `unroll` makes them. A machine binds each to a closure over one list of registers, and a run calls these closures.

# A flag of a CPU process is one integer, so that setting it and waiting for it are single operations: the number of the
# call, from 1, in the upper half, and the epoch of that call in the lower half. It rises from epoch to epoch and from
# call to call, over all plans that share it; 2^31 calls of 2^32 epochs are more than anyone will make.
EPOCHS = 1 << 32


def flag_value(call: int, epoch: int) -> int:
    """Return the value of a flag that has reached an epoch of a call."""
    return call * EPOCHS + epoch


class StatementPlace(NamedTuple):
    """A statement, and the indices of the loops around it, outermost first."""

    statement: Statement
    rounds: tuple[int, ...]


ElementRange = tuple[int, int]  # elements of a buffer: the first, and the one after the last
FlagUse = tuple[int, int, int]  # register of flags, slot, epoch

# Types of fields: what an operation does with the register, handle, stream or ranks in the field.
DefinedRegister: TypeAlias = int
FreedRegister: TypeAlias = int
ReadRegister: TypeAlias = int
ReadRegisters: TypeAlias = tuple[int, ...]
WrittenRegister: TypeAlias = int
Start: TypeAlias = int
Await: TypeAlias = int
Join: TypeAlias = int
Group: TypeAlias = tuple[int, ...]
RanksOfTeam: TypeAlias = tuple[int, ...]
TRAITS = {
    **{"DefinedRegister": "defines", "FreedRegister": "frees", "Start": "starts", "Await": "awaits", "Join": "joins"},
    **{"ReadRegisters": "reads", "Group": "by_group", "RanksOfTeam": "of_team"},
}


@dataclass(frozen=True)
class Op:
    """One operation, issued to `stream`. `place` is the statement that it comes from.

    Analyses ask for these traits instead of naming classes of operations. Most follow from the types of the fields.
        defines: the register that it sets to a tensor; such an operation runs on the host only.
        frees: the register of the buffer that it frees.
        reads, writes: the registers whose memory it reads and writes; a communication, until something waits for it.
        joins: the stream whose work it waits for, or None.
        starts, awaits: the handle of the communication that it starts, or waits for.
        raised_flags, awaited_flags: the flags that it sets, and those that its stream or its kernel waits for.
        by_group: the ranks that run it together, through a process group.
        of_team: the ranks that it signals and waits for, by flags that the machine adds for it.
        in_graph: whether it becomes a node of a CUDA graph.
        needs_sms: whether it runs on SMs, at least on some machines.
        starts_early: whether it may start before the operation directly before it on its stream has ended.
    """

    place: StatementPlace
    stream: int

    by_group: ClassVar[Group] = ()
    of_team: ClassVar[RanksOfTeam] = ()
    in_graph: ClassVar[bool] = True

    defines: ClassVar[DefinedRegister] = NONE
    frees: ClassVar[FreedRegister] = NONE
    starts: ClassVar[Start] = NONE
    awaits: ClassVar[Await] = NONE
    joins: ClassVar[Join | None] = None

    def __init_subclass__(cls) -> None:
        """Define the traits that follow from the types of fields, except those that the class itself defines."""
        kinds = {str(kind): name for name, kind in get_annotations(cls).items()}
        for kind, trait in TRAITS.items():
            if kind in kinds and trait not in vars(cls):
                setattr(cls, trait, property(attrgetter(kinds[kind])))
        for kind, trait in (("ReadRegister", "reads"), ("WrittenRegister", "writes")):
            if kind in kinds and trait not in vars(cls):
                setattr(cls, trait, property(_tuple_of(kinds[kind])))

    @property
    def reads(self) -> ReadRegisters:
        return ()

    @property
    def writes(self) -> tuple[WrittenRegister, ...]:
        return ()

    @property
    def needs_sms(self) -> bool:
        return False

    @property
    def starts_early(self) -> bool:
        return False

    @property
    def raised_flags(self) -> tuple[FlagUse, ...]:
        return ()

    @property
    def awaited_flags(self) -> tuple[FlagUse, ...]:
        return ()

    @property
    def lane(self) -> str:
        """The track of a trace that shows the operation."""
        if self.by_group:
            return f"communication {self.by_group}"
        return "caller" if self.stream == CALLER else f"stream {self.stream}"


def _tuple_of(field: str) -> Callable[[Op], tuple[int, ...]]:
    return lambda op: (getattr(op, field),)


@dataclass(frozen=True)
class AllocateOp(Op):
    """`registers[out]` becomes a dense uninitialised tensor, unless the caller passed a tensor for this output."""

    out: DefinedRegister
    shape: tuple[int, ...]
    dtype: DType

    in_graph = False


@dataclass(frozen=True)
class SymmetricOp(Op):
    """`registers[out]` becomes a symmetric buffer of `rank`: this rank's own, or the one of the same name on a peer.

    It is dense, and the same in every run with these sizes. In a loop each round has a buffer of its own.
    """

    out: DefinedRegister
    name: str
    rounds: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: DType
    rank: int

    @property
    def home(self) -> tuple[str, tuple[int, ...]]:
        """The name and the round, which identify the buffer on every rank."""
        return self.name, self.rounds


@dataclass(frozen=True)
class ViewOp(Op):
    """`registers[out]` becomes a view of the buffer `x`, beginning at its element `offset`.

    If the view is `x[i]`, `index` is i, else None: torch makes such a view in two thirds of the time.
    """

    out: DefinedRegister
    x: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    index: int | None

    in_graph = False


@dataclass(frozen=True)
class FreeOp(Op):
    """The buffer and all its views are freed."""

    buffer: FreedRegister

    in_graph = False


@dataclass(frozen=True)
class ComputeOp(Op):
    """Kernel `kind` writes `out`.

    With `ready`, it computes each block of rows once the flags of the block are set; with `done`, it sets a flag after
    each block. `ready.flags`, `ready.own` and `done.flags` are registers. `dtype` is that of `out`.
    """

    kind: str
    dtype: DType
    out: WrittenRegister
    operands: ReadRegisters
    options: Mapping[str, Any]
    ready: Ready | None = None
    done: Done | None = None

    @property
    def needs_sms(self) -> bool:
        return True

    @property
    def starts_early(self) -> bool:
        return self.ready is not None and self.ready.overlapped_sms > 0

    @property
    def reads(self) -> tuple[int, ...]:
        if self.ready is None:
            return self.operands
        own = () if self.ready.own is None else (self.ready.own,)
        return *self.operands, self.ready.flags, *own

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,) if self.done is None else (self.out, self.done.flags)

    @property
    def raised_flags(self) -> tuple[FlagUse, ...]:
        done = self.done
        return () if done is None else tuple((done.flags, slot, done.epoch) for slot in done.order)

    @property
    def awaited_flags(self) -> tuple[FlagUse, ...]:
        ready = self.ready
        return () if ready is None else tuple((ready.flags, slot, ready.epoch) for slot in ready.awaited)


@dataclass(frozen=True)
class CopyOp(Op):
    """Copies `x` to `out`: by a copy engine if `sms` is 0, else by a kernel on `sms` SMs. One may be on a peer."""

    x: ReadRegister
    out: WrittenRegister
    sms: int = 0

    @property
    def needs_sms(self) -> bool:
        return True  # a copy within a GPU is a kernel


@dataclass(frozen=True)
class SignalOp(Op):
    """Sets element `slot` of the peer's `flags` to an epoch of this call.

    The stream itself sets it if `sms` is 0, else a kernel on `sms` SMs.
    """

    flags: WrittenRegister
    slot: int
    epoch: int
    peer: int
    sms: int = 0

    @property
    def needs_sms(self) -> bool:
        return self.sms > 0

    @property
    def raised_flags(self) -> tuple[FlagUse, ...]:
        return ((self.flags, self.slot, self.epoch),)


@dataclass(frozen=True)
class WaitSignalOp(Op):
    """The stream waits until element `slot` of this rank's `flags` has reached an epoch of this call."""

    flags: ReadRegister
    slot: int
    epoch: int

    @property
    def awaited_flags(self) -> tuple[FlagUse, ...]:
        return ((self.flags, self.slot, self.epoch),)


@dataclass(frozen=True)
class BarrierOp(Op):
    """The stream waits until all ranks of the team have reached their barrier of this number, from 0 in every call."""

    team: RanksOfTeam
    number: int


@dataclass(frozen=True)
class CollectiveOp(Op):
    """A communication of the whole team. `x` and `out` are dense; for an allreduce they are one tensor."""

    kind: str
    team: Group
    x: ReadRegister
    out: WrittenRegister
    handle: Start


@dataclass(frozen=True)
class MessagesOp(Op):
    """Sends and receives: pairs of the register of a tensor and the rank to which it goes or from which it comes.

    If `collective`, it is this rank's side of a transfer between meshes, ordered with the collectives of the team. Else
    it is ordered with this rank's other messages only: collectives and messages do not wait for each other.
    """

    team: Group
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    collective: bool
    handle: Start

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple([register for register, _ in self.sends])

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple([register for register, _ in self.receives])


@dataclass(frozen=True)
class MarkOp(Op):
    """Marks the end of a communication within this rank alone, which ran on `stream`, for other streams to wait for."""

    handle: Start


@dataclass(frozen=True)
class WaitOp(Op):
    """The stream waits for a communication."""

    handle: Await


@dataclass(frozen=True)
class SynchronizeOp(Op):
    """The stream waits for all work issued to the stream `other` so far."""

    other: Join

    in_graph = False


@dataclass(frozen=True)
class DelayOp(Op):
    """The stream pauses."""

    microseconds: int

    @property
    def needs_sms(self) -> bool:
        return True


class RegisterView(NamedTuple):
    """A tensor: the register of its buffer, and its layout there, in elements."""

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def dense(self) -> bool:
        return is_dense(self.shape, self.strides)

    @property
    def extent(self) -> ElementRange:
        if 0 in self.shape:
            return self.offset, self.offset
        steps = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        return self.offset, self.offset + sum(steps) + 1

    def index_in(self, whole: RegisterView) -> int | None:
        """Return the i for which this is `whole[i]`, or None."""
        if self.shape != whole.shape[1:] or self.strides != whole.strides[1:] or not whole.shape:
            return None
        index, rest = divmod(self.offset, max(whole.strides[0], 1))
        return index if rest == 0 and index < whole.shape[0] else None


@dataclass(frozen=True)
class UnrolledProgram:
    """A rank's flat program: operations in issue order, and the registers of a call's tensors.

    Fields:
        sizes: the values of the program's symbols.
        inputs: the registers of its inputs, consecutive.
        outputs: the registers of its outputs, NONE where this rank holds none.
        buffers: for each register, the register of the buffer that it is a view of; NONE for a handle.
        layouts: the layout of each register that holds a tensor, except inputs that this rank does not hold.
        dtypes: the dtype of each buffer, by its register.
        allocated: the operations that allocate a buffer in every run, by its register.
        symmetric: the operations that provide symmetric buffers, this rank's and its peers', by register.
    """

    program: Program
    rank: int
    sizes: Mapping[str, int]
    ops: tuple[Op, ...]
    inputs: range
    outputs: tuple[int, ...]
    buffers: tuple[int, ...]
    layouts: Mapping[int, RegisterView]
    dtypes: Mapping[int, DType]
    allocated: Mapping[int, AllocateOp]
    symmetric: Mapping[int, SymmetricOp]

    @cached_property
    def order(self) -> RankOrder:
        """Who comes before whom on the rank's streams."""
        return RankOrder(self.ops)

    @cached_property
    def extents(self) -> Mapping[int, ElementRange]:
        """The extent of each tensor within its buffer, from its first element to its last, gaps included."""
        return {register: layout.extent for register, layout in self.layouts.items()}

    @property
    def memory(self) -> tuple[int, int]:
        """The bytes of all buffers that a run allocates, and the bytes of this rank's symmetric buffers."""
        return _bytes(self.allocated.values()), _bytes(op for op in self.symmetric.values() if op.rank == self.rank)

    def owner(self, register: int) -> int:
        """Return the rank whose memory a register's tensor is in."""
        op = self.symmetric.get(self.buffers[register])
        return self.rank if op is None else op.rank

    def tensors(self, op: Op) -> tuple[int, ...]:
        """Return the registers of the tensors that an operation reads or writes, without flags."""
        flags = {register for register, *_ in (*op.raised_flags, *op.awaited_flags)}
        return tuple([register for register in (*op.reads, *op.writes) if register not in flags])

    def flag_name(self, flags: int, slot: int) -> str:
        """Return a flag as a program would name it, for messages; `flags` is a register."""
        layout = self.layouts[flags]
        return f"%{self.symmetric[layout.buffer].name}[{layout.offset + slot * layout.strides[0]}]"

    def touches_peer(self, op: Op) -> bool:
        """Whether an operation of this reads or writes a peer's memory directly, flags included."""
        return id(op) in self._touching

    @cached_property
    def _touching(self) -> frozenset[int]:
        theirs = {x for x in range(len(self.buffers)) if self.owner(x) != self.rank}
        return frozenset(id(op) for op in self.ops if op.of_team or not theirs.isdisjoint((*op.reads, *op.writes)))

    def text(self, op: Op) -> str:
        """Return the statement of an operation, in one line."""
        return format_statement(op.place.statement, self.program).strip()

    def describe(self, op: Op) -> str:
        """Return the statement of an operation with its round in each loop, for a message."""
        rounds = ", ".join(map(str, op.place.rounds))
        return f"'{self.text(op)}'" + (f" in round {rounds}" if rounds else "")

    def failure(self, op: Op, problem: BaseException) -> HostIRError:
        """Return the error for an operation that raised: rank, statement, source line and cause."""
        known = isinstance(problem, HostIRError)
        what = str(problem).removeprefix("error: ") if known else f"{type(problem).__name__}: {problem}"
        return op.place.statement.fail(f"rank {self.rank}, {self.describe(op)}: {what}")


def _bytes(buffers: Iterable[AllocateOp | SymmetricOp]) -> int:
    return sum(prod(op.shape) * op.dtype.bytes for op in buffers)


def overlap(one: ElementRange, others: Iterable[ElementRange]) -> bool:
    """Whether an extent shares an element with one of the others."""
    low, high = one
    return any(low < end and start < high for start, end in others)


# Teams ------------------------------------------------------------------------------------------------------------
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


# Unrolling ------------------------------------------------------------------------------------------------------------
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
