"""Unroll a program for one rank and one set of shapes: flat operations in the order of issue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from hostir.ir.comm_ops import MESSAGES
from hostir.ir.interpret import Observer, interpret
from hostir.ir.machine import Exchange, Ready
from hostir.ir.op import Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.source import HostIRError, error
from hostir.ir.types import FLAG, DType
from hostir.runtime.kernels.table import REPEATABLE, Kernel, repeating
from hostir.runtime.sharding import torch_dtype

# Operations -----------------------------------------------------------------------------------------------------------
# A program unrolled for one rank and one set of shapes is a list of operations in issue order.
#
# Names, loops, indices and sizes are gone: operations on numbered registers are left, each knowing the statement it
# came from. `unroll` makes them. The machines bind them to closures over one list of registers, and a run is
# those closures called one after another.

CALLER = -1  # the caller's stream; the pool's are 0, 1, ...
NONE = 0  # the register that always holds None

# A flag is one integer, so that setting and waiting are single operations: the number of the call, from 1, in the
# upper half, and the epoch of that call in the lower. It rises from epoch to epoch and from call to call, whichever of
# an executor's plans they run; 2^31 calls of 2^32 epochs are more than anyone will make.
FLAGS = torch.int64
EPOCHS = 1 << 32


def flag_value(call: int, epoch: int) -> int:
    """Return the value of a flag that has reached an epoch of a call."""
    return call * EPOCHS + epoch


@dataclass(frozen=True)
class StatementPlace:
    """A statement, and the indices of the loops around it, outermost first."""

    statement: Statement
    rounds: tuple[int, ...]


# Operations -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Op:
    """One operation. `stream` is the stream that is current where it is issued."""

    place: StatementPlace
    stream: int


@dataclass(frozen=True)
class AllocateOp(Op):
    """`registers[out]` becomes a dense uninitialised tensor, unless the caller's tensor for an output is there."""

    out: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SymmetricOp(Op):
    """`registers[out]` becomes `rank`'s buffer of those that ranks allocate under one name in one round.

    It is dense, belongs to the executor, and is the same in every run with these sizes. Flags are int64.
    """

    out: int
    name: str
    rounds: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int


@dataclass(frozen=True)
class ViewOp(Op):
    """`registers[out]` becomes a view of the buffer `x`; `offset` counts elements from the buffer's first.

    Where the view is `x[index]`, `index` says so: torch makes such a view in two thirds of the time.
    """

    out: int
    x: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    index: int | None


def index_of(whole: torch.Tensor, view: torch.Tensor) -> int | None:
    """Return the i for which the view is `whole[i]`, or None."""
    if view.shape != whole.shape[1:] or view.stride() != whole.stride()[1:] or not whole.ndim:
        return None
    index, rest = divmod(int(view.storage_offset()), max(int(whole.stride(0)), 1))
    return index if rest == 0 and index < whole.shape[0] else None


@dataclass(frozen=True)
class FreeOp(Op):
    """The buffer and all its views are freed."""

    buffer: int


@dataclass(frozen=True)
class ComputeOp(Op):
    """Kernel `kind` writes `out`.

    With `ready`, whose flags and own rows are registers, it computes each block of rows once that block's flag is set.
    """

    kind: str
    out: int
    operands: tuple[int, ...]
    options: Mapping[str, Any]
    ready: Ready | None = None

    @property
    def touches(self) -> tuple[int, ...]:
        """The registers that it reads or writes."""
        own = () if self.ready is None or self.ready.own is None else (self.ready.own,)
        return self.out, *self.operands, *own


@dataclass(frozen=True)
class CopyOp(Op):
    """`out` becomes `x`: by copy engine if `sms` is 0, else by a kernel on so many SMs. One may be a peer's memory."""

    x: int
    out: int
    sms: int = 0


@dataclass(frozen=True)
class SignalOp(Op):
    """Element `slot` of `flags`, which are those of `peer`, is set to an epoch of this call.

    The stream itself sets it if `sms` is 0, else a kernel on so many SMs.
    """

    flags: int
    slot: int
    epoch: int
    peer: int
    sms: int = 0


@dataclass(frozen=True)
class WaitSignalOp(Op):
    """The stream waits until element `slot` of this rank's `flags` has reached an epoch of this call."""

    flags: int
    slot: int
    epoch: int


