"""Define messages between two ranks of one mesh.

A rank's messages within a team run one after another, in the order in which the rank issues them. A message ends only
after the peer has started the matching message. So if two ranks both send before they receive, they wait for each other
forever. `exchange` sends and receives at once:

    %h = exchange %mine to (%r + 1) % 8, %theirs from (%r + 7) % 8 over didx
    wait %h

The k-th send from rank A to rank B matches the k-th receive of rank B from rank A. Collectives and messages of a team
do not wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hostir.ir.comm_ops import elements
from hostir.ir.machine import Exchange, Move
from hostir.ir.onesided_ops import mesh_over, own_rank, peer_of
from hostir.ir.op import Codec, Define, Index, Name, Read, Shape, Statement, Write, statement
from hostir.ir.types import Kind, Mesh

if TYPE_CHECKING:
    from hostir.ir.machine import Frame


WHOLE = (0, 1)


@dataclass(frozen=True, eq=False, repr=False)
class Message(Statement):
    """The base class of statements that send or receive messages."""

    transfers: ClassVar[bool] = True
    per_rank: ClassVar[bool] = True
    uncut: ClassVar[bool] = True

    handle: Define
    over: Name

    @property
    def needs_dense(self) -> bool:
        return True

    @property
    def compared(self) -> tuple[Shape, ...]:
        return elements(*self.values(Codec.READ, Codec.WRITE))

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks that exchange the message. Raises if it has no axis `over`."""
        return mesh_over(self, next(self.values(Codec.READ, Codec.WRITE)), self.over)

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(team)) for team in self.mesh.teams(self.over))

    def infer(self) -> Kind:
        return Kind.HANDLE

    def verify(self) -> None:
        mesh_over(self, next(self.values(Codec.READ, Codec.WRITE)), self.over)

    def moves(self, frame: Frame, me: int) -> tuple[Move, ...]:
        """Return the messages that this rank sends and receives. `me` is the number of this rank."""
        raise AssertionError(type(self).__name__)

    def evaluate(self, frame: Frame) -> None:
        if not frame.here(self.mesh):
            return
        me = own_rank(self, frame)
        if any(frame.empty(value) for value in self.values(Codec.READ, Codec.WRITE)):
            return
        team = tuple(sorted(self.mesh.team(me, self.over)))
        x, out = (next(self.values(codec), None) for codec in (Codec.READ, Codec.WRITE))
        exchange = Exchange(self.keyword(), team, self.moves(frame, me))
        frame[self.handle] = frame.machine.communicate(exchange, frame[x], frame[out])


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Send(Message):
    """Sends a tensor to a peer, which receives it. `peer` is a position along the mesh axis `over`.

    Example: %h = send %x: f32[8@didx, 32] to 1 over didx
    """

    syntax = "{handle} = send {x} to {peer} over {over}"
    x: Read
    peer: Index

    def moves(self, frame: Frame, me: int) -> tuple[Move, ...]:
        return (Move(me, _other(self, me, peer_of(self, frame, self.x, self.over, self.peer)), WHOLE, WHOLE),)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class Recv(Message):
    """Receives a tensor from a peer, which sends it. `peer` is a position along the mesh axis `over`.

    Example: %h = recv %y: f32[8@didx, 32] from 0 over didx
    """

    syntax = "{handle} = recv {out} from {peer} over {over}"
    out: Write
    peer: Index

    def moves(self, frame: Frame, me: int) -> tuple[Move, ...]:
        return (Move(_other(self, me, peer_of(self, frame, self.out, self.over, self.peer)), me, WHOLE, WHOLE),)


@statement
@dataclass(frozen=True, eq=False, repr=False)
class SendAndRecv(Message):
    """Sends a tensor to one peer and receives a tensor from another at the same time, as in a step of a ring.

    If both peers are this rank itself, as on a ring of one rank, the statement copies the tensor.

    Example: %h = exchange %x: f32[8@didx, 32] to (%r + 1) % 8, %y: f32[8@didx, 32] from (%r + 7) % 8 over didx
    """

    syntax = "{handle} = exchange {x} to {to}, {out} from {source} over {over}"
    x: Read
    to: Index
    out: Write
    source: Index

    def verify(self) -> None:
        super().verify()
        if self.x.tensor.mesh != self.out.tensor.mesh:
            raise self.fail(f"{self.x} and {self.out} lie on different meshes", expected="one mesh")

    def moves(self, frame: Frame, me: int) -> tuple[Move, ...]:
        to = peer_of(self, frame, self.x, self.over, self.to)
        source = peer_of(self, frame, self.out, self.over, self.source)
        if to == me and source == me:
            return (Move(me, me, WHOLE, WHOLE),)
        return Move(me, _other(self, me, to), WHOLE, WHOLE), Move(_other(self, me, source), me, WHOLE, WHOLE)


MESSAGES = frozenset(cls.keyword() for cls in (Send, Recv, SendAndRecv))  # the keywords of messages


def _other(op: Message, me: int, peer: int) -> int:
    """Return `peer`. Raise if it equals `me`, the rank that runs the statement.

    A single send or receive would wait forever for a matching message of the same rank.
    """
    if peer == me:
        raise op.fail(
            f"rank {me} would wait for itself: its messages run one after another",
            expected="a peer that is another rank",
            hint="use a copy for data that stay on the rank",
        )
    return peer
