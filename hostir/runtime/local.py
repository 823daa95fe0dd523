"""Simulated ranks in one process: the memory model taken at its word, on CPU tensors.

Every rank first plans: its statements become tasks, with an edge wherever the memory model orders two of them, and
nowhere else. Then a seeded scheduler runs the tasks in any order that the edges allow. Memory is poisoned with NaN
before it is written and, once the caller's stream is done, where the caller may overwrite it; memory that was freed may
not be touched at all. A program that lacks an edge gives NaN, or an error, under some seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hostir.ir.interpret import Observer, interpret
from hostir.ir.machine import Exchange
from hostir.ir.op import Phase, Statement
from hostir.ir.program import Program, format_statement
from hostir.ir.source import Diagnostic, HostIRError, Span, error
from hostir.ir.types import DType
from hostir.runtime.collectives import Part, match
from hostir.runtime.kernels.table import Kernel, kernel_table
from hostir.runtime.sharding import assemble, bind_sizes, shard, solve_sizes, torch_dtype
from hostir.runtime.tasks import Task, execute, program_order, random_order
from hostir.runtime.trace import Trace

NAN = float("nan")
Parts = Sequence[torch.Tensor | None]  # of one tensor: what each rank holds


class Stream:
    """A queue of one rank. What is issued to it next follows `tail`."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.tail: list[Task] = []

    def wait(self, others: Sequence[Task]) -> None:
        self.tail = [*self.tail, *(task for task in others if task not in self.tail)]


class RankMachine(Observer):
    """One rank of a `LocalMachine`. Views and allocations happen while it plans; all else becomes tasks."""

    def __init__(self, rank: int, program: Program, kernels: Mapping[str, Kernel]) -> None:
        self.rank = rank
        self.program = program
        self.kernels = kernels
        self.caller = self.current = Stream("caller")
        self.pool = [Stream(f"stream {i}") for i in range(program.streams)]
        self.tasks: list[Task] = []
        self.parts: dict[tuple[int, ...], list[Part]] = {}  # by team, in the order issued
        self.freed: dict[int, Span | None] = {}  # by memory: where
        self.outputs: Parts = ()
        self.statement: Statement | None = None
        self.rounds: tuple[int, ...] = ()

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.statement, self.rounds = statement, rounds

    def plan(self, sizes: Mapping[str, int], inputs: Parts) -> None:
        """Turns the program into tasks: inputs arrive on the caller's stream, and outputs are read there at the end."""
        buffers = [None if x is None else torch.full(x.shape, NAN, dtype=x.dtype) for x in inputs]
        pairs = [(b, x) for b, x in zip(buffers, inputs, strict=True) if b is not None and x is not None]
        self.issue(lambda: [buffer.copy_(x) for buffer, x in pairs], (), timed=False)
        outputs = interpret(self.program, self, sizes, buffers, observer=self)
        self.statement, self.current = None, self.caller
        self.issue(partial(self.finish, outputs, buffers), outputs, timed=False)

    def finish(self, outputs: Parts, inputs: Parts) -> None:
        """The caller's stream is done: the caller takes the outputs, and does as it likes with all that is its own."""
        self.outputs = [None if x is None else x.clone() for x in outputs]
        for x in (*outputs, *inputs):
            if x is not None:
                x.fill_(NAN)

    def end(self, x: torch.Tensor, span: Span | None) -> None:
        """From here on, the memory of `x` may not be touched."""
        self.freed[storage_of(x)] = span

    def issue(self, run: Callable[[], object], touches: Parts, *, timed: bool = True) -> None:
        """Adds a task to the current stream."""
        stream = self.current
        stream.tail = [self.task(stream.label, run, touches, timed).follow(stream.tail)]

    def task(self, lane: str, run: Callable[[], object], touches: Parts, timed: bool = True) -> Task:
        memory = [storage_of(x) for x in touches if x is not None]
        task = Task(self.rank, lane, len(self.tasks), run, self.statement, self.rounds, timed, memory)
        self.tasks.append(task)
        return task

    def watch(self, task: Task) -> None:
        """Raises where a task touches memory that was freed."""
        ended = [self.freed[memory] for memory in task.memory if memory in self.freed]
        if not ended:
            return
        span, where = self.where(task)
        if task.statement is None:
            raise error(
                f"{where}: its memory was freed before the outputs were read",
                ended[0],
                expected="no output to look at what is freed",
            )
        raise error(
            f"{where}: its memory was freed before it ran",
            span,
            expected="the free to follow all uses, and streams that use it to be joined first",
            notes=((ended[0], "freed here"),),
        )

    def where(self, task: Task) -> tuple[Span | None, str]:
        """Which rank, statement and round a task belongs to."""
        if task.statement is None:
            return None, f"rank {self.rank}, caller"
        rounds = f" in round {', '.join(map(str, task.rounds))}" if task.rounds else ""
        return task.statement.span, f"rank {self.rank}, '{format_statement(task.statement, self.program)}'{rounds}"

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        """An error of the statement that is being planned."""
        span, where = self.where(Task(statement=self.statement, rounds=self.rounds))
        return error(f"{where}: {message}", span, expected=expected, hint=hint)

    # What statements ask for: the methods of `hostir.ir.machine.Machine` ---------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
        return torch.full(shape, NAN, dtype=torch_dtype(dtype))

    def free(self, x: torch.Tensor) -> None:
        self.issue(partial(self.end, x, self.statement.span if self.statement else None), (x,), timed=False)

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

    def compute(
        self, kind: str, out: torch.Tensor, operands: Sequence[torch.Tensor | None], options: Mapping[str, Any]
    ) -> None:
        self.issue(partial(self.kernels[kind], out, *operands, **options), (out, *operands))

    def communicate(self, exchange: Exchange, x: torch.Tensor | None, out: torch.Tensor | None) -> Task:
        for does, tensor in (("reads", x), ("writes", out)):
            if tensor is not None and not tensor.is_contiguous():
                raise self.fail(f"it {does} {_layout(tensor)}", expected="a dense tensor", hint="copy it first")
        part = Part(exchange, x, out, self.current.tail, partial(self.task, f"communication {len(self.tasks)}"))
        if earlier := self.parts.setdefault(exchange.team, []):
            # A team starts in order; what has ended is known to those who wait for it, and to nobody else.
            part.take.follow([earlier[-1].take])
            part.earlier = earlier[-1]
        self.parts[exchange.team].append(part)
        return part.give

    def wait(self, handle: Task) -> None:
        self.current.wait([handle])

    def current_stream(self) -> Stream:
        return self.current

    def set_stream(self, stream: Stream | int) -> None:
        self.current = self._stream(stream)

    def synchronize(self, stream: Stream | int) -> None:
        self.current.wait(self._stream(stream).tail)

    def delay(self, microseconds: int) -> None:
        """It orders nothing: the scheduler may already run anything first."""

    def _stream(self, stream: Stream | int) -> Stream:
        if isinstance(stream, Stream):
            return stream
        if not 0 <= stream < len(self.pool):
            hint = f"write 'streams {stream + 1}' behind the program's outputs" if stream > 0 else ""
            raise self.fail(f"there is no stream {stream}", expected=f"an index below {len(self.pool)}", hint=hint)
        return self.pool[stream]


