"""The operations of an unrolled program: one dataclass for each type of operation.

`unroll` turns a program into a list of operations, for one rank and one set of shapes. The operations are in the order
in which the rank issues them. They have no names, loops, indices or symbols. They refer to tensors by the numbers of
registers, and each operation knows its statement. A machine turns each operation into a closure. The closures share one
list of registers, and a run calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import get_annotations
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

from hostir.ir.machine import Done, Ready
from hostir.ir.op import Statement
from hostir.ir.types import DType

NONE = 0  # the register that always holds None
CALLER = -1  # the caller's stream; the streams of the pool are 0, 1, ...

# A flag of a CPU process is one integer, so that setting it and reading it are single operations. The upper half is the
# number of the call, from 1; the lower half is the epoch within that call. The value rises from epoch to epoch and from
# call to call, over all plans that share the flag. 2^31 calls of 2^32 epochs are more than anyone will make.
EPOCHS = 1 << 32


def flag_value(call: int, epoch: int) -> int:
    """Return the integer that a flag of a CPU process holds when it has reached an epoch of a call."""
    return call * EPOCHS + epoch


class StatementPlace(NamedTuple):
    """A statement, and the indices of the loops around it, with the outermost loop first."""

    statement: Statement
    rounds: tuple[int, ...]


ElementRange = tuple[int, int]  # a range of elements of a buffer: the first index, and the index after the last
FlagUse = tuple[int, int, int]  # register of flags, slot, epoch

# Types of fields. A field's type says what an operation does with the register, handle, stream or ranks in the field.
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
    """One operation of an unrolled program.

    Analyses ask for the traits of an operation instead of its class. Most traits follow from the types of the fields.

    Fields:
        place: the statement of the operation, and its round in each loop.
        stream: the stream to which the operation is issued.

    Traits:
        defines: the register that it sets to a tensor. Such an operation runs on the host only.
        frees: the register of the buffer that it frees.
        reads, writes: the registers of the tensors that it reads and writes. A communication may access its tensors
            until a stream has waited for it.
        joins: the stream that its stream waits for; None if it waits for no stream.
        starts: the handle of the communication that it starts.
        awaits: the handle of the communication that it waits for.
        raised_flags: the flags that it sets.
        awaited_flags: the flags that its stream or its kernel waits for.
        by_group: the ranks that run it together through a process group.
        of_team: the ranks that it signals and waits for, with flags that the machine adds.
        in_graph: True if it becomes a node of a CUDA graph.
        needs_sms: True if it runs on SMs, at least on some machines.
        starts_early: True if it may start before the previous operation on its stream has ended.
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
        """Define the traits of a class that follow from the types of its fields.

        Keep traits that the class itself defines.
        """
        fields = {str(annotation): name for name, annotation in get_annotations(cls).items()}
        for annotation, trait in TRAITS.items():
            if annotation in fields and trait not in vars(cls):
                setattr(cls, trait, property(attrgetter(fields[annotation])))
        for annotation, trait in (("ReadRegister", "reads"), ("WrittenRegister", "writes")):
            if annotation in fields and trait not in vars(cls):
                setattr(cls, trait, property(_tuple_of(fields[annotation])))

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
        """The name of the row in which a trace shows the operation."""
        if self.by_group:
            return f"communication {self.by_group}"
        return "caller" if self.stream == CALLER else f"stream {self.stream}"


def _tuple_of(field: str) -> Callable[[Op], tuple[int, ...]]:
    return lambda op: (getattr(op, field),)


@dataclass(frozen=True)
class AllocateOp(Op):
    """Sets `registers[out]` to a new dense tensor without initial values, or to the caller's tensor for this output."""

    out: DefinedRegister
    shape: tuple[int, ...]
    dtype: DType

    in_graph = False


@dataclass(frozen=True)
class SymmetricOp(Op):
    """Sets `registers[out]` to a symmetric buffer in the memory of `rank`, which may be this rank or a peer.

    The buffer is dense. Every run with the same sizes uses the same buffer. `name` is its name in the program. If the
    buffer is allocated in a loop, each round has a separate buffer, and `rounds` holds the indices of the loops.
    """

    out: DefinedRegister
    name: str
    rounds: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: DType
    rank: int

    @property
    def home(self) -> tuple[str, tuple[int, ...]]:
        """The name and the rounds of the buffer. The two identify it on every rank."""
        return self.name, self.rounds


