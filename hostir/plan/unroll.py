"""Unroll a program, for one rank and one set of shapes, to a list of operations. The list has the order of issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hostir.ir.machine import Done, Exchange, Frame, Observer, OptionalMethods, Ready, interpret, uncollected
from hostir.ir.op import Statement
from hostir.ir.program import Program
from hostir.ir.regions import dense_strides
from hostir.ir.types import DType
from hostir.plan.communications import Communications, Flight
from hostir.plan.operations import (
    CALLER,
    BarrierOp,
    ComputeOp,
    CopyOp,
    DelayOp,
    Op,
    SignalOp,
    SynchronizeOp,
    WaitSignalOp,
)
from hostir.plan.recording import IssuedOps, RegisterTable
from hostir.plan.unrolled import RegisterView, UnrolledProgram


def teams_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return every team that has two or more ranks and uses collectives, in program order.

    Each team lists its ranks in ascending order. All ranks must create their process groups in the same order. So the
    order of the teams does not depend on the rank.
    """
    teams = (team for statement in program.walk() if statement.collective for team in statement.teams)
    return tuple(dict.fromkeys(team for team in teams if len(team) > 1))


def message_teams_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return every team that has two or more ranks and exchanges messages, in program order."""
    teams = (team for statement in program.walk() if not statement.collective for team in statement.teams)
    return tuple(dict.fromkeys(team for team in teams if len(team) > 1))


class Strided(Protocol):
    """A tensor of any library. Unrolling needs only its shape and its strides. Strides are numbers of elements."""

    @property
    def shape(self) -> Sequence[int]:
        """The extents of the tensor's axes."""

    def stride(self) -> Sequence[int]:
        """Return the strides of the tensor's axes."""


@uncollected()
def unroll(
    program: Program, rank: int, sizes: Mapping[str, int], inputs: Sequence[Strided | None] | None = None
) -> UnrolledProgram:
    """Unroll a program for one rank and one set of shapes, and return its operations and registers.

    Args:
        program: a host program.
        rank: the rank.
        sizes: the values of all symbols.
        inputs: tensors with the shapes and strides of this rank's inputs; None for an input that this rank does not
            hold. By default all inputs are dense.

    Raises:
        HostIRError: at a statement that no machine can run. Such a statement uses a stream outside the pool, a view
            that needs a copy, freed memory, or a peer's memory that is not symmetric. Or it communicates a tensor that
            is not dense, or starts a communication that nothing waits for.
    """
    unroller = Unroller(program, rank, sizes)
    parts = unroller.dense_inputs() if inputs is None else unroller.strided_inputs(inputs)
    return unroller.finish(interpret(program, unroller, sizes, parts, unroller))


@dataclass(frozen=True)
class StreamValue:
    """The value of a `current_stream` statement: the number of a stream."""

    number: int


