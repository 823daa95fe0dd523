"""Plan one simulated rank: statements become tasks, with the edges of the memory model and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hostir.ir.machine import Done, Exchange, Observer, OptionalMethods, Ready, interpret
from hostir.ir.message_ops import MESSAGES
from hostir.ir.op import Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.source import HostIRError, Span, error
from hostir.ir.types import FLAG, DType
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.layout import row_pieces
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernels_for
from hostir.machines.simulated.collectives import CollectiveSide
from hostir.machines.simulated.memory import SimulatedMemory, make_undefined, storage_of
from hostir.machines.simulated.messages import MessageSide
from hostir.machines.simulated.onesided import BarrierSide, SymmetricBuffers
from hostir.machines.simulated.tasks import FlagGate, SMGate, Task, Views

Parts = Sequence[torch.Tensor | None]  # of one tensor: what each rank holds
TeamRanks = tuple[int, ...]


class IssueQueue:
    """A stream of one rank: what is issued next follows the tasks in `tail`.

    If the latest tasks are copies by SMs and signals directly after them, `pushing` is their common start and they.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.tail: list[Task] = []
        self.pushing: list[Task] = []
        self.signalled = False

    def wait(self, others: Sequence[Task]) -> None:
        self.pushing = []
        self.tail = [*self.tail, *(task for task in others if task not in self.tail)]


class Float64Side(CollectiveSide):
    """A side of a collective among ranks that compute in float64: sums are in float64, too."""

    def add(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts)).sum(0)