def storage_of(x: torch.Tensor) -> int:
    """Which memory a tensor lies in. Tensors without elements share none, each by its own id."""
    return x.untyped_storage().data_ptr() or id(x)


def _layout(x: torch.Tensor) -> str:
    return f"shape {list(x.shape)} with strides {list(x.stride())}"


class LocalMachine:
    """Simulated ranks, one for each of `programs`, which are mostly one and the same.

    First every rank plans (`ranks[r].plan(sizes, inputs)`), then `run` executes.
    """

    def __init__(self, programs: Sequence[Program], kernels: str = "auto") -> None:
        table = kernel_table(kernels, "cpu")
        self.ranks = [RankMachine(rank, program, table) for rank, program in enumerate(programs)]

    def run(self, seed: int = 0) -> list[Parts]:
        """Executes what was planned, once; returns each rank's outputs. Seed 0 is program order, others are random.

        Raises HostIRError, naming ranks and statements, where ranks differ in the communications they issue, where a
        statement raises, and where all ranks wait for each other.
        """
        joints = match([rank.parts for rank in self.ranks], self.where)
        tasks = [task for rank in self.ranks for task in rank.tasks]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the tasks of simulated ranks are small: waking threads would cost more than it gains
        try:
            execute([*tasks, *joints], program_order if seed == 0 else random_order(seed), self._watch, self._failed)
        finally:
            torch.set_num_threads(threads)
        if any(task.blockers for task in tasks):
            raise self._deadlock()
        return [rank.outputs for rank in self.ranks]

    def where(self, task: Task) -> tuple[Span | None, str]:
        return self.ranks[task.rank].where(task)

    def record(self, trace: Trace) -> None:
        """Adds what ran to a trace, as if every stream and every team had a processor of its own."""
        for rank in self.ranks:
            sides = {id(p.give): (p, team) for team, parts in rank.parts.items() for p in parts}
            takes = {id(p.take) for p, _ in sides.values()}
            for task in rank.tasks:
                if task.statement is None or not task.timed or id(task) in takes:
                    continue
                lane, start, text = task.lane, task.start, format_statement(task.statement, rank.program)
                if id(task) in sides:
                    part, team = sides[id(task)]
                    start, lane = part.take.start, "communication"
                    if len(rank.parts) > 1:
                        lane += f" ({' '.join(map(str, team))})"
                trace.add(rank.rank, lane, text, start, task.end, task.rounds)

    def _watch(self, task: Task) -> None:
        self.ranks[task.rank].watch(task)

    def _failed(self, task: Task, problem: Exception) -> Exception:
        span, where = self.where(task)
        return error(f"{where}: {type(problem).__name__}: {problem}", span)

    def _deadlock(self) -> HostIRError:
        stuck = [next((t for t in rank.tasks if t.blockers), None) for rank in self.ranks]
        return HostIRError(
            Diagnostic(
                "deadlock: ranks wait for each other",
                expected="every rank to issue the communications of different teams in orders that agree",
                notes=tuple(self.where(task) for task in stuck if task is not None),
            )
        )