@dataclass(frozen=True)
class ViewOp(Op):
    """Sets `registers[out]` to a view of the buffer in register `x`. The view begins at element `offset`.

    `index` is i if the view is `x[i]`; otherwise it is None. torch makes a view `x[i]` in two thirds of the time of
    other views.
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
    """Frees a buffer and all its views."""

    buffer: FreedRegister

    in_graph = False


@dataclass(frozen=True)
class ComputeOp(Op):
    """Computes `out` from `operands`, with the kernel for `computation`. `dtype` is the dtype of the result.

    If `ready` is set, the kernel computes each block of rows when the flags of the block are set. If `done` is set, the
    kernel sets a flag after each block. `ready.flags`, `ready.own_rows` and `done.flags` are numbers of registers.
    """

    computation: str
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
        own_rows = () if self.ready.own_rows is None else (self.ready.own_rows,)
        return *self.operands, self.ready.flags, *own_rows

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
    """Copies `x` to `out`. One of the two may be in the memory of a peer.

    A copy engine makes the copy if `sms` is 0. Otherwise a kernel on `sms` SMs makes it.
    """

    x: ReadRegister
    out: WrittenRegister
    sms: int = 0

    @property
    def needs_sms(self) -> bool:
        return True  # a copy within a GPU is a kernel


@dataclass(frozen=True)
class SignalOp(Op):
    """Sets element `slot` of the flags of rank `peer` to an epoch of this call.

    The stream itself sets the flag if `sms` is 0. Otherwise a kernel on `sms` SMs sets it.
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
    """Makes the stream wait until element `slot` of this rank's `flags` has reached an epoch of this call."""

    flags: ReadRegister
    slot: int
    epoch: int

    @property
    def awaited_flags(self) -> tuple[FlagUse, ...]:
        return ((self.flags, self.slot, self.epoch),)


@dataclass(frozen=True)
class BarrierOp(Op):
    """Makes the stream wait until all ranks of the team have reached this barrier.

    `number` is the number of earlier barriers of the team in this call.
    """

    team: RanksOfTeam
    number: int


@dataclass(frozen=True)
class CollectiveOp(Op):
    """Starts a collective of the team. `x` and `out` are dense tensors.

    For an allreduce by NCCL, both are the same tensor. `by` is the implementation; it is empty for NCCL.
    """

    communication: str
    team: Group
    x: ReadRegister
    out: WrittenRegister
    handle: Start
    by: str = ""


@dataclass(frozen=True)
class MessagesOp(Op):
    """Starts the sends and receives that this rank has in one communication.

    Fields:
        team: the ranks of the communication.
        sends: for each message that this rank sends, the register of the tensor and the receiver's rank.
        receives: for each message that this rank receives, the register of the tensor and the sender's rank.
        collective: True for a transfer between meshes. Such a transfer is ordered with the collectives of the team.
            Other messages are ordered only with other messages of this rank. Messages and collectives do not wait for
            each other.
        handle: the handle of the communication.
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
    """Marks the end of a communication that needs no other rank, so that other streams can wait for the handle.

    Such a communication is a copy on `stream`, or has nothing to communicate.
    """

    handle: Start


@dataclass(frozen=True)
class WaitOp(Op):
    """Makes the stream wait for the communication with this handle."""

    handle: Await


@dataclass(frozen=True)
class SynchronizeOp(Op):
    """Makes the stream wait for all work that was issued to the stream `other` before this operation."""

    other: Join

    in_graph = False


@dataclass(frozen=True)
class DelayOp(Op):
    """Delays the stream by a number of microseconds."""

    microseconds: int

    @property
    def needs_sms(self) -> bool:
        return True


def overlap(one: ElementRange, others: Iterable[ElementRange]) -> bool:
    """Return True if the range `one` overlaps one of the ranges `others`. The ranges are ranges of elements."""
    low, high = one
    return any(low < end and start < high for start, end in others)
