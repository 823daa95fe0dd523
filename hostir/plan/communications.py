"""Record the communications of a program while it is unrolled: collectives, messages, and their handles."""

from __future__ import annotations

from dataclasses import dataclass

from hostir.ir.machine import Exchange
from hostir.ir.message_ops import MESSAGES
from hostir.plan.operations import CollectiveOp, MarkOp, MessagesOp, Op, WaitOp
from hostir.plan.recording import IssuedOps, RegisterTable
from hostir.plan.unrolled import RegisterView

COLLECTIVES = ("allgather", "allreduce", "reduce_scatter", "alltoall")


@dataclass
class Flight:
    """The handle of a communication while a program is unrolled.

    Fields:
        op: the operation that starts the communication.
        waited: True once a statement waits for it.
    """

    op: Op
    waited: bool = False


class Communications:
    """Records the communications of one rank.

    Fields:
        flights: all communications so far.
        marked: the handles of the MarkOps that another stream waits for. The other MarkOps are dropped.
        to_itself: the latest message of this rank to itself, in a team of one rank.
    """

    def __init__(self, ops: IssuedOps, registers: RegisterTable) -> None:
        self.ops = ops
        self.registers = registers
        self.flights: list[Flight] = []
        self.marked: set[int] = set()
        self.to_itself: Flight | None = None

    def communicate(self, exchange: Exchange, x: RegisterView | None, out: RegisterView | None) -> Flight:
        registers = self.registers
        for part, verb in ((x, "sends"), (out, "fills")):
            if part is not None:
                registers.check_dense(part, f"the tensor that {exchange.communication} {verb} is not dense")
        if exchange.communication not in COLLECTIVES:
            return self.messages(exchange, x, out)
        in_place = exchange.communication == "allreduce" and not exchange.by
        if len(exchange.team) == 1 or in_place:
            self.copy_within(x, out)
        if len(exchange.team) == 1:
            return self.start(MarkOp(*self.ops.here, registers.new_register()))
        source, target, handle = (
            registers.register(out if in_place else x),
            registers.register(out),
            registers.new_register(),
        )
        keyword, by = exchange.named
        return self.start(CollectiveOp(*self.ops.here, keyword, exchange.team, source, target, handle, by))

    def messages(self, exchange: Exchange, x: RegisterView | None, out: RegisterView | None) -> Flight:
        registers, rank = self.registers, self.registers.rank
        collective, alone = exchange.communication not in MESSAGES, len(exchange.team) == 1
        if alone and not collective and self.to_itself is not None:  # messages run one after another
            self.follow(self.to_itself)
        sends, receives = [], []
        for move in exchange.moves or ():
            if move.source == move.target and (collective or alone):
                self.copy_within(registers.block(x, *move.take), registers.block(out, *move.put))
                continue
            if move.source == rank:
                sends.append((registers.register(registers.block(x, *move.take)), move.target))
            if move.target == rank:
                receives.append((registers.register(registers.block(out, *move.put)), move.source))
        if sends or receives:
            handle = registers.new_register()
            return self.start(
                MessagesOp(*self.ops.here, exchange.team, tuple(sends), tuple(receives), collective, handle)
            )
        flight = self.start(MarkOp(*self.ops.here, registers.new_register()))
        if not collective:
            self.to_itself = flight
        return flight

    def copy_within(self, x: RegisterView | None, out: RegisterView | None) -> None:
        """Append a copy of a dense tensor to a dense tensor of the same size, unless both are the same memory."""
        registers = self.registers
        source, target = registers.register(registers.block(x, 0, 1)), registers.register(registers.block(out, 0, 1))
        if source != target:
            registers.copy(source, target)

    def start(self, op: Op) -> Flight:
        self.ops.add(op)
        self.flights.append(Flight(op))
        return self.flights[-1]

    def wait(self, flight: Flight) -> None:
        flight.waited = True
        self.follow(flight)

    def follow(self, flight: Flight) -> None:
        """Append an operation that makes the current stream wait for a communication.

        If the communication is a copy on the current stream, append nothing.
        """
        self.ops.mark_order()
        if isinstance(flight.op, MarkOp):
            if flight.op.stream == self.ops.stream:
                return
            self.marked.add(flight.op.handle)
        self.ops.add(WaitOp(*self.ops.here, flight.op.starts))

    def check_awaited(self) -> None:
        """Raise a HostIRError if there is a communication that no statement waits for."""
        if flight := next((f for f in self.flights if not f.waited), None):
            raise flight.op.place.statement.fail(
                "nothing waits for this communication", hint="add 'wait' with its handle before the result is read"
            )

    def without_unused_marks(self) -> tuple[Op, ...]:
        """Return all recorded operations, but leave out the MarkOps that no other stream waits for."""
        return tuple(op for op in self.ops.issued if not isinstance(op, MarkOp) or op.handle in self.marked)