class Unroller(Observer, OptionalMethods):
    """A machine that records the operations of one rank, and runs nothing."""

    def __init__(self, program: Program, rank: int, sizes: Mapping[str, int]) -> None:
        self.program = program
        self.rank = rank
        self.sizes = sizes
        self.ops = IssuedOps()
        self.registers = RegisterTable(program, rank, self.ops)
        self.communications = Communications(self.ops, self.registers)
        self.barriers: dict[tuple[int, ...], int] = {}  # by team: the number of its barriers so far

    def strided_inputs(self, inputs: Sequence[Strided | None]) -> list[RegisterView | None]:
        """Add registers for the inputs of the program, and return the inputs as tensors.

        The inputs get the layouts of the tensors `inputs`. An item is None if this rank holds no part of the input.
        """
        layouts = [None if x is None else (tuple(x.shape), tuple(x.stride())) for x in inputs]
        return [self.registers.input(value, layout) for value, layout in zip(self.program.inputs, layouts, strict=True)]

    def dense_inputs(self) -> list[RegisterView | None]:
        """Add registers for the inputs of the program, and return the inputs as dense tensors.

        An item is None if this rank holds no part of the input.
        """
        frame, parts = Frame(self, self.sizes), list[RegisterView | None]()
        for value in self.program.inputs:
            shape = frame.shape(value.tensor)
            layout = (shape, dense_strides(shape)) if frame.here(value.tensor.mesh) else None
            parts.append(self.registers.input(value, layout))
        return parts

    def finish(self, outputs: Sequence[RegisterView | None]) -> UnrolledProgram:
        self.communications.check_awaited()
        self.ops.stream = CALLER
        registers = self.registers
        results = tuple(registers.register(self.output(x)) for x in outputs)
        return UnrolledProgram(
            program=self.program,
            rank=self.rank,
            sizes=self.sizes,
            ops=self.communications.without_unused_marks(),
            inputs=range(1, 1 + len(self.program.inputs)),
            outputs=results,
            buffers=tuple(registers.buffers),
            layouts={register: x for x, register in registers.views.items()},
            dtypes=registers.dtypes,
            allocated=registers.allocated,
            symmetric=registers.symmetric,
        )

    def output(self, x: RegisterView | None) -> RegisterView | None:
        """Return an output as a tensor that the caller may keep.

        If the output is in a symmetric buffer, append a copy of it, because the next call reuses the buffer.
        """
        if x is None or x.buffer not in self.registers.symmetric:
            return x
        self.ops.place = self.registers.symmetric[x.buffer].place
        copy = self.registers.allocate(x.shape, self.registers.dtypes[x.buffer])
        self.registers.copy(self.registers.register(x), copy.buffer)
        return copy

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.ops.at(statement, rounds)

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> RegisterView:
        statement, rounds = self.ops.place
        name = next((v.name for v in statement.named), "")
        if not symmetric:
            return self.registers.allocate(shape, dtype, name)
        part = self.registers.symmetric_buffer(name, rounds, self.rank, shape, dtype)
        if part.shape != shape or self.registers.dtypes[part.buffer] != dtype:
            raise self.ops.fail(
                f"%{name} was allocated before with another shape or dtype", expected="one shape and dtype"
            )
        return part

    def free(self, x: RegisterView) -> None:
        self.registers.free(x)

    def select(self, x: RegisterView, axis: int, index: int) -> RegisterView:
        shape, strides, offset = x.shape, x.strides, x.offset + index * x.strides[axis]
        return RegisterView(x.buffer, shape[:axis] + shape[axis + 1 :], strides[:axis] + strides[axis + 1 :], offset)

    def chunk(self, x: RegisterView, axis: int, outer: int, count: int, index: int) -> RegisterView:
        shape, view = x.shape, self.registers.view
        cut = view(x, (*shape[:axis], outer, count, shape[axis] // (outer * count), *shape[axis + 1 :]))
        return view(self.select(cut, axis + 1, index), (*shape[:axis], shape[axis] // count, *shape[axis + 1 :]))

    def reshape(self, x: RegisterView, shape: tuple[int, ...]) -> RegisterView:
        return self.registers.view(x, shape)

    def permute(self, x: RegisterView, axes: tuple[int, ...]) -> RegisterView:
        shape, strides = tuple([x.shape[axis] for axis in axes]), tuple([x.strides[axis] for axis in axes])
        return RegisterView(x.buffer, shape, strides, x.offset)

    def dense(self, x: RegisterView) -> RegisterView:
        if x.dense:
            return x
        copy = self.registers.allocate(x.shape, self.registers.dtypes[x.buffer])
        self.registers.copy(self.registers.register(x), copy.buffer)
        return copy

    def compute(
        self,
        computation: str,
        out: RegisterView,
        operands: Sequence[RegisterView | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        ops, registers = self.ops, self.registers
        if ready is not None:
            flags, own_rows = registers.flags(ready.flags, ready.epoch), ready.own_rows
            ready = replace(ready, flags=flags, own_rows=None if own_rows is None else registers.register(own_rows))
        if done is not None:
            done = replace(done, flags=registers.flags(done.flags, done.epoch))
        sources, target = tuple(map(registers.register, operands)), registers.register(out)
        if ready is not None:
            overlapped, reserved = unavailable_sms(ops.issued, ops.ordered, ops.stream)
            ready = replace(ready, overlapped_sms=overlapped, reserved_sms=reserved)
        dtype = registers.dtypes[out.buffer]
        ops.add(ComputeOp(*ops.here, computation, dtype, target, sources, options, ready, done))

    def communicate(self, exchange: Exchange, x: RegisterView | None, out: RegisterView | None) -> Flight:
        return self.communications.communicate(exchange, x, out)

    def wait(self, handle: Flight | None) -> None:
        assert handle is not None
        self.communications.wait(handle)

    def copy(self, x: RegisterView, out: RegisterView, source: int, target: int, sms: int = 0) -> None:
        registers = self.registers
        for part in (x, out) if sms else ():
            registers.check_dense(part, "a copy by SMs, of a tensor that is not dense")
        x = x if source == self.rank else registers.at_rank(x, source)
        out = out if target == self.rank and not sms else registers.at_rank(out, target)
        self.ops.add(CopyOp(*self.ops.here, registers.register(x), registers.register(out), sms))

    def signal(self, flags: RegisterView, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        register = self.registers.flags(flags, epoch, peer)
        self.ops.add(SignalOp(*self.ops.here, register, slot, epoch, peer, sms))

    def wait_signal(self, flags: RegisterView, slot: int, epoch: int) -> None:
        register = self.registers.flags(flags, epoch)
        self.ops.add(WaitSignalOp(*self.ops.here, register, slot, epoch))

    def barrier(self, team: tuple[int, ...]) -> None:
        number = self.barriers.get(team, 0)
        self.barriers[team] = number + 1
        self.ops.mark_order()
        if len(team) > 1:
            self.ops.add(BarrierOp(*self.ops.here, team, number))

    def current_stream(self) -> StreamValue:
        return StreamValue(self.ops.stream)

    def set_stream(self, stream: StreamValue | int) -> None:
        self.ops.stream = self.stream_number(stream)

    def synchronize(self, stream: StreamValue | int) -> None:
        other = self.stream_number(stream)
        self.ops.mark_order()
        if other != self.ops.stream:
            self.ops.add(SynchronizeOp(*self.ops.here, other))

    def stream_number(self, stream: StreamValue | int) -> int:
        if isinstance(stream, StreamValue):
            return stream.number
        if not 0 <= stream < self.program.streams:
            pool = self.program.streams
            raise self.ops.fail(
                f"no stream {stream} in a pool of {pool}",
                expected=f"0 to {pool - 1}" if pool else "a program with 'streams N' in its head",
            )
        return stream

    def delay(self, microseconds: int) -> None:
        self.ops.add(DelayOp(*self.ops.here, microseconds))


def unavailable_sms(ops: Sequence[Op], ordered: int, stream: int) -> tuple[int, int]:
    """Return two numbers of SMs that a waiting kernel does not get: `overlapped_sms` and `reserved_sms`.

    `overlapped_sms` counts the SMs of the copies directly before the kernel, which may still run. `reserved_sms` counts
    the SMs that the kernel leaves free for signals by SMs.

    Args:
        ops: the operations before the kernel in the call.
        ordered: the number of these operations that come before the latest statement that orders streams.
        stream: the kernel's stream.
    """
    reserved = any(isinstance(op, SignalOp) and op.sms for op in ops)
    return _copying(ops[ordered:], stream), int(reserved)


def _copying(ops: Sequence[Op], stream: int) -> int:
    """Return the number of SMs on which the copies at the end of `ops` run.

    Only copies by SMs on `stream` count. If there are no such copies, the result is 0. A waiting kernel that is issued
    next may overlap these copies and their signals.
    """
    latest = (op for op in reversed(ops) if not op.defines)
    last = next(latest, None)
    if isinstance(last, SignalOp) and not last.sms and last.stream == stream:
        last = next(latest, None)
    return last.sms if isinstance(last, CopyOp) and last.stream == stream else 0
