"""Define one-sided statements: ranks, conditions, symmetric buffers, copies between ranks, signals and barriers.

Every rank of its mesh has a symmetric buffer, and a view of this rank's buffer names the same bytes on a peer. Only
signals and barriers order the ranks:

    put %mine -> %theirs at %next over didx
    signal %arrived[0] = 1 at %next over didx
    wait_signal %arrived[0] >= 1

Copies, signals and barriers run in order on the current stream and need no SMs, unless a `put` or a `signal` asks for
some: copy engines and the stream itself do them. The model is that of CUDA's stream memory operations and of torch's
symmetric memory.
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

OUTSIDE = -1  # the place of a rank on a mesh to which it does not belong

if TYPE_CHECKING:
    from hostir.ir.machine import Frame


def mesh_over(op: Statement, x: Value, over: str) -> Mesh:
    """Return the mesh of a tensor; raise unless it has the axis `over`."""
    mesh = x.tensor.mesh
    if mesh is None or over not in mesh.axes:
        known = mesh.axes if mesh else ()
        expected, hint = f"one of: {', '.join(known) or 'none'}", did_you_mean(over, known)
        raise op.fail(f"the mesh of {x} has no axis '{over}'", expected=expected, hint=hint)
    return mesh


def own_rank(op: Statement, frame: Frame) -> int:
    """Return the rank that runs the statement; raise on a machine that holds whole tensors, which has no ranks."""
    if frame.machine.rank is None:
        raise op.fail(
            f"whole tensors have no ranks, so '{op.keyword()}' means nothing to them",
            hint="run the program on simulated or real ranks",
        )
    return frame.machine.rank


def peer_of(op: Statement, frame: Frame, x: Value, over: str, place: Expr) -> int:
    """Return the rank at a position along a mesh axis, in this rank's own team; raise where there is none."""
    team = mesh_over(op, x, over).team(own_rank(op, frame), over)
    index = frame.index(place)
    if not 0 <= index < len(team):
        raise op.fail(f"there is no place {index} along {over}", expected=f"0 to {len(team) - 1}")
    return frame.member(team, index)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class AllocateSymmetric(Statement):
    """A symmetric buffer: every rank of its mesh has one, and peers may read it with `get` and write it with `put`.

    It lasts from call to call and keeps what it holds; the first call finds it uninitialised. One of dtype `flag` is a
    row of flags, which signals set and streams wait for: all 0 at first, and their epochs count anew in every call.

    Example: %x: bf16[4, 32] = allocate_symmetric
    """

    syntax = "{out} = allocate_symmetric"
    on_host = True
    one_sided = True
    symmetric = True
    whole = True
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
    """This rank's place along an axis of the mesh of `x`, from 0: an index that differs from rank to rank.

    A rank outside that mesh gets -1.

    Example: %r = rank of %x: f32[8@didx, 32] over didx
    """

    syntax = "{out} = rank of {x} over {over}"
    on_host = True
    per_rank = True
    whole = True
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
    """Runs the body where two indices are equal. Where they depend on the rank, ranks do different things.

    What the body defines ends with it.

    Example: if %i == 0 { set_stream 1 }
    """

    syntax = "if {left} == {right} {body}"
    conditional = True
    whole = True
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
    whole: ClassVar[bool] = True

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
        """The number of SMs that copy; 0 for a copy engine."""
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
                f"{self.keyword()} copies what one rank holds: {_held(self.x)} to {_held(self.out)}",
                expected="equal dtypes and shapes",
            )

    def evaluate(self, frame: Frame) -> None:
        if not frame.here(self.remote.tensor.mesh):
            return
        me, peer = own_rank(self, frame), peer_of(self, frame, self.remote, self.over, self.peer)
        if frame.empty(self.out):
            return
        # `put %x -> %x at ...` names one view twice: which of the two is the peer's is the class's to say.
        source, target = (peer, me) if isinstance(self, Get) else (me, peer)
        frame.machine.copy(frame[self.x], frame[self.out], source=source, target=target, sms=self.multiprocessors)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Get(PeerCopy):
    """Copies a peer's part of a symmetric buffer into memory of this rank, on the current stream.

    `peer` is a place along the mesh axis `over`; `x` names the view there.

    Example: get %x: f32[8@didx, 32] from 3 over didx -> %y: f32[1, 32]
    """

    syntax = "get {x} from {peer} over {over} -> {out}"

    @property
    def remote(self) -> Value:
        return self.x


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Put(PeerCopy):
    """Copies memory of this rank into a peer's part of a symmetric buffer, on the current stream.

    `peer` is a place along the mesh axis `over`; `out` names the view there. The peer may read it behind a signal or a
    barrier that follows the copy.

    `by N sms` has a kernel on so many SMs copy, instead of a copy engine: it begins sooner, and moves large blocks more
    slowly. Both views must be dense. Such puts and the signals between them, one after another on a stream, are one
    kernel on CUDA; a `matmul` that waits for blocks may start right behind it while it runs, on the other SMs.

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
            raise self.fail(f"{self.keyword()} by {self.sms} sms", expected="at least 1, or none at all")


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Signal(Statement):
    """Sets a flag of a peer to an epoch, once the current stream gets here.

    Epochs count from 1 in every call. Those of one flag rise: each is sent once, and after those below it.

    `by 1 sms` has a kernel set the flag, instead of the stream itself. A GPU sets the flag of a stream's signal only
    when all has arrived that it has under way to peers, on any stream, and then begins the next copy: that costs time
    between copies. A kernel sets the flag while the copies of another stream go on. A `matmul` that waits for blocks
    leaves an SM to such signals that come before it; a collective, or another such `matmul`, may take it from them.

    Example: signal %flags: flag[8][0] = 1 at (%r + 1) % 8 over didx by 1 sms
    """

    syntax = "signal {flags}[{slot}] = {epoch} at {peer} over {over}<? by {sms} sms?>"
    orders = Sync.SIGNAL
    one_sided = True
    whole = True
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
            raise self.fail(f"{self.keyword()} by {self.sms} sms", expected="1, or none at all")

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
    whole = True
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
    """The current stream waits until every rank along `over` has got to its barrier of the same number.

    What those ranks' streams did before their barriers comes before what this stream does behind its own. `x` is not
    touched: its mesh says who takes part.

    Example: barrier of %x: f32[8@didx, 32] over didx
    """

    syntax = "barrier of {x} over {over}"
    orders = Sync.MEET
    one_sided = True
    whole = True
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
    """Raise unless a value is a row of flags, one row on every rank."""
    if not isinstance(flags.type, TensorType) or flags.type.dtype != FLAG or len(flags.type.axes) != 1:
        raise op.fail(f"{flags} is no row of flags", expected="such as %flags: flag[8] = allocate_symmetric")
    if flags.type.axes[0].marks or flags.type.partial:
        raise op.fail(f"{flags} lies over the mesh", expected="flags of which every rank has all, such as flag[8]")


def slot_of(op: Statement, frame: Frame, flags: Value, slot: Expr) -> int:
    """Return the value of a flag's index; raise where there is no such flag."""
    index, count = frame.index(slot), flags.tensor.shape[0].bind(frame.sizes)
    if not 0 <= index < count:
        raise op.fail(f"{flags} has no flag {index}", expected=f"0 to {count - 1}")
    return index


def epoch_of(op: Statement, frame: Frame, epoch: Expr) -> int:
    """Return an epoch of this call; raise below 1, which every flag has reached when the call begins."""
    number = frame.index(epoch)
    if number < 1:
        raise op.fail(f"epoch {number} of a flag", expected="at least 1: a call begins at epoch 0")
    return number


def _held(x: Value) -> str:
    return f"{x.tensor.dtype}[{', '.join(map(str, x.tensor.local_shape))}] of {x}"