@torch.no_grad()
def run_local(
    program: Program,
    inputs: Sequence[torch.Tensor | Parts],
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    kernels: str = "auto",
    trace: Trace | None = None,
) -> list[Parts]:
    """Runs a host program on as many simulated ranks as its meshes name.

    Args:
        program: a host program that checks.
        inputs: whole CPU tensors, or for each input what every rank holds (None where it holds none).
        sizes: of symbols that do not follow from the inputs' shapes.
        seed: of the order: 0 is program order, any other number some order that the memory model allows.
        kernels: what computes: `auto`, `aten`, or `triton` (under TRITON_INTERPRET=1).
        trace: gets an event for each statement that ran.

    Returns:
        For each output what every rank holds, `outputs[i][rank]`.

    Raises HostIRError for inputs that do not fit and for a program that cannot run, as `LocalMachine.run` says.
    """
    if program.phase is not Phase.HOST:
        raise error(f"@{program.name} is a fusion", expected="a host program", hint="lower it first")
    parts, bound = _distribute(program, inputs, sizes or {})
    machine = LocalMachine([program] * program.ranks, kernels)
    for rank in machine.ranks:
        rank.plan(bound, [part[rank.rank] for part in parts])
    outputs = machine.run(seed)
    if trace is not None:
        machine.record(trace)
    return [list(parts) for parts in zip(*outputs, strict=True)]


def run_whole(
    program: Program,
    inputs: Sequence[torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    kernels: str = "auto",
    trace: Trace | None = None,
) -> tuple[torch.Tensor, ...]:
    """As `run_local`, from whole tensors to whole tensors; raises HostIRError where copies of an output differ."""
    bound = bind_sizes(program, inputs, sizes)
    outputs = run_local(program, inputs, bound, seed=seed, kernels=kernels, trace=trace)
    return tuple(assemble(parts, v.tensor, bound) for v, parts in zip(program.outputs, outputs, strict=True))


def _distribute(
    program: Program, inputs: Sequence[torch.Tensor | Parts], given: Mapping[str, int]
) -> tuple[list[Parts], dict[str, int]]:
    """What every rank holds of each input, and the sizes."""
    ranks = range(program.ranks)
    whole = [x for x in inputs if isinstance(x, torch.Tensor)]
    if len(whole) == len(inputs):
        sizes = bind_sizes(program, whole, given, device="cpu")
        pairs = zip(program.inputs, whole, strict=True)
        return [[shard(x, v.tensor, rank, sizes) for rank in ranks] for v, x in pairs], sizes
    parts = [x for x in inputs if not isinstance(x, torch.Tensor)]
    if whole or any(len(part) != len(ranks) for part in parts):
        raise error(
            f"the inputs of @{program.name} are neither all whole nor all in parts",
            expected=f"tensors, or lists of {len(ranks)} parts",
        )
    sizes = dict(given)
    for rank in ranks:
        sizes = solve_sizes(program, [part[rank] for part in parts], sizes, rank=rank, device="cpu")
    program.check_sizes(sizes)
    return parts, sizes
