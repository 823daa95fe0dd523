"""The vocabulary of messages between two ranks of one mesh.

A rank's messages within a team run one after another, in the order issued, and each ends when both sides have met. So
two ranks that both send first wait for each other; `exchange` posts both directions at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostir.ir.machine import Exchange, Move
from hostir.ir.onesided_ops import mesh_over, own_rank, peer_of
from hostir.ir.op import Define, Index, Name, Read, Statement, Write, statement
from hostir.ir.types import Kind
from hostir.ir.values import Value

if TYPE_CHECKING:
    from hostir.ir.machine import Frame

WHOLE = (0, 1)


@dataclass(frozen=True)
class Message(Statement):
    """The base of messages."""

    handle: Define

    def infer(self) -> Kind:
        return Kind.HANDLE

    def start(self, frame: Frame, x: Value | None, out: Value | None, moves: tuple[Move, ...], over: str) -> None:
        """Issues the messages of this rank."""
        value = x or out
        assert value is not None
        team = mesh_over(self, value, over).team(own_rank(self, frame), over)
        frame[self.handle] = frame.machine.communicate(Exchange(self.keyword(), team, moves), frame[x], frame[out])


@statement
@dataclass(frozen=True)
class Send(Message):
    """Sends a tensor to a peer that receives it: `peer` is a place along the mesh axis `over`.

    Example: %h = send %x: f32[4, 32] to 1 over didx
    """

    syntax = "{handle} = send {x} to {peer} over {over}"
    x: Read
    peer: Index
    over: Name

    def verify(self) -> None:
        mesh_over(self, self.x, self.over)

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.x.tensor.mesh):
            peer = peer_of(self, frame, self.x, self.over, self.peer)
            self.start(frame, self.x, None, (Move(own_rank(self, frame), peer, WHOLE, WHOLE),), self.over)


@statement
@dataclass(frozen=True)
class Recv(Message):
    """Receives a tensor from a peer that sends it: `peer` is a place along the mesh axis `over`.

    Example: %h = recv %x: f32[4, 32] from 1 over didx
    """

    syntax = "{handle} = recv {out} from {peer} over {over}"
    out: Write
    peer: Index
    over: Name

    def verify(self) -> None:
        mesh_over(self, self.out, self.over)

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.out.tensor.mesh):
            peer = peer_of(self, frame, self.out, self.over, self.peer)
            self.start(frame, None, self.out, (Move(peer, own_rank(self, frame), WHOLE, WHOLE),), self.over)


@statement
@dataclass(frozen=True)
class SendAndRecv(Message):
    """Sends to one peer and receives from another, both at once: the step of a ring.

    Example: %h = exchange %x: f32[4, 32] to 1, %y: f32[4, 32] from 7 over didx
    """

    syntax = "{handle} = exchange {x} to {to}, {out} from {source} over {over}"
    x: Read
    to: Index
    out: Write
    source: Index
    over: Name

    def verify(self) -> None:
        mesh_over(self, self.x, self.over)
        if self.x.tensor.mesh != self.out.tensor.mesh:
            raise self.fail(f"{self.x} and {self.out} lie on different meshes", expected="one mesh")

    def evaluate(self, frame: Frame) -> None:
        if frame.here(self.x.tensor.mesh):
            me = own_rank(self, frame)
            to = peer_of(self, frame, self.x, self.over, self.to)
            source = peer_of(self, frame, self.out, self.over, self.source)
            moves = (Move(me, to, WHOLE, WHOLE), Move(source, me, WHOLE, WHOLE))
            self.start(frame, self.x, self.out, moves, self.over)