@dataclass(frozen=True)
class BarrierOp(Op):
    """The stream waits for the ranks of a team at their barriers of this number, counted in every call."""

    team: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class CollectiveOp(Op):
    """A communication of the whole team. `x` and `out` are dense, and the same memory for an allreduce."""

    kind: str
    team: tuple[int, ...]
    x: int
    out: int
    handle: int


@dataclass(frozen=True)
class MessagesOp(Op):
    """Sends and receives of pieces: pairs of a register and a rank.

    If `collective`, it is one rank's side of a transfer between meshes, ordered with the collectives of the team. Else
    it is ordered with this rank's other messages only, and collectives and messages do not wait for each other.
    """

    team: tuple[int, ...]
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    collective: bool
    handle: int


@dataclass(frozen=True)
class MarkOp(Op):
    """The end of a communication that stayed within the rank, on its own stream: other streams wait for it."""

    handle: int


@dataclass(frozen=True)
class WaitOp(Op):
    """The stream waits for a communication."""

    handle: int


@dataclass(frozen=True)
class SynchronizeOp(Op):
    """The stream waits for all work issued to the stream `other` so far."""

    other: int


@dataclass(frozen=True)
class DelayOp(Op):
    """The stream pauses."""

    microseconds: int


@dataclass(frozen=True)
class UnrolledProgram:
    """A rank's flat program: operations in issue order, and the registers of a call's tensors.

    Fields:
        sizes: the values of its symbols.
        inputs: the registers of the program's inputs, consecutive.
        outputs: the registers of its outputs, NONE where this rank holds none.
        buffers: for each register the register of the buffer behind it, NONE for a handle.
    """

    program: Program
    rank: int
    sizes: Mapping[str, int]
    ops: tuple[Op, ...]
    inputs: range
    outputs: tuple[int, ...]
    buffers: tuple[int, ...]

    @property
    def memory(self) -> tuple[int, int]:
        """The bytes that a run allocates, over all its buffers, and the bytes of this rank's symmetric memory."""
        mine = [op for op in self.ops if isinstance(op, SymmetricOp) and op.rank == self.rank]
        return _bytes(op for op in self.ops if isinstance(op, AllocateOp)), _bytes(mine)

    def text(self, op: Op) -> str:
        """Return the statement of an operation, in one line."""
        return format_statement(op.place.statement, self.program).strip()

    def describe(self, op: Op) -> str:
        """Return the statement of an operation with its round in each loop, for a message."""
        rounds = ", ".join(map(str, op.place.rounds))
        return f"'{self.text(op)}'" + (f" in round {rounds}" if rounds else "")

    def failure(self, op: Op, problem: BaseException) -> HostIRError:
        """Return the error for an operation that raised: rank, statement, source line and cause."""
        what = str(problem) if isinstance(problem, HostIRError) else f"{type(problem).__name__}: {problem}"
        return op.place.statement.fail(f"rank {self.rank}, {self.describe(op)}: {what}")


def _bytes(buffers: Iterable[AllocateOp | SymmetricOp]) -> int:
    return sum(prod(op.shape) * op.dtype.itemsize for op in buffers)


# Teams ------------------------------------------------------------------------------------------------------------
def teams_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the members, ascending, of every team of two or more ranks that communicates, in program order.

    The order is the same on every rank: process groups and the like are made in this order everywhere.
    """
    teams = (team for statement in program.walk() if statement.collective for team in statement.teams)
    return tuple(dict.fromkeys(team for team in teams if len(team) > 1))


def message_teams_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Do as `teams_of`, for the teams whose ranks send each other messages."""
    teams = (team for statement in program.walk() if not statement.collective for team in statement.teams)
    return tuple(dict.fromkeys(team for team in teams if len(team) > 1))


# Binding ----------------------------------------------------------------------------------------------------------
Step = Callable[[], object]


def bind(
    op: AllocateOp | ViewOp | ComputeOp, registers: list[Any], device: torch.device, kernels: Mapping[str, Kernel]
) -> Step:
    """Return the closure that runs an operation that is the same on every machine."""
    if isinstance(op, AllocateOp):
        return _bind_allocate(op, registers, device)
    if isinstance(op, ViewOp):
        return _bind_view(op, registers)
    return _bind_compute(op, registers, kernels[op.kind])


