"""The machine that takes notes: it turns a program, for one rank and one set of shapes, into a Recording.

Views cost nothing until something uses them: a chain of select, chunk and reshape becomes one strided view of its
buffer, and the same view is made once a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hostir.ir.interpret import Observer, interpret
from hostir.ir.machine import Exchange, Ready
from hostir.ir.op import Statement
from hostir.ir.program import Program
from hostir.ir.source import HostIRError, error
from hostir.ir.types import FLAG, DType
from hostir.runtime.messages import KINDS
from hostir.runtime.plan import (
    CALLER,
    EPOCHS,
    FLAGS,
    NONE,
    Allocate,
    Barrier,
    Collective,
    Compute,
    Copy,
    Delay,
    Free,
    Mark,
    Messages,
    Op,
    Place,
    Recording,
    Signal,
    Symmetric,
    Synchronize,
    View,
    Wait,
    WaitSignal,
    index_of,
)
from hostir.runtime.pushes import room
from hostir.runtime.sharding import torch_dtype

COLLECTIVES = ("allgather", "allreduce", "reduce_scatter", "alltoall")


def record(program: Program, rank: int, sizes: Mapping[str, int], inputs: Sequence[torch.Tensor | None]) -> Recording:
    """Unrolls a program for this rank and for tensors like `inputs`, of which only shapes, strides and dtypes count.

    Raises HostIRError where the program asks for what no machine can do: a stream outside the pool, a view that needs a
    copy, a communication of memory that is not dense or that nothing waits for, a use after free, a peer's memory that
    is not symmetric.
    """
    recorder = Recorder(program, rank, sizes)
    outputs = interpret(program, recorder, sizes, recorder.take(inputs), recorder)
    return recorder.finish(inputs, outputs)


@dataclass(frozen=True)
class Part:
    """A tensor while recording: the register of its buffer, and its place in it as a tensor without data."""

    buffer: int
    meta: torch.Tensor


@dataclass(frozen=True)
class Stream:
    """A stream value, as `current_stream` gives it."""

    number: int


@dataclass
class Flight:
    """A communication while recording."""

    handle: int
    op: Op
    waited: bool = False


@dataclass
class Recorder(Observer):
    """The machine that takes notes."""

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
        self.symmetric: dict[int, Symmetric] = {}  # by buffer
        self.homes: dict[tuple[str, tuple[int, ...], int], int] = {}  # by name, round and rank: a symmetric buffer
        self.barriers: dict[tuple[int, ...], int] = {}  # of each team: how many there were
        self.views: dict[tuple[Any, ...], int] = {}
        self.marked: set[int] = set()  # handles of Marks that another stream waits for
        self.ordered = 0  # how many operations there were when a statement last ordered a stream, perhaps without one
        self.alone: Flight | None = None  # the latest message of this rank to itself, in a team of one

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.place = Place(statement, rounds)

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        return self.place.statement.fail(message, expected=expected, hint=hint)

    def fail_layout(self, x: Part, message: str, expected: str) -> HostIRError:
        """An error for how a tensor lies in memory; it names the input, where the tensor is a view of one not dense."""
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

    def take(self, inputs: Sequence[torch.Tensor | None]) -> list[Part | None]:
        """A part for each input of a call."""
        parts: list[Part | None] = []
        for value, x in zip(self.program.inputs, inputs, strict=True):
            buffer = self.new_register()
            self.names[buffer] = value.name
            parts.append(None if x is None else self.whole(buffer, _like(x)))
        return parts

    # The machine protocol -----------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> Part:
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

    def free(self, x: Part) -> None:
        self.check_held(x)
        self.freed.add(x.buffer)
        if x.buffer in self.owned:
            self.emit(Free, buffer=x.buffer)

    def select(self, x: Part, axis: int, index: int) -> Part:
        return Part(x.buffer, x.meta.select(axis, index))

    def chunk(self, x: Part, axis: int, outer: int, count: int, index: int) -> Part:
        shape = x.meta.shape
        cut = self.view(x, (*shape[:axis], outer, count, shape[axis] // (outer * count), *shape[axis + 1 :]))
        piece = Part(x.buffer, cut.meta.select(axis + 1, index))
        return self.view(piece, (*shape[:axis], shape[axis] // count, *shape[axis + 1 :]))

    def reshape(self, x: Part, shape: tuple[int, ...]) -> Part:
        return self.view(x, shape)

    def permute(self, x: Part, axes: tuple[int, ...]) -> Part:
        return Part(x.buffer, x.meta.permute(axes))

    def dense(self, x: Part) -> Part:
        if x.meta.is_contiguous():
            return x
        copy = self.buffer(tuple(x.meta.shape), x.meta.dtype)
        self.emit(Compute, kind="copy", out=copy.buffer, operands=(self.register(x),), options={})
        return copy

    def compute(self, kind: str, out: Part, operands: Sequence[Part | None], options: Mapping[str, Any]) -> None:
        ready, others = options.get("ready"), {name: x for name, x in options.items() if name != "ready"}
        if isinstance(ready, Ready):
            flags, own = self.at_rank(ready.flags, self.rank), ready.own
            ready = replace(ready, flags=self.register(flags), own=None if own is None else self.register(own))
            self.check_epoch(ready.epoch)
        registers, target = tuple(map(self.register, operands)), self.register(out)
        sms = room(self.ops, self.ordered, self.stream) if ready else {}
        self.emit(Compute, kind=kind, out=target, operands=registers, options=others, ready=ready, **sms)

    def communicate(self, exchange: Exchange, x: Part | None, out: Part | None) -> Flight:
        for part, what in ((x, "sends"), (out, "fills")):
            if part is not None:
                self.check_dense(part, f"the tensor that {exchange.kind} {what} is not dense")
        if exchange.kind not in COLLECTIVES:
            return self.messages(exchange, x, out)
        if len(exchange.team) == 1 or exchange.kind == "allreduce":
            self.copy_here(x, out)
        if len(exchange.team) == 1:
            return self.start(Mark)
        source = self.register(out if exchange.kind == "allreduce" else x)
        return self.start(Collective, kind=exchange.kind, team=exchange.team, x=source, out=self.register(out))

    def wait(self, handle: Flight | None) -> None:
        assert handle is not None
        handle.waited = True
        self.follow(handle)

    def current_stream(self) -> Stream:
        return Stream(self.stream)

    def set_stream(self, stream: Stream | int) -> None:
        self.stream = self.number(stream)

    def synchronize(self, stream: Stream | int) -> None:
        other, self.ordered = self.number(stream), len(self.ops)
        if other != self.stream:
            self.emit(Synchronize, other=other)

    def delay(self, microseconds: int) -> None:
        self.emit(Delay, microseconds=microseconds)

    def copy(self, x: Part, out: Part, source: int, target: int, sms: int = 0) -> None:
        for part in (x, out) if sms else ():
            self.check_dense(part, "SMs copy between dense tensors")
        x = x if source == self.rank else self.at_rank(x, source)
        out = out if target == self.rank and not sms else self.at_rank(out, target)
        self.emit(Copy, x=self.register(x), out=self.register(out), sms=sms)

    def signal(self, flags: Part, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        self.check_epoch(epoch)
        self.emit(Signal, flags=self.register(self.at_rank(flags, peer)), slot=slot, epoch=epoch, peer=peer, sms=sms)

    def wait_signal(self, flags: Part, slot: int, epoch: int) -> None:
        self.check_epoch(epoch)
        self.emit(WaitSignal, flags=self.register(self.at_rank(flags, self.rank)), slot=slot, epoch=epoch)

    def barrier(self, team: tuple[int, ...]) -> None:
        number = self.barriers.get(team, 0)
        self.barriers[team], self.ordered = number + 1, len(self.ops)
        if len(team) > 1:
            self.emit(Barrier, team=team, number=number)

    # How it takes them --------------------------------------------------------------------------------------------
    def emit(self, op: type[Op], /, **fields: Any) -> Op:
        self.ops.append(op(self.place, self.stream, **fields))
        return self.ops[-1]

    def new_register(self, buffer: int = NONE) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Part:
        buffer = self.new_register()
        self.owned.add(buffer)
        self.emit(Allocate, out=buffer, shape=shape, dtype=dtype)
        return self.whole(buffer, torch.empty(shape, dtype=dtype, device="meta"))

    def home(self, name: str, rounds: tuple[int, ...], rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Part:
        """A rank's symmetric buffer, made known by an operation the first time that this rank names it."""
        place = name, rounds, rank
        if place in self.homes:
            return Part(self.homes[place], self.metas[self.homes[place]])
        buffer = self.homes[place] = self.new_register()
        self.names[buffer] = name
        op = Symmetric(self.place, self.stream, buffer, name, rounds, shape, dtype, rank)
        self.symmetric[buffer] = op
        self.ops.append(op)
        return self.whole(buffer, torch.empty(shape, dtype=dtype, device="meta"))

    def at_rank(self, x: Part, rank: int) -> Part:
        """The same view of a rank's buffer. Raises for a view of what is not symmetric."""
        own, name = self.symmetric.get(x.buffer), self.names[x.buffer]
        if own is None:
            raise self.fail(f"%{name} is not symmetric", expected="a view of what allocate_symmetric gives")
        return Part(self.home(own.name, own.rounds, rank, own.shape, own.dtype).buffer, x.meta)

    def check_dense(self, x: Part, message: str) -> None:
        if not x.meta.is_contiguous():
            expected = f"the strides of a dense {list(x.meta.shape)}, not {list(x.meta.stride())}"
            raise self.fail_layout(x, message, expected)

    def check_epoch(self, epoch: int) -> None:
        if epoch >= EPOCHS:
            raise self.fail(f"epoch {epoch} of a flag", expected=f"at most {EPOCHS - 1}")

    def whole(self, buffer: int, meta: torch.Tensor) -> Part:
        """A new buffer, as the tensor that it is."""
        self.buffers[buffer] = buffer
        self.metas[buffer] = meta
        self.views[_key(buffer, meta)] = buffer
        return Part(buffer, meta)

    def register(self, x: Part | None) -> int:
        """The register of a tensor, made by a View where it has none yet."""
        if x is None:
            return NONE
        self.check_held(x)
        key = _key(x.buffer, x.meta)
        if key not in self.views:
            self.views[key] = self.new_register(x.buffer)
            _, shape, stride, offset = key
            index = index_of(self.metas[x.buffer], x.meta)
            self.emit(View, out=self.views[key], x=x.buffer, shape=shape, stride=stride, offset=offset, index=index)
        return self.views[key]

    def check_held(self, x: Part) -> None:
        if x.buffer in self.freed:
            raise self.fail("the memory of an operand was freed earlier", hint="free it after its last use, and once")

    def view(self, x: Part, shape: tuple[int, ...]) -> Part:
        try:
            return Part(x.buffer, x.meta.view(shape))
        except RuntimeError:
            old, strides = list(x.meta.shape), list(x.meta.stride())
            seen = f"shape {old} with strides {strides} cannot be seen as {list(shape)}"
            raise self.fail_layout(x, seen, "memory that lies in the order of the new shape") from None

    def number(self, stream: Stream | int) -> int:
        if isinstance(stream, Stream):
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
        """The current stream goes on after a communication."""
        self.ordered = len(self.ops)
        if isinstance(handle.op, Mark):
            if handle.op.stream == self.stream:
                return
            self.marked.add(handle.handle)
        self.emit(Wait, handle=handle.handle)

    def copy_here(self, x: Part | None, out: Part | None) -> None:
        """A copy between dense tensors of equal size, nothing where they are the same memory."""
        source, target = self.register(self.block(x, 0, 1)), self.register(self.block(out, 0, 1))
        if source != target:
            self.emit(Compute, kind="copy", out=target, operands=(source,), options={})

    def messages(self, exchange: Exchange, x: Part | None, out: Part | None) -> Flight:
        collective, alone = exchange.kind not in KINDS, len(exchange.team) == 1
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
            return self.start(Messages, team=exchange.team, **pieces, collective=collective)
        flight = self.start(Mark)
        if not collective:
            self.alone = flight
        return flight

    def block(self, x: Part | None, index: int, count: int) -> Part:
        assert x is not None
        size, rest = divmod(x.meta.numel(), count)
        if rest:
            raise self.fail(f"{x.meta.numel()} elements do not divide in {count} blocks")
        return Part(x.buffer, x.meta.view(-1).narrow(0, index * size, size))

    def finish(self, inputs: Sequence[torch.Tensor | None], outputs: Sequence[Part | None]) -> Recording:
        if flight := next((f for f in self.flights if not f.waited), None):
            raise flight.op.place.statement.fail(
                "nothing waits for this communication", hint="add 'wait' with its handle before the result is read"
            )
        self.stream = CALLER
        registers = tuple(self.register(self.callers(x)) for x in outputs)
        held = range(1, 1 + len(inputs))
        ops = tuple(op for op in self.ops if not isinstance(op, Mark) or op.handle in self.marked)
        return Recording(self.program, self.rank, self.sizes, ops, held, registers, tuple(self.buffers))

    def callers(self, x: Part | None) -> Part | None:
        """An output as the caller may own it: of a symmetric buffer, which the next call goes on with, a copy."""
        if x is None or x.buffer not in self.symmetric:
            return x
        self.place = self.symmetric[x.buffer].place
        taken = self.buffer(tuple(x.meta.shape), x.meta.dtype)
        self.emit(Compute, kind="copy", out=taken.buffer, operands=(self.register(x),), options={})
        return taken


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _key(buffer: int, meta: torch.Tensor) -> tuple[Any, ...]:
    return buffer, tuple(meta.shape), meta.stride(), meta.storage_offset()
