"""Define one-sided statements: ranks, conditions, symmetric buffers, copies between ranks, signals and barriers.

A symmetric buffer exists on every rank of its mesh. A view of the buffer stands for the same part of the buffer on each
rank. Only signals and barriers order the work of different ranks:

    put %mine -> %theirs at %next over didx
    signal %arrived[0] = 1 at %next over didx
    wait_signal %arrived[0] >= 1

Copies, signals and barriers run in order on the current stream. Copy engines copy, and the stream itself signals.
Neither needs SMs, unless a `put` or a `signal` asks for them. The model follows CUDA's stream memory operations and
torch's symmetric memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hostir.ir.op import (
    Body,
    Define,
    Expr,
    FlagOperand,
    Index,
    Int,
    Name,
    Read,
    Statement,
    Sync,
    Use,
    Value,
    Write,
    statement,
)
from hostir.ir.source import did_you_mean
from hostir.ir.types import FLAG, Kind, Mesh, TensorType

OUTSIDE = -1  # the position of a rank on a mesh to which it does not belong

if TYPE_CHECKING:
    from hostir.ir.machine import Frame


def mesh_over(op: Statement, x: Value, over: str) -> Mesh:
    """Return the mesh of a tensor. Raise if the mesh has no axis `over`."""
    mesh = x.tensor.mesh
    if mesh is None or over not in mesh.axes:
        known = mesh.axes if mesh else ()
        expected, hint = f"one of: {', '.join(known) or 'none'}", did_you_mean(over, known)
        raise op.fail(f"the mesh of {x} has no axis '{over}'", expected=expected, hint=hint)
    return mesh


def own_rank(op: Statement, frame: Frame) -> int:
    """Return the rank that runs the statement.

    Raise if the machine holds unsharded tensors, because such a machine has no ranks.
    """
    if frame.machine.rank is None:
        raise op.fail(
            f"'{op.keyword()}' needs ranks, and there are none where tensors are whole",
            hint="run the program on simulated or real ranks",
        )
    return frame.machine.rank


def peer_of(op: Statement, frame: Frame, x: Value, over: str, place: Expr) -> int:
    """Return the rank of a peer. Raise if its position is out of range.

    Args:
        op: the statement, for errors.
        frame: the state of this rank's run.
        x: a tensor on the mesh.
        over: the mesh axis of the team of this rank and the peer.
        place: the position of the peer in the team.
    """
    team = mesh_over(op, x, over).team(own_rank(op, frame), over)
    index = frame.index(place)
    if not 0 <= index < len(team):
        raise op.fail(f"there is no position {index} along {over}", expected=f"0 to {len(team) - 1}")
    return frame.member(team, index)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class AllocateSymmetric(Statement):
    """A symmetric buffer on every rank of the mesh. Peers may read it with `get` and write it with `put`.

    The buffer and its contents persist from call to call. In the first call the buffer is uninitialised. With dtype
    `flag` it is a row of flags, which signals set and streams wait for. In every call, all flags begin at epoch 0.

    Example: %x: bf16[4, 32] = allocate_symmetric
    """

    syntax = "{out} = allocate_symmetric"
    on_host = True
    one_sided = True
    symmetric = True
    uncut = True
    out: Define

    def verify(self) -> None:
        if not isinstance(self.out.type, TensorType):
            raise self.fail(f"a symmetric buffer is a tensor, not a {self.out.type}", expected="a tensor type")
        if self.out.type.dtype == FLAG:
            flags_of(self, self.out)

    def evaluate(self, frame: Frame) -> None:
        own_rank(self, frame)
        type = self.out.tensor
        if frame.here(type.mesh):
            frame[self.out] = frame.machine.allocate(frame.shape(type), type.dtype, symmetric=True)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Rank(Statement):
    """The position of this rank along an axis of the mesh of `x`, counted from 0. It differs from rank to rank.

    On a rank outside the mesh, it is -1.

    Example: %r = rank of %x: f32[8@didx, 32] over didx
    """

    syntax = "{out} = rank of {x} over {over}"
    on_host = True
    per_rank = True
    uncut = True
    out: Define
    x: Use
    over: Name

    @property
    def place(self) -> tuple[Value, str]:
        return self.out, self.over

    def infer(self) -> Kind:
        return Kind.INDEX

    def verify(self) -> None:
        mesh_over(self, self.x, self.over)

    def evaluate(self, frame: Frame) -> None:
        mesh, _ = mesh_over(self, self.x, self.over), own_rank(self, frame)
        frame[self.out] = frame.place(mesh, self.over) if frame.here(mesh) else OUTSIDE


@statement
@dataclass(frozen=True, eq=False, repr=False)
class If(Statement):
    """Runs the body if two indices are equal. If the indices depend on the rank, ranks do different things.

    Names that the body defines are in scope only within the body.

    Example: if %i == 0 { set_stream 1 }
    """

    syntax = "if {left} == {right} {body}"
    conditional = True
    uncut = True
    left: Index
    right: Index
    body: Body

    def rounds(self, frame: Frame) -> Iterator[tuple[int, ...]]:
        try:
            holds = frame.index(self.left) == frame.index(self.right)
        except ZeroDivisionError:
            raise self.fail("the condition divides by zero", expected="a divisor of at least 1") from None
        if holds:
            yield ()


@dataclass(frozen=True, eq=False, repr=False)
class PeerCopy(Statement):
    """The base class of copies between this rank and a peer, on the current stream."""

    transfers: ClassVar[bool] = True
    one_sided: ClassVar[bool] = True
    uncut: ClassVar[bool] = True

    x: Read
    out: Write
    peer: Index
    over: Name

    @property
    def remote(self) -> Value:
        """The view of a symmetric buffer that the copy accesses on the peer."""
        raise AssertionError(type(self).__name__)

    @property
    def multiprocessors(self) -> int:
        """The number of SMs that run the copy; 0 if a copy engine runs it."""
        return 0

    @property
    def peer_place(self) -> tuple[Expr, str]:
        return self.peer, self.over

    @property
    def needs_dense(self) -> bool:
        return self.multiprocessors > 0

    def verify(self) -> None:
        mesh_over(self, self.remote, self.over)
        x, out = self.x.tensor, self.out.tensor
        if x.mesh != out.mesh:
            raise self.fail(f"{self.x} and {self.out} lie on different meshes", expected="one mesh")
        if x.dtype != out.dtype or x.local_shape != out.local_shape:
            raise self.fail(
                f"{self.keyword()} copies one rank's part: {_held(self.x)} to {_held(self.out)}",
                expected="equal dtypes and shapes",
            )

    def evaluate(self, frame: Frame) -> None:
        if not frame.here(self.remote.tensor.mesh):
            return
        me, peer = own_rank(self, frame), peer_of(self, frame, self.remote, self.over, self.peer)
        if frame.empty(self.out):
            return
        # In `put %x -> %x at ...` both operands are one view, so the class decides which of them is on the peer.
        source, target = (peer, me) if isinstance(self, Get) else (me, peer)
        frame.machine.copy(frame[self.x], frame[self.out], source=source, target=target, sms=self.multiprocessors)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Get(PeerCopy):
    """Copies from a peer's symmetric buffer to memory of this rank, on the current stream.

    `peer` is a position along the mesh axis `over`. `x` is the view that is read on the peer.

    Example: get %x: f32[8@didx, 32] from 3 over didx -> %y: f32[1, 32]
    """

    syntax = "get {x} from {peer} over {over} -> {out}"

    @property
    def remote(self) -> Value:
        return self.x


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Put(PeerCopy):
    """Copies memory of this rank to a peer's symmetric buffer, on the current stream.

    `peer` is a position along the mesh axis `over`. `out` is the view that is written on the peer. The peer may read it
    after a signal or a barrier that follows the copy.

    With `by N sms` a kernel on N SMs copies, instead of a copy engine. The kernel begins sooner than a copy engine, and
    moves large blocks more slowly. Both views must be dense. On CUDA, consecutive puts by SMs on a stream, and the
    signals between them, are one kernel. If the next statement is a `matmul` that waits for blocks, the matmul may
    start while this kernel still runs.

    Example: put %x: f32[8@didx, 32] -> %y: f32[8@didx, 32] at (%r + 1) % 8 over didx by 16 sms
    """

    syntax = "put {x} -> {out} at {peer} over {over}<? by {sms} sms?>"
    sms: Int = field(default=0, kw_only=True)

    @property
    def remote(self) -> Value:
        return self.out

    @property
    def multiprocessors(self) -> int:
        return self.sms

    def verify(self) -> None:
        super().verify()
        if self.sms < 0:
            raise self.fail(f"{self.keyword()} by {self.sms} sms", expected="at least 1 sms, or no 'by ... sms'")


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Signal(Statement):
    """Sets a flag of a peer to an epoch when the current stream reaches this statement.

    Epochs count from 1 in every call. Each epoch of a flag is sent once, after all lower epochs of the flag.

    Without `by 1 sms` the stream itself sets the flag. Before the flag is set, the GPU waits until all its writes to
    peers have arrived, including the writes of other streams. During this wait the GPU starts no other copy, so there
    are gaps between copies. With `by 1 sms` a kernel sets the flag, while copies of other streams continue. A `matmul`
    that waits for blocks leaves one SM free for signals by SMs that were issued before the `matmul`. But a collective,
    or another `matmul` that waits for blocks, may take this SM.

    Example: signal %flags: flag[8][0] = 1 at (%r + 1) % 8 over didx by 1 sms
    """

    syntax = "signal {flags}[{slot}] = {epoch} at {peer} over {over}<? by {sms} sms?>"
    orders = Sync.SIGNAL
    one_sided = True
    uncut = True
    flags: Use
    slot: Index
    epoch: Index
    peer: Index
    over: Name
    sms: Int = field(default=0, kw_only=True)

    @property
    def needs_reserved_sm(self) -> bool:
        return self.sms > 0

    @property
    def flag_operands(self) -> tuple[FlagOperand, ...]:
        return (FlagOperand(self.flags, self.slot, self.epoch, raises=True),)

    @property
    def peer_place(self) -> tuple[Expr, str]:
        return self.peer, self.over

    def verify(self) -> None:
        flags_of(self, self.flags)
        mesh_over(self, self.flags, self.over)
        if self.sms not in (0, 1):
            raise self.fail(f"{self.keyword()} by {self.sms} sms", expected="1 sms, or no 'by ... sms'")

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.flags.tensor.mesh):
            peer = peer_of(self, frame, self.flags, self.over, self.peer)
            slot, epoch = slot_of(self, frame, self.flags, self.slot), epoch_of(self, frame, self.epoch)
            frame.machine.signal(frame[self.flags], slot, epoch, peer, sms=self.sms)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class WaitSignal(Statement):
    """The current stream waits until a flag of this rank has reached an epoch of this call.

    Example: wait_signal %flags: flag[8][0] >= 1
    """

    syntax = "wait_signal {flags}[{slot}] >= {epoch}"
    orders = Sync.WAIT
    one_sided = True
    uncut = True
    flags: Use
    slot: Index
    epoch: Index

    @property
    def flag_operands(self) -> tuple[FlagOperand, ...]:
        return (FlagOperand(self.flags, self.slot, self.epoch),)

    def verify(self) -> None:
        flags_of(self, self.flags)

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.flags.tensor.mesh):
            slot, epoch = slot_of(self, frame, self.flags, self.slot), epoch_of(self, frame, self.epoch)
            frame.machine.wait_signal(frame[self.flags], slot, epoch)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Barrier(Statement):
    """The current stream waits until every rank along `over` has reached this barrier.

    The n-th barrier statement of one rank and the n-th barrier statement of any other rank of the team are the same
    barrier. The work that precedes the barrier on any rank's stream happens before the work that follows the barrier on
    any rank's stream. The mesh of `x` determines the ranks that take part. The memory of `x` is not accessed.

    Example: barrier of %x: f32[8@didx, 32] over didx
    """

    syntax = "barrier of {x} over {over}"
    orders = Sync.MEET
    one_sided = True
    uncut = True
    x: Use
    over: Name

    @property
    def waits(self) -> int:
        return self.x.tensor.mesh.size(self.over) if self.x.tensor.mesh else 1

    def verify(self) -> None:
        mesh_over(self, self.x, self.over)

    def evaluate(self, frame: Frame) -> None:
        mesh = mesh_over(self, self.x, self.over)
        if frame.here(mesh):
            frame.machine.barrier(mesh.team(own_rank(self, frame), self.over))


def flags_of(op: Statement, flags: Value) -> None:
    """Raise if `flags` is not a row of flags that is replicated on every rank."""
    if not isinstance(flags.type, TensorType) or flags.type.dtype != FLAG or len(flags.type.axes) != 1:
        raise op.fail(f"{flags} is not a row of flags", expected="one such as %flags: flag[8] = allocate_symmetric")
    if flags.type.axes[0].marks or flags.type.partial:
        raise op.fail(f"{flags} is not replicated", expected="the same row of flags on every rank, such as flag[8]")


def slot_of(op: Statement, frame: Frame, flags: Value, slot: Expr) -> int:
    """Return the value of the expression `slot`, the index of a flag. Raise if it is out of range."""
    index, count = frame.index(slot), flags.tensor.shape[0].bind(frame.sizes)
    if not 0 <= index < count:
        raise op.fail(f"{flags} has no flag {index}", expected=f"0 to {count - 1}")
    return index


def epoch_of(op: Statement, frame: Frame, epoch: Expr) -> int:
    """Return the value of the expression `epoch`. Raise if it is below 1: all flags have epoch 0 when a call begins."""
    number = frame.index(epoch)
    if number < 1:
        raise op.fail(f"epoch {number} of a flag", expected="at least 1: a call begins at epoch 0")
    return number


def _held(x: Value) -> str:
    return f"{x.tensor.dtype}[{', '.join(map(str, x.tensor.local_shape))}] of {x}"
