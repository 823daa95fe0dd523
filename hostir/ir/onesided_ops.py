"""The vocabulary of one-sided communication: symmetric buffers, copies to and from peers, signals, barriers.

A symmetric buffer stands on every rank of its mesh, and a rank may name a peer's: the same view, at the peer. Nothing
orders the ranks but what the program says, by signals and barriers:

    put %mine -> %theirs at %next over didx
    signal %arrived[0] = 1 at %next over didx
    wait_signal %arrived[0] >= 1

Copies, signals and barriers belong to the current stream and need no SMs: copy engines and the stream itself do them.
The model is that of CUDA's stream memory operations and of torch's symmetric memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostir.ir.op import Body, Define, Index, Name, Read, Statement, Use, Write, statement
from hostir.ir.types import FLAG, Kind, Mesh, TensorType
from hostir.ir.values import Value

if TYPE_CHECKING:
    from hostir.ir.machine import Frame
    from hostir.ir.values import Expr


def mesh_over(op: Statement, x: Value, over: str) -> Mesh:
    """The mesh of a tensor, which has the axis `over`; raises where it has none."""
    mesh = x.tensor.mesh
    if mesh is None or over not in mesh.axes:
        raise op.fail(
            f"the mesh of {x} has no axis '{over}'", expected=f"one of: {', '.join(mesh.axes) if mesh else 'none'}"
        )
    return mesh


def own_rank(op: Statement, frame: Frame) -> int:
    """The rank that runs the statement; raises on a machine that holds whole tensors, where there are none."""
    if frame.machine.rank is None:
        raise op.fail(
            f"whole tensors have no ranks, so '{op.keyword()}' means nothing to them",
            hint="run the program on simulated or real ranks",
        )
    return frame.machine.rank


def peer_of(op: Statement, frame: Frame, x: Value, over: str, place: Expr) -> int:
    """The device at a place along a mesh axis, among those that differ from this rank in nothing else."""
    team = mesh_over(op, x, over).team(own_rank(op, frame), over)
    index = frame.index(place)
    if not 0 <= index < len(team):
        raise op.fail(f"there is no rank {index} along {over}", expected=f"0 to {len(team) - 1}")
    return team[index]


@statement
@dataclass(frozen=True)
class AllocateSymmetric(Statement):
    """A symmetric buffer: every rank of its mesh has one, and peers may read and write it with `get` and `put`.

    It lasts from call to call and keeps what it holds; the first call finds it uninitialised. One of dtype `flag` holds
    signals, all 0 at first, and every call counts its epochs from where the call before it ended.

    Example: %x: bf16[4, 32] = allocate_symmetric
    """

    syntax = "{out} = allocate_symmetric"
    out: Define

    def verify(self) -> None:
        if not isinstance(self.out.type, TensorType):
            raise self.fail(f"a symmetric buffer is a tensor, not a {self.out.type}", expected="a tensor type")

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.out.tensor.mesh):
            type = self.out.tensor
            frame[self.out] = frame.machine.allocate(frame.shape(type), type.dtype, symmetric=True)


@statement
@dataclass(frozen=True)
class Rank(Statement):
    """This rank's place along an axis of the mesh of `x`: an index that differs from rank to rank.

    Example: %r = rank of %x: f32[8@didx, 32] over didx
    """

    syntax = "{out} = rank of {x} over {over}"
    out: Define
    x: Use
    over: Name

    def infer(self) -> Kind:
        return Kind.INDEX

    def verify(self) -> None:
        mesh_over(self, self.x, self.over)

    def evaluate(self, frame: Frame) -> None:
        mesh = mesh_over(self, self.x, self.over)
        if frame.here(mesh):
            frame[self.out] = mesh.coordinate(own_rank(self, frame), self.over)


@statement
@dataclass(frozen=True)
class If(Statement):
    """Runs the body where two indices are equal. Where they depend on the rank, ranks do different things.

    Example: for %i in 0..4 { if %i == 0 { set_stream 1 } }
    """

    syntax = "if {left} == {right} {body}"
    left: Index
    right: Index
    body: Body

    def holds(self, frame: Frame) -> bool:
        return frame.index(self.left) == frame.index(self.right)


@dataclass(frozen=True)
class Copy(Statement):
    """The base of copies between this rank and a peer."""

    def fits(self, x: Value, out: Value, over: str, remote: Value) -> None:
        mesh_over(self, remote, over)
        if FLAG in (x.tensor.dtype, out.tensor.dtype):
            raise self.fail("flags are set by signals, not by copies", hint="signal %flags[0] = 1 at ...")
        if x.tensor.dtype != out.tensor.dtype or x.tensor.local_shape != out.tensor.local_shape:
            raise self.fail(
                f"{self.keyword()} copies elements one by one: a rank's part of {x} is {_local(x)}, "
                f"of {out} {_local(out)}",
                expected="equal dtypes and shapes",
            )


@statement
@dataclass(frozen=True)
class Get(Copy):
    """Copies a peer's part of a symmetric buffer into a buffer of this rank, on the current stream.

    `peer` is a place along the mesh axis `over`; `x` names the view at the peer.

    Example: get %x: f32[4, 32] from 0 over didx -> %y: f32[4, 32]
    """

    syntax = "get {x} from {peer} over {over} -> {out}"
    x: Read
    peer: Index
    over: Name
    out: Write

    def verify(self) -> None:
        self.fits(self.x, self.out, self.over, self.x)

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.x.tensor.mesh):
            peer, me = peer_of(self, frame, self.x, self.over, self.peer), own_rank(self, frame)
            frame.machine.copy(frame[self.x], frame[self.out], source=peer, target=me)


@statement
@dataclass(frozen=True)
class Put(Copy):
    """Copies a buffer of this rank into a peer's part of a symmetric buffer, on the current stream.

    The peer may read it behind a signal or a barrier that follows the copy.

    Example: put %x: f32[4, 32] -> %y: f32[4, 32] at 0 over didx
    """

    syntax = "put {x} -> {out} at {peer} over {over}"
    x: Read
    out: Write
    peer: Index
    over: Name

    def verify(self) -> None:
        self.fits(self.x, self.out, self.over, self.out)

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.out.tensor.mesh):
            peer, me = peer_of(self, frame, self.out, self.over, self.peer), own_rank(self, frame)
            frame.machine.copy(frame[self.x], frame[self.out], source=me, target=peer)


@statement
@dataclass(frozen=True)
class Signal(Statement):
    """Sets a flag of a peer to an epoch, once the current stream gets here.

    Epochs of one flag rise: each is sent once, and after those below it. They count from the beginning of the call.

    Example: signal %flags: flag[8][0] = 1 at 3 over didx
    """

    syntax = "signal {flags}[{slot}] = {epoch} at {peer} over {over}"
    flags: Use
    slot: Index
    epoch: Index
    peer: Index
    over: Name

    def verify(self) -> None:
        flags_of(self, self.flags)
        mesh_over(self, self.flags, self.over)

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.flags.tensor.mesh):
            slot, epoch = slot_of(self, frame, self.flags, self.slot), epoch_of(self, frame, self.epoch)
            peer = peer_of(self, frame, self.flags, self.over, self.peer)
            frame.machine.signal(frame[self.flags], slot, epoch, peer)


@statement
@dataclass(frozen=True)
class WaitSignal(Statement):
    """The current stream waits until a flag of this rank has reached an epoch of this call.

    Example: wait_signal %flags: flag[8][0] >= 1
    """

    syntax = "wait_signal {flags}[{slot}] >= {epoch}"
    flags: Use
    slot: Index
    epoch: Index

    def verify(self) -> None:
        flags_of(self, self.flags)

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.flags.tensor.mesh):
            own_rank(self, frame)
            slot, epoch = slot_of(self, frame, self.flags, self.slot), epoch_of(self, frame, self.epoch)
            frame.machine.wait_signal(frame[self.flags], slot, epoch)


@statement
@dataclass(frozen=True)
class Barrier(Statement):
    """The current stream waits until every rank along `over` has got to its barrier of the same number.

    What the other ranks' streams did before their barriers comes before what this stream does after its own.

    Example: barrier of %x: f32[8@didx, 32] over didx
    """

    syntax = "barrier of {x} over {over}"
    x: Use
    over: Name

    def verify(self) -> None:
        mesh_over(self, self.x, self.over)

    def evaluate(self, frame: Frame) -> None:
        mesh = mesh_over(self, self.x, self.over)
        if frame.here(mesh):
            frame.machine.barrier(mesh.team(own_rank(self, frame), self.over))


def flags_of(op: Statement, flags: Value) -> None:
    """Raises unless a value is a row of flags."""
    if not isinstance(flags.type, TensorType) or flags.type.dtype != FLAG or len(flags.type.axes) != 1:
        raise op.fail(f"{flags} is no row of flags", expected="a tensor such as %flags: flag[8] = allocate_symmetric")
    if flags.type.axes[0].marks:
        raise op.fail(f"{flags} lies over the mesh", expected="flags that every rank has all of, such as flag[8]")


def slot_of(op: Statement, frame: Frame, flags: Value, slot: Expr) -> int:
    """Which flag an index names; raises where there is none."""
    index, count = frame.index(slot), flags.tensor.shape[0].bind(frame.sizes)
    if not 0 <= index < count:
        raise op.fail(f"{flags} has no flag {index}", expected=f"0 to {count - 1}")
    return index


def epoch_of(op: Statement, frame: Frame, epoch: Expr) -> int:
    """An epoch of this call, from 1; raises for one that every flag has reached before it is sent."""
    number = frame.index(epoch)
    if number < 1:
        raise op.fail(f"epoch {number} of a flag", expected="at least 1: at the beginning of a call it is 0")
    return number


def _local(x: Value) -> str:
    return f"{x.tensor.dtype}[{', '.join(map(str, x.tensor.local_shape))}]"