def _bind_allocate(op: AllocateOp, registers: list[Any], device: torch.device) -> Step:
    out, shape, dtype, empty = op.out, op.shape, op.dtype, torch.empty

    def step() -> None:
        if registers[out] is None:  # else it is an output, and the caller gave a tensor for it
            registers[out] = empty(shape, dtype=dtype, device=device)

    return step


def _bind_view(op: ViewOp, registers: list[Any]) -> Step:
    out, x, shape, stride, offset, index = op.out, op.x, op.shape, op.stride, op.offset, op.index

    def item() -> None:
        registers[out] = registers[x][index]

    def strided() -> None:
        buffer = registers[x]  # an input may start anywhere in its own storage
        registers[out] = buffer.as_strided(shape, stride, buffer.storage_offset() + offset)

    return strided if index is None else item


def _bind_compute(op: ComputeOp, registers: list[Any], kernel: Kernel) -> Step:
    out, operands, options = op.out, op.operands, dict(op.options)
    if kernel in REPEATABLE:
        multiply = repeating(kernel, **options)
        return lambda: multiply(registers[out], *[registers[i] for i in operands])
    if options or len(operands) > 2:
        return lambda: kernel(registers[out], *[registers[i] for i in operands], **options)
    if len(operands) == 2:
        x, y = operands
        return lambda: kernel(registers[out], registers[x], registers[y])
    (x,) = operands
    return lambda: kernel(registers[out], registers[x])


# Extents of registers -------------------------------------------------------------------------------------------------
# The extent of each register in its buffer: from its first element to its last, gaps included.

Extent = tuple[int, int]  # elements of a buffer, from the first to the one behind the last


def extents(unrolled: UnrolledProgram) -> dict[int, Extent]:
    """Return the extents, within their buffers, of a program's buffers, peers' symmetric ones, and views."""
    found: dict[int, Extent] = {}
    for op in unrolled.ops:
        if isinstance(op, AllocateOp | SymmetricOp):
            found[op.out] = 0, prod(op.shape)
        elif isinstance(op, ViewOp):
            last = sum((size - 1) * stride for size, stride in zip(op.shape, op.stride, strict=True))
            found[op.out] = op.offset, op.offset + (last + 1 if prod(op.shape) else 0)
    return found


def overlap(one: Extent, others: Iterable[Extent]) -> bool:
    """Whether an extent shares an element with one of the others."""
    low, high = one
    return any(low < end and start < high for start, end in others)


# Copies by one kernel -------------------------------------------------------------------------------------------------
# Runs of copies by SMs, with the signals between them, that one kernel carries out on CUDA.

HOST = (AllocateOp, SymmetricOp, ViewOp)  # the device does nothing for these


@dataclass(frozen=True)
class Pushes:
    """Consecutive copies on a stream, of one size and from one buffer, each with the signal directly after it.

    They may run at the same time: none writes what another reads or writes.

    Fields:
        copies: in order, each with its signal, or None if it has none.
        ops: all of them, in issue order.
    """

    copies: tuple[tuple[CopyOp, SignalOp | None], ...]
    ops: tuple[Op, ...]

    @property
    def sms(self) -> int:
        return self.copies[0][0].sms

    @classmethod
    def of(cls, unrolled: UnrolledProgram) -> list[Pushes]:
        """Return all such runs of a program, each as long as possible."""
        views = {op.out: op.shape for op in unrolled.ops if isinstance(op, ViewOp)}
        at = extents(unrolled)
        runs: list[_Run] = []
        run: _Run | None = None
        for op in unrolled.ops:
            if isinstance(op, HOST):
                continue
            if isinstance(op, CopyOp) and op.sms:
                if run is None or not run.takes(op):
                    run = _Run(unrolled.buffers, views, at)
                    runs.append(run)
                run.add(op)
            elif run is not None and isinstance(op, SignalOp) and run.takes_signal(op):
                run.ops.append(op)
            else:
                run = None
        return [_paired(each.ops) for each in runs]