class RankMachine(Observer, OptionalMethods):
    """One rank of a `LocalMachine`. Planning makes views and allocates memory; everything else becomes tasks.

    Streams, the order of teams, flags and symmetric buffers persist across calls. `dtype` is what it computes in;
    None stands for what the program declares.
    """

    def __init__(
        self,
        rank: int,
        program: Program,
        kernels: Mapping[str, Kernel],
        memory: SimulatedMemory,
        symmetric: SymmetricBuffers,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.rank = rank
        self.dtype = dtype
        self.program = program
        self.kernels = kernels
        self.memory = memory
        self.symmetric = symmetric
        self.caller = self.current = IssueQueue("caller")
        self.pool = [IssueQueue(f"stream {i}") for i in range(program.streams)]
        self.sms = SMGate()
        self.tasks: list[Task] = []
        self.steps = 0  # statements so far, executed or skipped
        self.parts: dict[TeamRanks, list[CollectiveSide]] = {}  # by team, in the order issued
        self.messages: dict[TeamRanks, list[MessageSide]] = {}
        self.barriers: dict[TeamRanks, list[BarrierSide]] = {}
        self.inputs: Parts = ()
        self.outputs: list[Parts] = []  # of each call
        self.statement: Statement | None = None
        self.rounds: tuple[int, ...] = ()

    @property
    def call(self) -> int:
        """The number of the call that it plans, from 0."""
        return len(self.outputs) - 1

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.statement, self.rounds, self.steps = statement, rounds, self.steps + 1

    def plan(self, sizes: Mapping[str, int], inputs: Parts) -> None:
        """Turn one call into tasks: inputs arrive on the caller's stream, and outputs are read there at the end."""
        if not self.inputs:  # the caller uses the same memory in every call
            named = zip(self.program.inputs, inputs, strict=True)
            self.inputs = [
                None if x is None else self.memory.new(v.name, self.rank, x.shape, self.dtype or x.dtype)
                for v, x in named
            ]
        self.outputs.append(())
        self.statement, self.rounds, self.current, self.steps = None, (), self.caller, self.steps + 1
        pairs = [(b, x) for b, x in zip(self.inputs, inputs, strict=True) if b is not None and x is not None]
        entry = self.issue(lambda: [buffer.copy_(x) for buffer, x in pairs], writes=tuple(b for b, _ in pairs))
        entry.stream = "before the call"
        outputs = interpret(self.program, self, sizes, self.inputs, observer=self)
        self.statement, self.rounds, self.current, self.steps = None, (), self.caller, self.steps + 1
        taken = tuple(x for x in outputs if x is not None)
        written = (*taken, *(x for x in self.inputs if x is not None))
        leave = self.issue(partial(self.finish, self.call, outputs, written), reads=taken, undefines=written)
        leave.stream = "after the call"

    def finish(self, call: int, outputs: Parts, written: Views) -> None:
        """End a call on the caller's stream: the caller reads the outputs, then may overwrite its memory."""
        self.outputs[call] = [None if x is None else x.clone() for x in outputs]
        for x in written:
            make_undefined(x)

    # Tasks ------------------------------------------------------------------------------------------------------------
    def task(
        self,
        run: Callable[[], object] | None,
        reads: Views = (),
        writes: Views = (),
        undefines: Views = (),
        *,
        lane: str = "",
        timed: bool = False,
        team: TeamRanks = (),
    ) -> Task:
        """Return a new task without dependencies."""
        memory = tuple({storage_of(x) for x in (*reads, *writes, *undefines)})
        task = Task(
            self.rank,
            lane or self.current.label,
            len(self.tasks),
            self.steps,
            self.statement,
            self.rounds,
            self.call,
            self.current.label,
            run,
            reads,
            writes,
            undefines,
            memory,
            timed=timed,
            team=team,
        )
        self.tasks.append(task)
        return task

    def issue(
        self,
        run: Callable[[], object] | None,
        reads: Views = (),
        writes: Views = (),
        undefines: Views = (),
        *,
        timed: bool = False,
    ) -> Task:
        """Add a task to the current stream."""
        task = self.task(run, reads, writes, undefines, timed=timed).follow(self.current.tail)
        self.current.tail, self.current.pushing = [task], []
        task.since = task if timed else None
        return task

    def push(self, run: Callable[[], object] | None, reads: Views = (), writes: Views = ()) -> Task:
        """Add a copy by SMs, or a signal directly after one; a kernel that waits for flags may overlap it."""
        stream = self.current
        pushing = stream.pushing or [self.issue(_nothing)]
        task = self.task(run, reads, writes, lane=f"{stream.label}, SMs that copy", timed=bool(writes))
        task.follow(stream.tail)
        task.gate, task.since = (self.sms, task) if writes else (None, None)
        stream.pushing, stream.tail, stream.signalled = [*pushing, task], [task], not writes
        return task

    def late(self, task: Task) -> HostIRError:
        """Return the error of a task that touches freed memory."""
        ended = [self.memory.freed[storage] for storage in task.memory if storage in self.memory.freed]
        span, where = self.where(task)
        if task.statement is None:
            return error(
                f"{where}: its memory was freed before the outputs were read",
                ended[0],
                expected="no output to look at what is freed",
            )
        return error(
            f"{where}: its memory was freed before it ran",
            span,
            expected="the free to follow all uses, and streams that use it to be joined first",
            notes=((ended[0], "freed here"),),
        )

    def where(self, task: Task) -> tuple[Span | None, str]:
        """Return the rank, statement, round and call that a task belongs to."""
        call = f" of call {task.call + 1}" if len(self.outputs) > 1 else ""
        if task.statement is None:
            return None, f"rank {self.rank}, caller{call}"
        rounds = f" in round {', '.join(map(str, task.rounds))}" if task.rounds else ""
        text = format_statement(task.statement, self.program)
        return task.statement.span, f"rank {self.rank}, '{text}'{rounds}{call}"

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        """Return an error of the statement that is being planned."""
        span, where = self.where(Task(statement=self.statement, rounds=self.rounds, call=self.call))
        return error(f"{where}: {message}", span, expected=expected, hint=hint)

    # What statements ask for: the methods of `hostir.ir.machine.Machine` ---------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> torch.Tensor:
        name = next((v.name for v in self.statement.named), "") if self.statement else ""
        element = torch_dtype(dtype) if self.dtype is None or dtype == FLAG else self.dtype
        if not symmetric:
            fresh = self.memory.new(name, self.rank, shape, element)
            self._hand_out(fresh)
            return fresh
        buffer = self.symmetric.allocate((name, self.rounds), self.rank, shape, element)
        if buffer is None:
            raise self.fail(f"%{name} was allocated before with another shape or dtype", expected="one shape and dtype")
        return buffer

    def _hand_out(self, buffer: torch.Tensor) -> None:
        """Leave new memory undefined until the stream reaches this point: its previous owner may still use it."""
        stream = self.current
        task = self.task(partial(make_undefined, buffer), undefines=(buffer,)).follow(stream.pushing[:1] or stream.tail)
        stream.tail = [*stream.tail, task] if stream.pushing else [task]
        stream.pushing[:1] = [task] if stream.pushing else []

    def free(self, x: torch.Tensor) -> None:
        whole = x.new_empty(0).set_(x.untyped_storage())
        span = self.statement.span if self.statement else None
        self.issue(partial(self.memory.free, storage_of(x), span), writes=(whole,))

    def select(self, x: torch.Tensor, axis: int, index: int) -> torch.Tensor:
        return x.select(axis, index)

    def chunk(self, x: torch.Tensor, axis: int, outer: int, count: int, index: int) -> torch.Tensor:
        if outer != 1:
            raise self.fail("a rank's part is cut from its outermost block on", expected="1 block outside the pieces")
        extent = x.shape[axis] // count
        return x.narrow(axis, index * extent, extent)

    def reshape(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            return x.view(shape)
        except RuntimeError:
            raise self.fail(f"no view of {_layout(x)} has shape {list(shape)}", hint="copy it first") from None

    def permute(self, x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        return x.permute(axes)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` or a copy of it, by rank and call: on real ranks it depends on the caller's strides."""
        if x.is_contiguous() and (self.rank + self.call) % 2 == 0:
            return x
        name = next((v.name for v in self.statement.named), "") if self.statement else ""
        copy = self.memory.new(name, self.rank, x.shape, x.dtype)
        self.issue(partial(copy.copy_, x), (x,), (copy,)).gate = self.sms
        return copy

    def compute(
        self,
        kind: str,
        out: torch.Tensor,
        operands: Sequence[torch.Tensor | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        kernel, reads = kernels_for(self.kernels, out.dtype)[kind], tuple(x for x in operands if x is not None)
        self._refuse_overlap(out, reads)
        if ready is not None or done is not None:
            self._by_blocks(kind, out, operands, options, ready, done)
            return
        task = self.issue(partial(kernel, out, *operands, **options), reads, (out,), timed=True)
        task.gate = self.sms

    def _refuse_overlap(self, out: torch.Tensor, reads: Sequence[torch.Tensor]) -> None:
        s = self.statement
        for n, x in enumerate(reads):
            same = x.data_ptr() == out.data_ptr() and x.shape == out.shape and _steps(x) == _steps(out)
            if self.memory.overlap(x, out) and not (same and s is not None and s.in_place(n)):
                raise self.fail("it writes memory that it reads", hint="allocate a buffer for the result")

    def _by_blocks(
        self,
        kind: str,
        out: torch.Tensor,
        operands: Sequence[torch.Tensor | None],
        options: Mapping[str, Any],
        ready: Ready | None,
        done: Done | None,
    ) -> None:
        """Add a kernel that computes blocks of rows in any order, each once its flags are set, and sets flags behind.

        One that waits for flags takes all SMs when it starts, overlaps the copies by SMs before it, and ends after
        them. Its tasks are as small as the rules allow: rows are cut at the blocks that it waits for, at those that it
        sets flags behind, and wherever a stride ends.
        """
        copies = self.current.pushing if ready is not None else []
        if copies:
            self.current.tail = copies[:1]
        start = self.issue(_nothing)
        start.gate = self.sms
        if ready is not None:
            start.run, start.may_block = partial(self.sms.take, start, copies), True
        pieces = self._pieces(start, kind, out, operands, options, ready, done)
        signals = [] if done is None else self._signals(pieces, out.shape[:-1].numel() // done.blocks, done)
        end = self.issue(None if ready is None else partial(self.sms.take, None))
        end.follow([start, *(task for _, task in pieces), *signals, *copies[-1:]])
        end.changes, end.since = None if ready is None else self.sms, start

    def _pieces(
        self,
        start: Task,
        kind: str,
        out: torch.Tensor,
        operands: Sequence[torch.Tensor | None],
        options: Mapping[str, Any],
        ready: Ready | None,
        done: Done | None,
    ) -> list[tuple[int, Task]]:
        """Add the tasks that compute the result of a kernel by blocks; return them with the first row of each."""
        kernel, (x, *others) = kernels_for(self.kernels, out.dtype)[kind], operands
        assert x is not None
        sources: Views = (x,)
        if kind == "sum":
            added = [y.expand_as(out) for y in others if y is not None]  # read as one more source
            sources, kernel = (*x.unbind(options["axis"]), *added), partial(_sum_of, kernel, len(added))
            others, options = [], {**options, "axis": 0}
        of_rows = ready.along if ready is not None else done.along if done is not None else ()
        cut_alike = [y for y in (others[n - 1] for n in of_rows) if y is not None]
        left_whole = (y for n, y in enumerate(others, 1) if n not in of_rows)
        whole, rows = tuple(y for y in left_whole if y is not None), out.shape[:-1].numel()
        height = rows if ready is None else rows // ready.results
        cuts = range(0) if done is None else range(0, rows, rows // done.blocks)
        found, before = list[tuple[int, Task]](), list[Task]()
        for block in (0,) if ready is None else ready.order:
            first, arrived = block * height, dict[int, Task]()
            parts, own = [(each, first) for each in sources], {}
            if ready is not None:
                arrived = {n // ready.results: self._arrival(start, ready, n) for n in ready.needed(block)}
                own = {n // ready.results: n for n in ready.replaced if n % ready.results == block}
            replaced = [parts[source] for source in own]
            for source, n in own.items():
                assert ready is not None
                assert ready.own is not None
                parts[source] = ready.own, ready.replaced.index(n) * height
            together: dict[Task, list[int]] = {}  # sources, by the task after which they may be read
            for source in range(len(parts)):
                together.setdefault(arrived.get(source, start), []).append(source)
            now = []
            cut = row_pieces(
                [(out, first), *parts, *replaced, *((y, first) for y in cut_alike)],
                height,
                [row - first for row in cuts],
            )
            for row, (target, *views) in cut:
                lane = f"row {first + row} of task {start.order}"
                undefined = dict(zip(own, views[len(parts) : len(parts) + len(own)], strict=True))
                along = tuple(views[len(parts) + len(own) :])
                taken: dict[int, torch.Tensor] = {}
                takes = []
                for after, read in together.items():
                    given = {source: views[source] for source in read}
                    left = tuple(undefined[source] for source in read if source in own)
                    run = partial(_take, given, taken, left)
                    take = self.task(run, tuple(given.values()), undefines=left, lane=f"source {read[0]} of {lane}")
                    takes.append(take.follow([after]))
                given_others = [*others]
                for n, view in zip(of_rows, along, strict=True):
                    given_others[n - 1] = view
                compute = partial(_compute, kernel, target, taken, given_others, options)
                task = self.task(compute, (*whole, *along), (target,), lane=lane, timed=True).follow([start, *takes])
                now.append(task.held_by(before))
                found.append((first + row, task))
            before = now if ready is not None and done is not None else []  # a machine may compute one after another
        return found

    def _arrival(self, start: Task, ready: Ready, block: int) -> Task:
        """Add the wait of a kernel for the flag of one block."""
        task = self.task(_nothing, lane=f"wait {block} of task {start.order}").follow([start])
        task.gate, task.epoch = self._flag(ready.flags, block), self._epoch(ready.epoch)
        return task

    def _signals(self, pieces: Sequence[tuple[int, Task]], height: int, done: Done) -> list[Task]:
        """Add the signals of a kernel, each behind the pieces of one block of so many rows."""
        signals = []
        for block in done.order:
            behind = [task for row, task in pieces if row // height == block]
            task = self.task(None, lane=f"flag {block} of task {behind[0].order}").follow(behind)
            flag = self._flag(done.flags, block)
            task.run, task.changes, task.epoch = partial(flag.set, task), flag, self._epoch(done.epoch)
            signals.append(task)
        return signals

    def communicate(self, exchange: Exchange, x: torch.Tensor | None, out: torch.Tensor | None) -> list[Task]:
        for does, tensor in (("reads", x), ("writes", out)):
            if tensor is not None and not tensor.is_contiguous():
                raise self.fail(f"it {does} {_layout(tensor)}", expected="a dense tensor", hint="copy it first")
        lane = f"communication {len(self.tasks)}"
        task = partial(self.task, lane=lane, timed=True, team=exchange.team)
        start = self.task(_nothing, lane=lane).follow(self.current.tail)
        start.gate, start.may_block = self.sms, True
        if x is not None and out is not None and exchange.takes(self.rank) and exchange.gives(self.rank):
            self._refuse_overlap(out, (x,))
        if exchange.kind in MESSAGES:
            messages = self.messages.setdefault(exchange.team, [])
            messages.append(MessageSide(exchange, x, out, start, task, messages[-1] if messages else None))
            return messages[-1].ends
        parts = self.parts.setdefault(tuple(sorted(exchange.team)), [])
        side = CollectiveSide if self.dtype is None else Float64Side
        parts.append(side(exchange, x, out, self.current.tail, start, task, parts[-1] if parts else None))
        return [parts[-1].give]

    def wait(self, handle: list[Task]) -> None:
        self.current.wait(handle)

    def copy(self, x: torch.Tensor, out: torch.Tensor, source: int, target: int, sms: int = 0) -> None:
        if source != self.rank:
            x = self._at(x, source)
        if target != self.rank:
            out = self._at(out, target)
        if sms:
            task = self.push(partial(out.copy_, x), (x,), (out,))
        else:
            task = self.issue(partial(out.copy_, x), (x,), (out,), timed=True)
            task.gate = self.sms if source == target else None  # within a rank a kernel copies
        for view, rank in ((x, source), (out, target)):
            if rank != self.rank:
                self.symmetric.touch(view, rank, task)

    def signal(self, flags: torch.Tensor, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        view = self._at(flags, peer)
        behind = not sms and self.current.pushing and not self.current.signalled
        flag, task = self.symmetric.flag(view, slot), self.push(None) if behind else self.issue(None)
        task.gate, task.one_sm = (self.sms, True) if sms else (None, False)
        task.run, task.changes, task.epoch = partial(flag.set, task), flag, self._epoch(epoch)
        self.symmetric.touch(view, peer, task)

    def wait_signal(self, flags: torch.Tensor, slot: int, epoch: int) -> None:
        task = self.issue(_nothing)
        task.gate, task.epoch = self._flag(flags, slot), self._epoch(epoch)

    def barrier(self, team: TeamRanks) -> None:
        arrived = self.issue(None)
        self.barriers.setdefault(team, []).append((arrived, self.issue(None)))

    def current_stream(self) -> IssueQueue:
        return self.current

    def set_stream(self, stream: IssueQueue | int) -> None:
        self.current = self._stream(stream)

    def synchronize(self, stream: IssueQueue | int) -> None:
        self.current.wait(self._stream(stream).tail)

    def _stream(self, stream: IssueQueue | int) -> IssueQueue:
        if isinstance(stream, IssueQueue):
            return stream
        if not 0 <= stream < len(self.pool):
            hint = f"write 'streams {stream + 1}' after the program's outputs" if stream > 0 else ""
            raise self.fail(f"there is no stream {stream}", expected=f"an index below {len(self.pool)}", hint=hint)
        return self.pool[stream]

    def _at(self, view: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the same view at a rank; raise if the memory is not symmetric."""
        there = self.symmetric.at(view, rank)
        if there is None:
            name = self.memory.owners[storage_of(view)][0]
            raise self.fail(f"%{name} is not symmetric", expected="a view of a buffer from allocate_symmetric")
        return there

    def _flag(self, flags: torch.Tensor, slot: int) -> FlagGate:
        return self.symmetric.flag(self._at(flags, self.rank), slot)

    def _epoch(self, epoch: int) -> tuple[int, int]:
        return self.call, epoch


def _take(sources: Mapping[int, torch.Tensor], taken: dict[int, torch.Tensor], left: Views) -> None:
    """Read the rows of some sources, and make undefined what the rank's own rows stand for."""
    taken.update({source: x.clone() for source, x in sources.items()})
    for x in left:
        make_undefined(x)


def _compute(
    kernel: Kernel,
    out: torch.Tensor,
    taken: Mapping[int, torch.Tensor],
    others: Sequence[torch.Tensor | None],
    options: Mapping[str, Any],
) -> None:
    """Compute some rows from what was read of each source."""
    kernel(out, *(taken[source] for source in sorted(taken)), *others, **options)


def _sum_of(kernel: Kernel, added: int, out: torch.Tensor, *parts: torch.Tensor, **options: Any) -> None:
    """Sum over sources, which are tensors of their own; the last `added` are no sources."""
    sources, addends = parts[: len(parts) - added], parts[len(parts) - added :]
    kernel(out, torch.stack(sources) if sources else out.new_empty(0, *out.shape), *addends, **options)


def _nothing() -> None:
    """Do nothing: the task only orders others."""


def _steps(x: torch.Tensor) -> list[int]:
    """Return the strides of the axes that are longer than 1."""
    return [stride for extent, stride in zip(x.shape, x.stride(), strict=True) if extent != 1]


def _layout(x: torch.Tensor) -> str:
    return f"shape {list(x.shape)} with strides {list(x.stride())}"
