"""Trace the work of each rank as events: their memory accesses, and the happens-before edges within the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Any, ClassVar, Literal

from hostir.ir.machine import Done, Exchange, Frame, Observer, OptionalMethods, Ready, interpret
from hostir.ir.op import Codec, Phase, Statement, Value
from hostir.ir.program import Program
from hostir.ir.regions import Region
from hostir.ir.source import Diagnostic, HostIRError, Span, error
from hostir.ir.types import DType, bind_shape

# Memory ---------------------------------------------------------------------------------------------------------------
# The checker's model of memory: buffers of each rank, strided views of them, and accesses to views.


@dataclass(eq=False, slots=True)
class Buffer:
    """A buffer of one rank. `persists`: the program need not free it (inputs, symmetric buffers, copies by `dense`)."""

    rank: int
    name: str
    elements: int
    value: Value | None = None
    persists: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a buffer, in elements."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def region(self) -> Region:
        return Region.of(self.offset, self.shape, self.strides)

    @property
    def dense(self) -> bool:
        """True if the elements are contiguous, in row-major order."""
        pairs = zip(self.shape, self.strides, packed(self.shape), strict=True)
        return 0 in self.shape or all(n == 1 or s == p for n, s, p in pairs)

    def equals(self, other: View) -> bool:
        """Return True if both views have the same elements at the same indices."""
        if self.buffer is not other.buffer or self.offset != other.offset or self.shape != other.shape:
            return False
        return all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, other.strides, strict=True))


Does = Literal["reads", "writes", "undefines", "frees"]


@dataclass(frozen=True, slots=True)
class Access:
    """One access to memory: to this rank's `buffer` if `rank` is -1, else to the peer `rank`'s buffer of the same name.

    An access that `undefines` elements leaves them undefined: nothing may read them before something writes them.
    """

    buffer: Buffer
    region: Region
    does: Does
    rank: int = -1

    @property
    def writes(self) -> bool:
        """True if the access may change bytes, so that every other access must be ordered with it."""
        return self.does != "reads"


def access(view: View, does: Does, rank: int = -1) -> Access:
    """Return an access to a view. `rank` owns the memory that is accessed; -1 for the view's rank."""
    peer = rank if rank not in (-1, view.buffer.rank) else -1
    return Access(view.buffer, view.region, does, peer)


def access_all(buffer: Buffer, does: Does) -> Access:
    """Return an access to all elements of this rank's buffer."""
    return Access(buffer, Region.of(0, (buffer.elements,), (1,)), does)


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def dense(buffer: Buffer, shape: tuple[int, ...]) -> View:
    """Return a dense view of all elements of a buffer."""
    return View(buffer, 0, shape, packed(shape))


