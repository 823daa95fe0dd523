"""Trace the work of a rank as events, with their accesses to memory and the order of the events within the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from hostir.check.tracing.blocks import trace_by_blocks
from hostir.check.tracing.events import Event, Flag
from hostir.check.tracing.memory import Buffer, View, access, access_all, dense, strides_in
from hostir.check.tracing.misuse import Misuse
from hostir.check.tracing.trace import RankTrace
from hostir.ir.machine import Done, Exchange, Frame, OptionalMethods, Ready, interpret
from hostir.ir.op import Phase, Value
from hostir.ir.program import Program
from hostir.ir.types import DType, bind_shape


class Tracer(OptionalMethods):
    """A machine that executes nothing, but records the events that one rank issues.

    Each `call` evaluates the statements of the program, as every machine does, and adds the events of the rank to
    `trace`. Tensors are views of buffers.
    """

    frame: ClassVar[type[Frame]] = Frame

    def __init__(self, rank: int, program: Program, sizes: Mapping[str, int]) -> None:
        self.rank: int = rank
        self.program = program
        self.sizes = sizes
        self.trace = RankTrace(rank, sizes)
        self.misuse = Misuse(self.trace)
        self.inputs = [self._input(v) for v in program.inputs]
        self.copies: list[View] = []  # results of `dense` in this call

    def _input(self, value: Value) -> View | None:
        mesh = value.tensor.mesh
        if mesh is not None and self.rank not in mesh.places:
            return None
        shape = bind_shape(value.tensor.local_shape, self.sizes)
        return dense(Buffer(self.rank, value.name, prod(shape), value, persists=True), shape)

    def call(self) -> None:
        """Trace one call of the program, with the actions of its caller.

        The caller first writes the inputs. After the program it reads the outputs, and then overwrites inputs and
        outputs. All these actions are on the caller's stream.
        """
        trace = self.trace
        trace.at_caller()
        trace.step("writes", [access(x, "writes") for x in self.inputs if x])
        handles = interpret(self.program, self, self.sizes, self.inputs, trace, self.frame)
        outputs: list[View | None] = [h for h in handles if h is None or isinstance(h, View)]
        self.misuse.end_call(zip(self.program.outputs, outputs, strict=True))
        trace.step("reads", [access(x, "reads") for x in outputs if x])
        trace.step("overwrites", [access(x, "undefines") for x in (*self.inputs, *self.copies, *outputs) if x])
        self.copies.clear()
        trace.turn += 1

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> View:
        value = self.trace.statement.buffer if self.trace.statement else None
        name = value.name if value else "buffer"
        if not symmetric:
            buffer = Buffer(self.rank, name, prod(shape), value)
            self.misuse.allocated.append(buffer)
            # The event is on the stream, because the memory's previous user may still use it there. It is not added by
            # `step`: a waiting kernel may overlap copies by SMs even if an `allocate` comes between them.
            self.trace.follow(self.trace.event("allocates", [access_all(buffer, "undefines")]), self.trace.current)
            return dense(buffer, shape)
        buffer = Buffer(self.rank, name, prod(shape), value, persists=True)
        return dense(self.trace.kept.setdefault(name, buffer), shape)

    def free(self, x: View) -> None:
        if self.misuse.free(x.buffer):
            self.trace.step("frees", [access_all(x.buffer, "frees")])

    def select(self, x: View, axis: int, index: int) -> View:
        return x.select(axis, index)

    def chunk(self, x: View, axis: int, outer: int, count: int, index: int) -> View:
        extent = x.shape[axis] // count
        shape = (*x.shape[:axis], extent, *x.shape[axis + 1 :])
        return View(x.buffer, x.offset + index * extent * x.strides[axis], shape, x.strides)

    def reshape(self, x: View, shape: tuple[int, ...]) -> View:
        strides = strides_in(x, shape)
        if strides is None:
            layout = f"shape {list(x.shape)} with strides {list(x.strides)}"
            raise self.trace.fail(f"no view of {layout} has shape {list(shape)}", hint="copy it first")
        return View(x.buffer, x.offset, shape, strides)

    def permute(self, x: View, axes: tuple[int, ...]) -> View:
        return x.permute(axes)

    def dense(self, x: View) -> View:
        """Return a dense copy of an input.

        The contents of the copy become undefined at the end of the call, as do the contents of the input.
        """
        value = self.trace.statement.defines(Phase.HOST) if self.trace.statement else None
        copy = dense(Buffer(self.rank, value.name if value else "copy", prod(x.shape), value, persists=True), x.shape)
        # The event is not added by `step`: nothing is issued for a dense input, and then a waiting kernel may overlap
        # copies by SMs before the `dense`.
        self.trace.follow(
            self.trace.event("copies", [access(x, "reads"), access(copy, "writes")], sms=True), self.trace.current
        )
        self.copies.append(copy)
        return copy

    def compute(
        self,
        computation: str,
        out: View,
        operands: Sequence[View | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        local = ready.own_rows if ready is not None else None
        self.misuse.use(out, *operands, local)
        self.misuse.overwrite(out, *operands, local)
        if ready is None and done is None:
            reads = [access(x, "reads") for x in operands if x is not None]
            self.trace.step("runs", [*reads, access(out, "writes")], sms=True)
            return
        trace_by_blocks(self.trace, out, operands, options.get("axis"), ready, done)

    def communicate(self, exchange: Exchange, x: View | None, out: View | None) -> Event:
        for does, tensor in (("reads", x), ("writes", out)):
            if tensor is not None and not tensor.dense:
                layout = f"shape {list(tensor.shape)} with strides {list(tensor.strides)}"
                raise self.trace.fail(f"it {does} {layout}", expected="a dense tensor", hint="copy it first")
        reads = [access(x, "reads")] if x and exchange.takes(self.rank) else []
        writes = [access(out, "writes")] if out and exchange.gives(self.rank) else []
        self.misuse.use(out if writes else None, x if reads else None)
        if reads and writes:
            self.misuse.overwrite(out, x)
        message = exchange.communication in ("send", "recv", "exchange")
        end = (self.trace.message if message else self.trace.collective)(exchange, x, out, reads, writes)
        self.misuse.start(end)
        return end

    def wait(self, handle: Event) -> None:
        if not self.misuse.wait(handle):
            return
        known = self.trace.step("waits", [], after=[handle])
        if handle.lane is None:  # only this wait shows that the communication has ended
            handle.ends.append((known.lane or (), known.tick))

    def current_stream(self) -> str:
        return self.trace.current

    def set_stream(self, stream: str | int) -> None:
        self.trace.current = self._stream(stream)

    def synchronize(self, stream: str | int) -> None:
        self.trace.step("waits", [], after=self.trace.issued(self._stream(stream)))

    def copy(self, x: View, out: View, source: int, target: int, sms: int = 0) -> None:
        if source == target and x.buffer is out.buffer and not x.equals(out) and x.region.meets(out.region):
            message = f"it copies a part of %{x.buffer.name} to another part that overlaps it, on the same rank"
            raise self.trace.fail(message, expected="parts that do not overlap, or the same view twice")
        if sms and not (x.dense and out.dense):
            raise self.trace.fail(
                "a copy by SMs, of a tensor that is not dense",
                expected="two dense tensors",
                hint="copy to a buffer first, or leave out 'by ... sms'",
            )
        self.misuse.use(out, x)
        accesses = [access(x, "reads", source), access(out, "writes", target)]
        if sms:
            self.trace.push("copies", accesses)
        else:
            self.trace.step("copies", accesses, sms=source == target)

    def signal(self, flags: View, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        pushing = self.trace.pushing.get(self.trace.current)
        alone = sms > 0 or pushing is None or pushing.signalled
        sent = self.trace.step("signals", [], sms=sms > 0) if alone else self.trace.push("signals", [])
        sent.small = sms > 0
        self.trace.signals.append(Flag(sent, peer, flags.buffer.name, slot, (self.trace.turn, epoch)))

    def wait_signal(self, flags: View, slot: int, epoch: int) -> None:
        waits = self.trace.step("waits", [])
        self.trace.waits.append(Flag(waits, self.rank, flags.buffer.name, slot, (self.trace.turn, epoch)))

    def barrier(self, team: tuple[int, ...]) -> None:
        self.trace.barriers.setdefault(team, []).append(self.trace.step("waits", []))

    def _stream(self, stream: str | int) -> str:
        if isinstance(stream, str):
            return stream
        if not 0 <= stream < self.program.streams:
            hint = f"write 'streams {stream + 1}' after the program's outputs" if stream > 0 else ""
            raise self.trace.fail(
                f"there is no stream {stream}", expected=f"an index below {self.program.streams}", hint=hint
            )
        return f"stream {stream}"
