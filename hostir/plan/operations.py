"""Operations of an unrolled program: one dataclass for each operation, without torch.

A program unrolled for one rank and one set of shapes is a list of operations in issue order. It has no names, loops,
indices or symbols: operations refer to numbered registers, and each operation knows its statement. `unroll` makes the
list. A machine binds each operation to a closure over one list of registers, and a run calls these closures.
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
    """Return the value of a flag that has reached an epoch of a call."""
    return call * EPOCHS + epoch


class StatementPlace(NamedTuple):
    """A statement, and the indices of the loops around it, outermost first."""

    statement: Statement
    rounds: tuple[int, ...]


ElementRange = tuple[int, int]  # elements of a buffer: the first, and the one after the last
FlagUse = tuple[int, int, int]  # register of flags, slot, epoch

# Types of fields. A type says what an operation does with the register, handle, stream or ranks in the field.
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
    """One operation, issued to `stream`. `place` names its statement.

    Analyses ask for these traits instead of naming classes of operations. Most follow from the types of the fields.
        defines: the register that it sets to a tensor; such an operation runs on the host only.
        frees: the register of the buffer that it frees.
        reads, writes: the registers of the tensors that it reads and writes. A communication may do so until a stream
            has waited for it.
        joins: the stream that it waits for, or None.
        starts, awaits: the handle of the communication that it starts, or waits for.
        raised_flags, awaited_flags: the flags that it sets, and the flags that its stream or its kernel waits for.
        by_group: the ranks that run it together, through a process group.
        of_team: the ranks that it signals and waits for, by flags that the machine adds.
        in_graph: True if it becomes a node of a CUDA graph.
        needs_sms: True if it runs on SMs, at least on some machines.
        starts_early: True if it may start before the operation directly before it on its stream has ended.
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
        """The track of a trace that shows the operation."""
        if self.by_group:
            return f"communication {self.by_group}"
        return "caller" if self.stream == CALLER else f"stream {self.stream}"


def _tuple_of(field: str) -> Callable[[Op], tuple[int, ...]]:
    return lambda op: (getattr(op, field),)


@dataclass(frozen=True)
class AllocateOp(Op):
    """Sets `registers[out]` to a dense uninitialised tensor, unless the caller passed a tensor for this output."""

    out: DefinedRegister
    shape: tuple[int, ...]
    dtype: DType

    in_graph = False


@dataclass(frozen=True)
class SymmetricOp(Op):
    """Sets `registers[out]` to the symmetric buffer of this name on `rank`, which may be this rank or a peer.

    The buffer is dense, and the same in every run with these sizes. In a loop, each round has a separate buffer.
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
    """Sets `registers[out]` to a view of the buffer `x` that begins at element `offset`.

    If the view is `x[i]`, `index` is i: torch makes such a view in two thirds of the time that another view takes.
    Else `index` is None.
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
    """Computes `out`, of dtype `dtype`, by the kernel of `computation`.

    With `ready`, the kernel computes each block of rows once the flags of the block are set. With `done`, it sets a
    flag after each block. `ready.flags`, `ready.own_rows` and `done.flags` are registers.
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
    """Copies `x` to `out` (one of them may be on a peer) by a copy engine if `sms` is 0, else by `sms` SMs."""

    x: ReadRegister
    out: WrittenRegister
    sms: int = 0

    @property
    def needs_sms(self) -> bool:
        return True  # a copy within a GPU is a kernel


@dataclass(frozen=True)
class SignalOp(Op):
    """Sets element `slot` of the peer's `flags` to an epoch of this call.

    If `sms` is 0, the stream itself sets the flag, else a kernel on `sms` SMs does.
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
    """Makes the stream wait until all ranks of the team have reached barrier `number`, from 0 in every call."""

    team: RanksOfTeam
    number: int


@dataclass(frozen=True)
class CollectiveOp(Op):
    """Starts a collective of the team. `x` and `out` are dense; an allreduce has one tensor for both."""

    communication: str
    team: Group
    x: ReadRegister
    out: WrittenRegister
    handle: Start


@dataclass(frozen=True)
class MessagesOp(Op):
    """Starts sends and receives. Each is a pair: the register of a tensor, and the rank that it goes to or comes from.

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
    """Marks the end of a communication within this rank, which ran on `stream`, so that other streams can wait."""

    handle: Start


@dataclass(frozen=True)
class WaitOp(Op):
    """Makes the stream wait for a communication."""

    handle: Await


@dataclass(frozen=True)
class SynchronizeOp(Op):
    """Makes the stream wait for all work issued to the stream `other` so far."""

    other: Join

    in_graph = False


@dataclass(frozen=True)
class DelayOp(Op):
    """Delays the stream."""

    microseconds: int

    @property
    def needs_sms(self) -> bool:
        return True


def overlap(one: ElementRange, others: Iterable[ElementRange]) -> bool:
    """Return True if an extent shares an element with one of the others."""
    low, high = one
    return any(low < end and start < high for start, end in others)