def rows_of(x: View, block: int, blocks: int, inner: int = 1) -> View | None:
    """Return one of `blocks` equal blocks of the rows of `x`, or None if the block is not a view.

    Rows span all axes but the last `inner` axes. Blocks cut the first of the row axes; or they cut the second within
    each index of the first, and so on. Axes that merge count as one.
    """
    last = max(len(x.shape) - inner, 0)
    offset, axes = x.offset, list(_merged(x.shape[:last], x.strides[:last]))
    while blocks > 1 and axes:
        extent, stride = axes.pop(0)
        if extent % blocks == 0:
            offset += block * (extent // blocks) * stride
            axes.insert(0, (extent // blocks, stride))
            blocks = 1
        elif blocks % extent == 0:
            blocks //= extent
            offset, block = offset + block // blocks * stride, block % blocks
        else:
            return None
    shape, strides = (n for n, _ in axes), (s for _, s in axes)
    return View(x.buffer, offset, (*shape, *x.shape[last:]), (*strides, *x.strides[last:]))


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return extents and strides of axes: adjacent axes are merged where possible, axes of extent 1 are dropped."""
    merged: list[tuple[int, int]] = []
    for n, s in zip(shape, strides, strict=True):
        if n != 1 and merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        elif n != 1:
            merged.append((n, s))
    return tuple(merged)


def strides_in(x: View, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a view reshaped to `shape`, or None if that needs a copy."""
    if 0 in x.shape:
        return packed(shape)
    merged = [*_merged(x.shape, x.strides)]
    strides: list[int] = []
    for n in reversed(shape):
        if n == 1:
            strides.append(1)
            continue
        while merged and merged[-1][0] == 1:
            merged.pop()
        if not merged or merged[-1][0] % n:
            return None
        extent, stride = merged.pop()
        strides.append(stride)
        merged.append((extent // n, stride * n))
    return tuple(reversed(strides))


# The tracer -----------------------------------------------------------------------------------------------------------
# The tracer is a `hostir.ir.machine.Machine` that executes nothing. A statement is evaluated on it as on every machine,
# and the tracer records the statement's reads, writes and waits. Its tensors are views of buffers.

CALLER = "caller's stream"
Lane = tuple[object, ...]  # a sequence whose events happen in order, such as a stream: (rank, stream)
Ends = list[tuple[Lane, int]]  # ticks of lanes: once one of them is in a vector clock, the event has ended


@dataclass(eq=False, slots=True, repr=False)  # a repr would print all earlier events as well
class Event:
    """A moment in the run of one rank, such as the start or the end of a statement.

    Fields:
        number: the number of events that its rank issued before it.
        lane, tick: its lane, and its position there from 1; None and 0 if only its edges order it.
        ends: ticks of lanes; any one of them shows that the event has ended. By default its own tick.
        after: the events that directly happen before it.
        held: other events that it has to wait for on some machines or at some sizes. They can cause a deadlock, but
            they order nothing.
        verb: its action, for messages; `statement` is None for actions of the caller.
        sms: True if it needs SMs.
        small: True if one SM is enough: the SM that a waiting kernel leaves to events issued before the kernel.
        seen: computes its vector clock, as a new array, from the clock of the event that it follows; None if the two
            clocks are equal.
    """

    rank: int
    call: int
    verb: str
    statement: Statement | None
    rounds: tuple[int, ...]
    stream: str
    number: int = 0
    lane: Lane | None = None
    tick: int = 0
    after: list[Event] = field(default_factory=list)
    held: list[Event] = field(default_factory=list)
    ends: Ends = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    sms: bool = False
    small: bool = False
    seen: Callable[[Any], Any] | None = None


@dataclass(eq=False, slots=True)
class Side:
    """One rank's side of a collective or message. Event `take` reads `x`, `give` writes `out`; they may be the same."""

    exchange: Exchange
    x: View | None
    out: View | None
    begin: Event
    take: Event
    give: Event
    end: Event


@dataclass(eq=False, slots=True)
class Flag:
    """A signal sent, or a wait for one, of the flag `slot` of the symmetric buffer `flags` at `rank`."""

    event: Event
    rank: int
    flags: str
    slot: int
    epoch: tuple[int, int]  # call, epoch

    @property
    def place(self) -> tuple[int, str, int]:
        return self.rank, self.flags, self.slot


@dataclass(eq=False, slots=True)
class Pushing:
    """The copies by SMs, and their signals, at the end of a stream so far.

    Rule 12 of docs/memory-model.md lets a waiting kernel overlap them.

    Fields:
        begin: the start of the first copy, after all earlier events of the stream.
        last: the last copy or signal; they run one after the other.
        signalled: True if `last` is a signal.
    """

    begin: Event
    last: Event
    signalled: bool = False


@dataclass(eq=False, slots=True)
class WaitingKernel:
    """A computation that holds SMs while it waits for flags. `overlapped`: the last copy that it may overlap."""

    start: Event
    end: Event
    overlapped: Event | None = None
    waits: list[Flag] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class BlockEvents:
    """The events of a computation by blocks of rows. Each event lies in one block of `ready` and in one of `done`.

    Fields:
        units: the events that write the result, in the order of its rows.
        parts: the events that read the operand with awaited blocks, source by source; for a product, `units` itself.
        waits, signals: the flags, in the order of parts and of units.
    """

    ready: Ready | None
    done: Done | None
    units: list[Event]
    parts: list[Event]
    waits: list[Flag] = field(default_factory=list)
    signals: list[Flag] = field(default_factory=list)


class Tracer(Observer, OptionalMethods):
    """Traces one rank: each `call` adds the events that the rank issues to `events`.

    `hostir.check.order.Order` joins its `collectives`, `messages`, `barriers`, `signals` and `waits` with other ranks.
    """

    frame: ClassVar[type[Frame]] = Frame

    def __init__(self, rank: int, program: Program, sizes: Mapping[str, int]) -> None:
        self.rank: int = rank
        self.program = program
        self.sizes = sizes
        self.events: list[Event] = []
        self.tails: dict[Lane, Event] = {}
        self.pushing: dict[str, Pushing] = {}  # by stream
        self.current = CALLER
        self.turn = 0  # the number of the call, from 0
        self.statement: Statement | None = None
        self.rounds: tuple[int, ...] = ()
        self.inputs = [self._input(v) for v in program.inputs]
        self.copies: list[View] = []  # results of `dense` in this call
        self.buffers: list[Buffer] = []  # results of `allocate`, over all calls
        self.kept: dict[str, Buffer] = {}  # symmetric buffers by name, from the first call on
        self.collectives: dict[tuple[int, ...], list[Side]] = {}  # by team
        self.messages: dict[tuple[int, ...], list[Side]] = {}
        self.barriers: dict[tuple[int, ...], list[Event]] = {}
        self.signals: list[Flag] = []
        self.waits: list[Flag] = []
        self.kernels: list[WaitingKernel] = []
        self.by_blocks: list[BlockEvents] = []
        self.outputs: list[list[View | None]] = []  # of each call
        self.problems: dict[tuple[int, str], Diagnostic] = {}  # misuse, by statement and message, in issue order
        self.freed: dict[Buffer, Statement] = {}
        self.in_flight: dict[Event, Statement] = {}  # communications not yet waited for, by their end
        self.waited: dict[Event, Statement] = {}

    def _input(self, value: Value) -> View | None:
        mesh = value.tensor.mesh
        if mesh is not None and self.rank not in mesh.places:
            return None
        shape = bind_shape(value.tensor.local_shape, self.sizes)
        return dense(Buffer(self.rank, value.name, prod(shape), value, persists=True), shape)

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.statement, self.rounds = statement, rounds

    def call(self) -> None:
        """Trace one call of the program.

        On its stream the caller first writes the inputs; at the end it reads the outputs, then overwrites both.
        """
        self.current, self.statement, self.rounds = CALLER, None, ()
        self.step("writes", [access(x, "writes") for x in self.inputs if x])
        handles = interpret(self.program, self, self.sizes, self.inputs, self, self.frame)
        outputs: list[View | None] = [h for h in handles if h is None or isinstance(h, View)]
        self.outputs.append(outputs)
        for statement in self.in_flight.values():
            self.statement, handle = statement, statement.defines(Phase.HOST)
            self.refuse(f"{handle} is never waited for", hint=f"add 'wait {handle}' before its result is used")
        self.in_flight.clear()
        self.statement, self.rounds, self.current = None, (), CALLER
        for value, x in zip(self.program.outputs, outputs, strict=True):
            if x is not None and (freed := self.freed.get(x.buffer)):
                named = f"{value}" if value.name == x.buffer.name else f"{value}, a view of %{x.buffer.name},"
                self.refuse(f"the output {named} was freed", freed.span)
        self.step("reads", [access(x, "reads") for x in outputs if x])
        self.step("overwrites", [access(x, "undefines") for x in (*self.inputs, *self.copies, *outputs) if x])
        self.copies.clear()
        self.turn += 1

    def lasting(self) -> Iterator[tuple[Event, Event]]:
        """Yield start and end of work that may hold SMs until other ranks act: waiting kernels and communications."""
        yield from ((kernel.start, kernel.end) for kernel in self.kernels)
        for sides in (*self.collectives.values(), *self.messages.values()):
            yield from ((side.begin, side.end) for side in sides)

    # Events ---------------------------------------------------------------------------------------------------------
    def event(self, verb: str, accesses: list[Access], after: Sequence[Event] = (), sms: bool = False) -> Event:
        """Add an event of the current statement, without putting it on a lane."""
        event = Event(self.rank, self.turn, verb, self.statement, self.rounds, self.current, len(self.events))
        event.accesses = [a for a in accesses if not a.region.empty]
        event.after, event.sms = list(after), sms
        self.events.append(event)
        return event

    def tail(self, *lane: object) -> list[Event]:
        """Return the last event of a lane, if any."""
        last = self.tails.get((self.rank, *lane))
        return [last] if last else []

    def issued(self, stream: str) -> list[Event]:
        """Return the last events of a stream: once they have ended, everything issued to it so far has ended."""
        return self.tail(stream) + ([self.pushing[stream].last] if stream in self.pushing else [])

    def follow(self, event: Event, *lane: object) -> Event:
        """Put an event at the end of a lane."""
        key = (self.rank, *lane)
        before = self.tails.get(key)
        if before is not None:
            event.after.append(before)
        event.lane, event.tick = key, before.tick + 1 if before else 1
        event.ends.append((key, event.tick))
        self.tails[key] = event
        return event

    def step(self, verb: str, accesses: list[Access], after: Sequence[Event] = (), sms: bool = False) -> Event:
        """Add an event on the current stream, after everything issued to it so far."""
        pushing = self.pushing.pop(self.current, None)
        earlier = [*after, pushing.last] if pushing else after
        return self.follow(self.event(verb, accesses, earlier, sms), self.current)

    def push(self, verb: str, accesses: list[Access]) -> Event:
        """Add a copy by SMs, or the signal directly after one: a waiting kernel may overlap it."""
        pushing = self.pushing.get(self.current)
        if pushing is None:
            begin = self.step("begins", [])
            pushing = self.pushing[self.current] = Pushing(begin, begin)
        event = self.follow(self.event(verb, accesses, [pushing.last], sms=bool(accesses)), "pushes", self.current)
        pushing.last, pushing.signalled = event, not accesses
        return event

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        span = self.statement.span if self.statement else None
        return error(f"rank {self.rank}: {message}", span, expected=expected, hint=hint)

    # Misuse that shows while one rank is traced ----------------------------------------------------------------------
    def refuse(
        self,
        message: str,
        at: Span | None = None,
        *,
        expected: str = "",
        hint: str = "",
        notes: tuple[tuple[Span | None, str], ...] = (),
    ) -> None:
        """Record a misuse by the current statement, once for all its rounds."""
        span = at or (self.statement.span if self.statement else None)
        self.problems.setdefault((id(self.statement), message), Diagnostic(message, span, expected, hint, notes))

    def use(self, out: View | None, *reads: View | None) -> None:
        """Report a freed buffer that the current statement reads or writes."""
        s, read = self.statement, [x for x in reads if x is not None]
        if s is None or not self.freed:
            return
        for value, x in (*zip(s.reads, read, strict=False), (next(s.values(Codec.WRITE), None), out)):
            if x is not None and value is not None and (freed := self.freed.get(x.buffer)):
                name = x.buffer.name
                what = "it was freed" if value.name == name else f"its buffer %{name} was freed"
                self.refuse(f"{value} is used after {what}", notes=((freed.span, "freed here"),))

    def overwrite(self, out: View | None, *reads: View | None) -> None:
        """Report an overlap between the view that the current statement writes and the views that it reads."""
        s = self.statement
        read = [x for x in reads if x is not None]
        if s is None or out is None or all(x.buffer is not out.buffer for x in read):
            return
        result = next(s.values(Codec.WRITE))
        for n, (value, x) in enumerate(zip(s.reads, read, strict=True)):
            if x.buffer is not out.buffer or not x.region.meets(out.region):
                continue
            if x.equals(out) and s.in_place(n):
                continue
            both = "" if value == result else f" {value}, and both are memory of %{x.buffer.name}"
            self.refuse(
                f"{s.keyword()} writes {result} while it reads{both or ' it'}",
                expected="memory that overlaps no operand; only elementwise statements and allreduce may write "
                "exactly the view that they read",
                hint="allocate a buffer for the result",
            )
            return

    # The methods of `hostir.ir.machine.Machine` ----------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> View:
        value = self.statement.buffer if self.statement else None
        name = value.name if value else "buffer"
        if not symmetric:
            self.buffers.append(buffer := Buffer(self.rank, name, prod(shape), value))
            # In stream order, as the previous owner of the memory may still use it there. Not by `step`: a waiting
            # kernel may overlap copies by SMs even if an `allocate` comes between them.
            self.follow(self.event("allocates", [access_all(buffer, "undefines")]), self.current)
            return dense(buffer, shape)
        return dense(self.kept.setdefault(name, Buffer(self.rank, name, prod(shape), value, persists=True)), shape)

    def free(self, x: View) -> None:
        if (before := self.freed.get(x.buffer)) is not None:
            first = ((before.span, "first here"),)
            self.refuse(f"%{x.buffer.name} is freed twice", hint="free it once", notes=first)
            return
        assert self.statement is not None
        self.freed[x.buffer] = self.statement
        self.step("frees", [access_all(x.buffer, "frees")])

    def select(self, x: View, axis: int, index: int) -> View:
        shape = x.shape[:axis] + x.shape[axis + 1 :]
        strides = x.strides[:axis] + x.strides[axis + 1 :]
        return View(x.buffer, x.offset + index * x.strides[axis], shape, strides)

    def chunk(self, x: View, axis: int, outer: int, count: int, index: int) -> View:
        extent = x.shape[axis] // count
        shape = (*x.shape[:axis], extent, *x.shape[axis + 1 :])
        return View(x.buffer, x.offset + index * extent * x.strides[axis], shape, x.strides)

    def reshape(self, x: View, shape: tuple[int, ...]) -> View:
        strides = strides_in(x, shape)
        if strides is None:
            layout = f"shape {list(x.shape)} with strides {list(x.strides)}"
            raise self.fail(f"no view of {layout} has shape {list(shape)}", hint="copy it first")
        return View(x.buffer, x.offset, shape, strides)

    def permute(self, x: View, axes: tuple[int, ...]) -> View:
        return View(x.buffer, x.offset, tuple(x.shape[a] for a in axes), tuple(x.strides[a] for a in axes))

    def dense(self, x: View) -> View:
        """Return a copy, which the caller overwrites at the end of the call, like the input."""
        value = self.statement.defines(Phase.HOST) if self.statement else None
        copy = dense(Buffer(self.rank, value.name if value else "copy", prod(x.shape), value, persists=True), x.shape)
        # Not by `step`: for a dense input nothing is issued, and a waiting kernel may overlap copies by SMs before it.
        self.follow(self.event("copies", [access(x, "reads"), access(copy, "writes")], sms=True), self.current)
        self.copies.append(copy)
        return copy

    def compute(
        self,
        kind: str,
        out: View,
        operands: Sequence[View | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        local = ready.own if ready is not None else None
        self.use(out, *operands, local)
        self.overwrite(out, *operands, local)
        if ready is None and done is None:
            reads = [access(x, "reads") for x in operands if x is not None]
            self.step("runs", [*reads, access(out, "writes")], sms=True)
            return
        pushing = self.pushing.pop(self.current, None) if ready else None  # the kernel may overlap these copies
        start = self.step("starts", [], sms=True)
        blocks = self._blocks(start, out, operands, options.get("axis"), ready, done)
        last = [flag.event for flag in blocks.signals] or blocks.units
        end = self.step("ends", [], after=[*last, *([pushing.last] if pushing else [])])
        for event in last:  # earlier events share this list
            event.ends.append((end.lane or (), end.tick))
        self.waits += blocks.waits
        self.signals += blocks.signals
        self.by_blocks.append(blocks)
        if ready is not None:
            self.kernels.append(WaitingKernel(start, end, pushing.last if pushing else None, blocks.waits))

    def _blocks(
        self,
        start: Event,
        out: View,
        operands: Sequence[View | None],
        axis: int | None,
        ready: Ready | None,
        done: Done | None,
    ) -> BlockEvents:
        """Add the events of a computation by blocks: a product, or a sum over an axis."""
        x, *others = [x for x in operands if x is not None]
        of_rows = ready.along if ready else done.along if done else ()
        cut_alike = [view for n, view in enumerate(operands) if view is not None and n in of_rows]
        sources, inner = [x], 1
        if axis is not None and ready is not None:
            sources = [self.select(x, axis, n) for n in range(x.shape[axis])]
        elif axis is not None:  # sources need not be told apart
            sources, inner = [self.permute(x, (*(n for n in range(len(x.shape)) if n != axis), axis))], 2
        count = lcm(ready.results if ready else 1, done.blocks if done else 1)
        uncut = [access(other, "reads") for other in others if other not in cut_alike]
        writes = [access(self._rows(out, n, count), "writes") for n in range(count)]
        parts, waits = list[Event](), list[Flag]()
        for source, rows in enumerate(sources):
            for n in range(count):
                block = (source * count + n) * ready.results // count if ready else 0
                local = self._own(ready, source * count + n, count) if ready and block in ready.replaced else None
                accesses = [access(local, "reads")] if local else []
                accesses += [access(self._rows(rows, n, count, inner), "undefines" if local else "reads"), *uncut]
                accesses += [access(self._rows(other, n, count), "reads") for other in cut_alike]
                accesses += writes[n : n + 1] if axis is None else []
                parts.append(part := self.event("runs", accesses, [start]))
                if ready and not local:
                    waits.append(Flag(part, self.rank, ready.flags.buffer.name, block, (self.turn, ready.epoch)))
        units = parts
        if axis is not None:
            units = [self.event("runs", writes[n : n + 1], parts[n::count]) for n in range(count)]
        blocks = BlockEvents(ready, done, units, parts, waits)
        if done is not None:
            size = count // done.blocks
            for n in range(done.blocks):
                signal = self.event("signals", [], units[n * size : (n + 1) * size])
                place = done.flags.buffer.name, n, (self.turn, done.epoch)
                blocks.signals.append(Flag(signal, self.rank, *place))
        for n, unit in enumerate(units):  # an observer of the signal, or of the end, has seen all earlier events
            unit.ends = blocks.signals[n * done.blocks // count].event.ends if done else unit.ends
            for part in parts[n::count]:
                part.ends = unit.ends
        if ready is not None and done is not None:
            self._one_by_one(blocks, ready)
        return blocks

    def _one_by_one(self, blocks: BlockEvents, ready: Ready) -> None:
        """Make each block of the result wait for the previous block: a machine may compute them in order."""
        count = len(blocks.units)
        size, before = count // ready.results, list[Event]()
        for result in ready.order:
            units = range(result * size, (result + 1) * size)
            for n in units:
                for part in blocks.parts[n::count]:
                    part.held += before
            before = [blocks.units[n] for n in units]

    def _own(self, ready: Ready, part: int, count: int) -> View:
        """Return the rows of `own` for a part of the operand; each source has `count` parts."""
        size = count // ready.results
        assert isinstance(ready.own, View)
        return self._rows(ready.own, part - ready.own_first * size, ready.own_blocks * size)

    def _rows(self, x: View, block: int, blocks: int, inner: int = 1) -> View:
        rows = rows_of(x, block, blocks, inner)
        if rows is None:
            layout = f"shape {list(x.shape)} with strides {list(x.strides)}"
            raise self.fail(
                f"{blocks} blocks of the rows of {layout} are not views",
                expected="blocks that cut one axis, or cut the next axis within each index of it",
                hint="copy it first",
            )
        return rows

    def communicate(self, exchange: Exchange, x: View | None, out: View | None) -> Event:
        for does, tensor in (("reads", x), ("writes", out)):
            if tensor is not None and not tensor.dense:
                layout = f"shape {list(tensor.shape)} with strides {list(tensor.strides)}"
                raise self.fail(f"it {does} {layout}", expected="a dense tensor", hint="copy it first")
        reads = [access(x, "reads")] if x and exchange.takes(self.rank) else []
        writes = [access(out, "writes")] if out and exchange.gives(self.rank) else []
        self.use(out if writes else None, x if reads else None)
        if reads and writes:
            self.overwrite(out, x)
        message = exchange.kind in ("send", "recv", "exchange")
        end = (self._message if message else self._collective)(exchange, x, out, reads, writes)
        assert self.statement is not None
        self.in_flight[end] = self.statement
        return end

    def _collective(
        self, exchange: Exchange, x: View | None, out: View | None, reads: list[Access], writes: list[Access]
    ) -> Event:
        """Add the events of a collective, which may use its memory once this rank's stream reaches it (rule 3)."""
        team = tuple(sorted(exchange.team))
        sides = self.collectives.setdefault(team, [])
        moves = self.event("moves", [*reads, *writes], self.issued(self.current))
        begin = self.event("begins", [], self.issued(self.current), sms=True)
        begin.held += [side.end for side in sides[-1:]]
        end = self.event("ends", [], [moves, self.follow(begin, "team", team)])
        moves.ends = end.ends
        sides.append(Side(exchange, x, out, begin, moves, moves, end))
        return end

    def _message(
        self, exchange: Exchange, x: View | None, out: View | None, reads: list[Access], writes: list[Access]
    ) -> Event:
        team = exchange.team
        begin = self.event("begins", [], [*self.issued(self.current), *self.tail("messages", team)])
        take = self.follow(self.event("reads", reads, [begin], sms=True), "sends", team)
        give = self.follow(self.event("writes", writes, [begin], sms=True), "receives", team)
        end = self.follow(self.event("ends", [], [take, give]), "messages", team)
        self.messages.setdefault(team, []).append(Side(exchange, x, out, begin, take, give, end))
        return end

    def wait(self, handle: Event) -> None:
        assert self.statement is not None
        if handle in self.waited:
            name = next(self.statement.values(Codec.USE))
            first = ((self.waited[handle].span, "first here"),)
            self.refuse(f"{name} is waited for twice", hint="wait for it once", notes=first)
            return
        self.in_flight.pop(handle)
        self.waited[handle] = self.statement
        known = self.step("waits", [], after=[handle])
        if handle.lane is None:  # only this wait shows that the communication has ended
            handle.ends.append((known.lane or (), known.tick))

    def current_stream(self) -> str:
        return self.current

    def set_stream(self, stream: str | int) -> None:
        self.current = self._stream(stream)

    def synchronize(self, stream: str | int) -> None:
        self.step("waits", [], after=self.issued(self._stream(stream)))

    def copy(self, x: View, out: View, source: int, target: int, sms: int = 0) -> None:
        if source == target and x.buffer is out.buffer and not x.equals(out) and x.region.meets(out.region):
            message = f"it copies a part of %{x.buffer.name} to another part that overlaps it, on the same rank"
            raise self.fail(message, expected="parts that do not overlap, or the same view twice")
        if sms and not (x.dense and out.dense):
            raise self.fail(
                "a copy by SMs, of a tensor that is not dense",
                expected="two dense tensors",
                hint="copy to a buffer first, or leave out 'by ... sms'",
            )
        self.use(out, x)
        accesses = [access(x, "reads", source), access(out, "writes", target)]
        if sms:
            self.push("copies", accesses)
        else:
            self.step("copies", accesses, sms=source == target)

    def signal(self, flags: View, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        pushing = self.pushing.get(self.current)
        alone = sms > 0 or pushing is None or pushing.signalled
        sent = self.step("signals", [], sms=sms > 0) if alone else self.push("signals", [])
        sent.small = sms > 0
        self.signals.append(Flag(sent, peer, flags.buffer.name, slot, (self.turn, epoch)))

    def wait_signal(self, flags: View, slot: int, epoch: int) -> None:
        waits = self.step("waits", [])
        self.waits.append(Flag(waits, self.rank, flags.buffer.name, slot, (self.turn, epoch)))

    def barrier(self, team: tuple[int, ...]) -> None:
        self.barriers.setdefault(team, []).append(self.step("waits", []))

    def _stream(self, stream: str | int) -> str:
        if isinstance(stream, str):
            return stream
        if not 0 <= stream < self.program.streams:
            hint = f"write 'streams {stream + 1}' after the program's outputs" if stream > 0 else ""
            raise self.fail(
                f"there is no stream {stream}", expected=f"an index below {self.program.streams}", hint=hint
            )
        return f"stream {stream}"