@dataclass
class _Run:
    """A run of copies and signals under construction.

    Fields:
        buffers, shapes, at: of registers: their buffers, the shapes of views, where in its buffer each lies.
        ops: so far.
        read, written: by buffer, what the copies touch.
    """

    buffers: Sequence[int]
    shapes: Mapping[int, tuple[int, ...]]
    at: Mapping[int, Extent]
    ops: list[Op] = field(default_factory=list)
    read: dict[int, list[Extent]] = field(default_factory=dict)
    written: dict[int, list[Extent]] = field(default_factory=dict)

    def takes(self, op: CopyOp) -> bool:
        """Whether a copy is of the same kind as the first, and may run at the same time as the others."""
        first, x, out = self.ops[0], self.buffers[op.x], self.buffers[op.out]
        assert isinstance(first, CopyOp)
        alike = op.stream == first.stream and op.sms == first.sms and x == self.buffers[first.x]
        if not alike or self.shapes.get(op.x) != self.shapes.get(first.x):
            return False
        touched = [*self.read.get(out, ()), *self.written.get(out, ())]
        return not overlap(self.at[op.out], touched) and not (
            x in self.written and overlap(self.at[op.x], self.written[x])
        )

    def add(self, op: CopyOp) -> None:
        self.ops.append(op)
        for register, touched in ((op.x, self.read), (op.out, self.written)):
            if register in self.at:  # inputs, which nothing writes, are not
                touched.setdefault(self.buffers[register], []).append(self.at[register])

    def takes_signal(self, op: SignalOp) -> bool:
        """Whether a signal is sent by the stream itself, directly after a copy."""
        return not op.sms and isinstance(self.ops[-1], CopyOp) and self.ops[-1].stream == op.stream


def _paired(run: Sequence[Op]) -> Pushes:
    following = [*run[1:], None]
    pairs = [
        (op, after if isinstance(after, SignalOp) else None)
        for op, after in zip(run, following, strict=True)
        if isinstance(op, CopyOp)
    ]
    return Pushes(tuple(pairs), tuple(run))


def room(ops: Sequence[Op], ordered: int, stream: int) -> dict[str, int]:
    """Return the SMs that a kernel issued to a stream now does not get: the fields of `Ready` by name.

    Args:
        ops: the operations before it in the call.
        ordered: how many of them there were when a statement last ordered a stream.
        stream: its own.
    """
    reserved = any(isinstance(op, SignalOp) and op.sms for op in ops)
    return {"overlapped_sms": _copying(ops[ordered:], stream), "reserved_sms": int(reserved)}


def _copying(ops: Sequence[Op], stream: int) -> int:
    """Return the number of SMs of the copies that may still run when the next operation starts on the stream, or 0."""
    latest = (op for op in reversed(ops) if not isinstance(op, HOST))
    last = next(latest, None)
    if isinstance(last, SignalOp) and not last.sms and last.stream == stream:
        last = next(latest, None)
    return last.sms if isinstance(last, CopyOp) and last.stream == stream else 0


# Unrolling ------------------------------------------------------------------------------------------------------------
# The interpreter's machine that records operations, for one rank and one set of shapes, instead of running them.
#
# Views cost nothing until something uses them: a chain of select, chunk and reshape becomes one strided view of its
# buffer, and the same view is made once a run.

COLLECTIVES = ("allgather", "allreduce", "reduce_scatter", "alltoall")


def unroll(
    program: Program, rank: int, sizes: Mapping[str, int], inputs: Sequence[torch.Tensor | None]
) -> UnrolledProgram:
    """Unroll a program for one rank and for inputs like these.

    Only the inputs' shapes, strides and dtypes count. Raises HostIRError if the program asks for what no machine can
    do: a stream outside the pool, a view that needs a copy, a communication of memory that is not dense or that nothing
    waits for, a use after free, a peer's memory that is not symmetric.
    """
    unroller = Unroller(program, rank, sizes)
    outputs = interpret(program, unroller, sizes, unroller.take(inputs), unroller)
    return unroller.finish(inputs, outputs)


@dataclass(frozen=True)
class RegisterView:
    """A tensor while unrolling: the register of its buffer, and its layout as a tensor without data."""

    buffer: int
    meta: torch.Tensor


@dataclass(frozen=True)
class StreamValue:
    """A stream value, as returned by `current_stream`."""

    number: int


@dataclass
class Flight:
    """A communication while unrolling."""

    handle: int
    op: Op
    waited: bool = False


@dataclass
class Unroller(Observer):
    """The machine that records operations instead of running them."""

    program: Program
    rank: int
    sizes: Mapping[str, int]
    ops: list[Op] = field(default_factory=list)
    buffers: list[int] = field(default_factory=lambda: [NONE])
    freed: set[int] = field(default_factory=set)
    owned: set[int] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    stream: int = CALLER

    def __post_init__(self) -> None:
        self.metas: dict[int, torch.Tensor] = {}
        self.names: dict[int, str] = {}  # of buffers
        self.symmetric: dict[int, SymmetricOp] = {}  # by buffer
        self.homes: dict[tuple[str, tuple[int, ...], int], int] = {}  # by name, round and rank: a symmetric buffer
        self.barriers: dict[tuple[int, ...], int] = {}  # of each team: how many there were
        self.views: dict[tuple[Any, ...], int] = {}
        self.marked: set[int] = set()  # handles of Marks that another stream waits for
        self.ordered = 0  # how many operations there were when a statement last ordered a stream, perhaps without one
        self.alone: Flight | None = None  # the latest message of this rank to itself, in a team of one

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.place = StatementPlace(statement, rounds)

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        return self.place.statement.fail(message, expected=expected, hint=hint)

    def fail_layout(self, x: RegisterView, message: str, expected: str) -> HostIRError:
        """Return an error for a tensor's layout; it names the input if the tensor is a view of one not dense."""
        if x.buffer > len(self.program.inputs) or self.metas[x.buffer].is_contiguous():
            return self.fail(message, expected=expected, hint="copy it to a buffer of its own first")
        value, meta = self.program.inputs[x.buffer - 1], self.metas[x.buffer]
        shape, strides = list(meta.shape), list(meta.stride())
        return error(
            f"input {value} of rank {self.rank} is not contiguous: shape {shape}, strides {strides}",
            value.span,
            hint=f"pass {value.name}.contiguous(), or have the program read '%{value.name}_dense = dense {value}'",
            notes=((self.place.statement.span, message),),
        )

    def take(self, inputs: Sequence[torch.Tensor | None]) -> list[RegisterView | None]:
        """Return a tensor for each input of a call."""
        parts: list[RegisterView | None] = []
        for value, x in zip(self.program.inputs, inputs, strict=True):
            buffer = self.new_register()
            self.names[buffer] = value.name
            parts.append(None if x is None else self.whole(buffer, _like(x)))
        return parts

    # The machine protocol -----------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> RegisterView:
        name = next((v.name for v in self.place.statement.named), "")
        if not symmetric:
            part = self.buffer(shape, torch_dtype(dtype))
            self.names[part.buffer] = name
            return part
        kind = FLAGS if dtype == FLAG else torch_dtype(dtype)
        part = self.home(name, self.place.rounds, self.rank, shape, kind)
        if part.meta.shape != shape or part.meta.dtype != kind:
            raise self.fail(f"%{name} had another shape before", expected="one shape on all ranks, in every call")
        return part

    def free(self, x: RegisterView) -> None:
        self.check_held(x)
        self.freed.add(x.buffer)
        if x.buffer in self.owned:
            self.emit(FreeOp, buffer=x.buffer)

    def select(self, x: RegisterView, axis: int, index: int) -> RegisterView:
        return RegisterView(x.buffer, x.meta.select(axis, index))

    def chunk(self, x: RegisterView, axis: int, outer: int, count: int, index: int) -> RegisterView:
        shape = x.meta.shape
        cut = self.view(x, (*shape[:axis], outer, count, shape[axis] // (outer * count), *shape[axis + 1 :]))
        piece = RegisterView(x.buffer, cut.meta.select(axis + 1, index))
        return self.view(piece, (*shape[:axis], shape[axis] // count, *shape[axis + 1 :]))

    def reshape(self, x: RegisterView, shape: tuple[int, ...]) -> RegisterView:
        return self.view(x, shape)

    def permute(self, x: RegisterView, axes: tuple[int, ...]) -> RegisterView:
        return RegisterView(x.buffer, x.meta.permute(axes))

    def dense(self, x: RegisterView) -> RegisterView:
        if x.meta.is_contiguous():
            return x
        copy = self.buffer(tuple(x.meta.shape), x.meta.dtype)
        self.emit(ComputeOp, kind="copy", out=copy.buffer, operands=(self.register(x),), options={})
        return copy

    def compute(
        self,
        kind: str,
        out: RegisterView,
        operands: Sequence[RegisterView | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
    ) -> None:
        if ready is not None:
            flags, own = self.register(self.at_rank(ready.flags, self.rank)), ready.own
            ready = replace(ready, flags=flags, own=None if own is None else self.register(own))
            self.check_epoch(ready.epoch)
        registers, target = tuple(map(self.register, operands)), self.register(out)
        if ready is not None:
            ready = replace(ready, **room(self.ops, self.ordered, self.stream))
        self.emit(ComputeOp, kind=kind, out=target, operands=registers, options=options, ready=ready)

    def communicate(self, exchange: Exchange, x: RegisterView | None, out: RegisterView | None) -> Flight:
        for part, what in ((x, "sends"), (out, "fills")):
            if part is not None:
                self.check_dense(part, f"the tensor that {exchange.kind} {what} is not dense")
        if exchange.kind not in COLLECTIVES:
            return self.messages(exchange, x, out)
        if len(exchange.team) == 1 or exchange.kind == "allreduce":
            self.copy_here(x, out)
        if len(exchange.team) == 1:
            return self.start(MarkOp)
        source = self.register(out if exchange.kind == "allreduce" else x)
        return self.start(CollectiveOp, kind=exchange.kind, team=exchange.team, x=source, out=self.register(out))

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
            self.emit(SynchronizeOp, other=other)

    def delay(self, microseconds: int) -> None:
        self.emit(DelayOp, microseconds=microseconds)

    def copy(self, x: RegisterView, out: RegisterView, source: int, target: int, sms: int = 0) -> None:
        for part in (x, out) if sms else ():
            self.check_dense(part, "SMs copy between dense tensors")
        x = x if source == self.rank else self.at_rank(x, source)
        out = out if target == self.rank and not sms else self.at_rank(out, target)
        self.emit(CopyOp, x=self.register(x), out=self.register(out), sms=sms)

    def signal(self, flags: RegisterView, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        self.check_epoch(epoch)
        self.emit(SignalOp, flags=self.register(self.at_rank(flags, peer)), slot=slot, epoch=epoch, peer=peer, sms=sms)

    def wait_signal(self, flags: RegisterView, slot: int, epoch: int) -> None:
        self.check_epoch(epoch)
        self.emit(WaitSignalOp, flags=self.register(self.at_rank(flags, self.rank)), slot=slot, epoch=epoch)

    def barrier(self, team: tuple[int, ...]) -> None:
        number = self.barriers.get(team, 0)
        self.barriers[team], self.ordered = number + 1, len(self.ops)
        if len(team) > 1:
            self.emit(BarrierOp, team=team, number=number)

    # Registers ----------------------------------------------------------------------------------------------------
    def emit(self, op: type[Op], /, **fields: Any) -> Op:
        self.ops.append(op(self.place, self.stream, **fields))
        return self.ops[-1]

    def new_register(self, buffer: int = NONE) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> RegisterView:
        buffer = self.new_register()
        self.owned.add(buffer)
        self.emit(AllocateOp, out=buffer, shape=shape, dtype=dtype)
        return self.whole(buffer, torch.empty(shape, dtype=dtype, device="meta"))

    def home(
        self, name: str, rounds: tuple[int, ...], rank: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> RegisterView:
        """Return a rank's symmetric buffer; its first use adds an operation that provides it."""
        place = name, rounds, rank
        if place in self.homes:
            return RegisterView(self.homes[place], self.metas[self.homes[place]])
        buffer = self.homes[place] = self.new_register()
        self.names[buffer] = name
        op = SymmetricOp(self.place, self.stream, buffer, name, rounds, shape, dtype, rank)
        self.symmetric[buffer] = op
        self.ops.append(op)
        return self.whole(buffer, torch.empty(shape, dtype=dtype, device="meta"))

    def at_rank(self, x: RegisterView, rank: int) -> RegisterView:
        """Return the same view of a rank's buffer. Raises for a view of memory that is not symmetric."""
        own, name = self.symmetric.get(x.buffer), self.names[x.buffer]
        if own is None:
            raise self.fail(f"%{name} is not symmetric", expected="a view of what allocate_symmetric gives")
        return RegisterView(self.home(own.name, own.rounds, rank, own.shape, own.dtype).buffer, x.meta)

    def check_dense(self, x: RegisterView, message: str) -> None:
        if not x.meta.is_contiguous():
            expected = f"the strides of a dense {list(x.meta.shape)}, not {list(x.meta.stride())}"
            raise self.fail_layout(x, message, expected)

    def check_epoch(self, epoch: int) -> None:
        if epoch >= EPOCHS:
            raise self.fail(f"epoch {epoch} of a flag", expected=f"at most {EPOCHS - 1}")

    def whole(self, buffer: int, meta: torch.Tensor) -> RegisterView:
        """Allocate a new buffer, and return it as a tensor."""
        self.buffers[buffer] = buffer
        self.metas[buffer] = meta
        self.views[_key(buffer, meta)] = buffer
        return RegisterView(buffer, meta)

    def register(self, x: RegisterView | None) -> int:
        """Return the register of a tensor; add a view operation if it has none yet."""
        if x is None:
            return NONE
        self.check_held(x)
        key = _key(x.buffer, x.meta)
        if key not in self.views:
            self.views[key] = self.new_register(x.buffer)
            _, shape, stride, offset = key
            index = index_of(self.metas[x.buffer], x.meta)
            self.emit(ViewOp, out=self.views[key], x=x.buffer, shape=shape, stride=stride, offset=offset, index=index)
        return self.views[key]

    def check_held(self, x: RegisterView) -> None:
        if x.buffer in self.freed:
            raise self.fail("the memory of an operand was freed earlier", hint="free it after its last use, and once")

    def view(self, x: RegisterView, shape: tuple[int, ...]) -> RegisterView:
        try:
            return RegisterView(x.buffer, x.meta.view(shape))
        except RuntimeError:
            old, strides = list(x.meta.shape), list(x.meta.stride())
            seen = f"shape {old} with strides {strides} cannot be seen as {list(shape)}"
            raise self.fail_layout(x, seen, "memory that lies in the order of the new shape") from None

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

    def start(self, op: type[Op], /, **fields: Any) -> Flight:
        handle = self.new_register()
        self.flights.append(Flight(handle, self.emit(op, handle=handle, **fields)))
        return self.flights[-1]

    def follow(self, handle: Flight) -> None:
        """Make the current stream wait for a communication."""
        self.ordered = len(self.ops)
        if isinstance(handle.op, MarkOp):
            if handle.op.stream == self.stream:
                return
            self.marked.add(handle.handle)
        self.emit(WaitOp, handle=handle.handle)

    def copy_here(self, x: RegisterView | None, out: RegisterView | None) -> None:
        """Add a copy between dense tensors of equal size; none if they are the same memory."""
        source, target = self.register(self.block(x, 0, 1)), self.register(self.block(out, 0, 1))
        if source != target:
            self.emit(ComputeOp, kind="copy", out=target, operands=(source,), options={})

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
            pieces = {"sends": tuple(sends), "receives": tuple(receives)}
            return self.start(MessagesOp, team=exchange.team, **pieces, collective=collective)
        flight = self.start(MarkOp)
        if not collective:
            self.alone = flight
        return flight

    def block(self, x: RegisterView | None, index: int, count: int) -> RegisterView:
        assert x is not None
        size, rest = divmod(x.meta.numel(), count)
        if rest:
            raise self.fail(f"{x.meta.numel()} elements do not divide in {count} blocks")
        return RegisterView(x.buffer, x.meta.view(-1).narrow(0, index * size, size))

    def finish(self, inputs: Sequence[torch.Tensor | None], outputs: Sequence[RegisterView | None]) -> UnrolledProgram:
        if flight := next((f for f in self.flights if not f.waited), None):
            raise flight.op.place.statement.fail(
                "nothing waits for this communication", hint="add 'wait' with its handle before the result is read"
            )
        self.stream = CALLER
        registers = tuple(self.register(self.callers(x)) for x in outputs)
        held = range(1, 1 + len(inputs))
        ops = tuple(op for op in self.ops if not isinstance(op, MarkOp) or op.handle in self.marked)
        return UnrolledProgram(self.program, self.rank, self.sizes, ops, held, registers, tuple(self.buffers))

    def callers(self, x: RegisterView | None) -> RegisterView | None:
        """Return an output that the caller may own: a copy if it is symmetric, as the next call reuses that."""
        if x is None or x.buffer not in self.symmetric:
            return x
        self.place = self.symmetric[x.buffer].place
        taken = self.buffer(tuple(x.meta.shape), x.meta.dtype)
        self.emit(ComputeOp, kind="copy", out=taken.buffer, operands=(self.register(x),), options={})
        return taken


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _key(buffer: int, meta: torch.Tensor) -> tuple[Any, ...]:
    return buffer, tuple(meta.shape), meta.stride(), meta.storage_offset()
