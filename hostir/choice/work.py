"""What each rank of a host program has to do, as data: tasks, what each takes, and what each waits for.

Made by walking the program's own text on a machine that computes nothing, once a rank. So a cost model needs to know
nothing of strategies: whatever the statements say is what it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from hostir.ir.interpret import interpret
from hostir.ir.machine import Exchange, Handle, Ready
from hostir.ir.program import Program
from hostir.ir.types import DType

CALLER = -1  # the caller's stream
CONTRACTIONS = ("matmul", "linear")


# What a task takes ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Nothing:
    """A stream waits for something else."""


@dataclass(frozen=True)
class Pause:
    """The stream stands still for a fixed time; with `kind`, that of a signal.

    A `signal` is the stream's own, `kernel` one by a kernel, and one that a kernel `raised` which copies takes no time.
    """

    microseconds: float = 0.0
    kind: str = ""


@dataclass(frozen=True)
class Gemm:
    """A matmul `[m, k] @ [k, n]`."""

    m: int
    n: int
    k: int
    dtype: str


@dataclass(frozen=True)
class Traffic:
    """A computation that is bound by memory: `bytes` read and written."""

    bytes: int


@dataclass(frozen=True)
class Transfer:
    """A communication of a team: `bytes` of the whole tensor that is gathered, summed or exchanged."""

    kind: str
    bytes: int
    ranks: int


@dataclass(frozen=True)
class Copying:
    """A copy between this rank and `peer`: by a copy engine, or on `sms` by a kernel, of which it may be the first."""

    bytes: int
    peer: int
    out: bool
    sms: int = 0
    first: bool = False


@dataclass(frozen=True)
class Meeting:
    """A barrier."""

    ranks: int


What = Nothing | Pause | Gemm | Traffic | Transfer | Copying | Meeting


@dataclass(eq=False)
class Task:
    """Something that a rank does on one of its streams.

    Fields:
        after: the task before it on its lane, which ends before it begins.
        joins: those of other lanes that do.
        partners: every rank's task of the same collective or barrier, itself among them; they begin together.
        blocks: of a matmul that waits while it runs, for each block of rows in its order the signal it waits for.
        apart: its blocks share no tile.
        beside: on how many SMs the copies run beside which it starts; 0 for none.
        spare: how many SMs it leaves to signals.
        launches: how often the host issues something up to it, by the kind of what is issued.
    """

    rank: int
    what: What
    after: list[Task] = field(default_factory=list)
    joins: list[Task] = field(default_factory=list)
    partners: list[Task] = field(default_factory=list)
    blocks: list[Task | None] = field(default_factory=list)
    apart: bool = False
    beside: int = 0
    spare: int = 0
    launches: Mapping[str, int] = field(default_factory=dict)


# Recording --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Buffer:
    """A tensor, of which only the shape matters; `symmetric` numbers the symmetric ones in the order of allocation."""

    shape: tuple[int, ...]
    dtype: DType
    symmetric: int = -1

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.bytes


Flags = dict[tuple[int, int, int], list[tuple[int, Task]]]  # by rank, buffer and slot: epochs with their signals
FEWEST_APART = 64  # own rows that a Triton matmul reads where they are; fewer it copies (hostir.runtime.kernels.tiles)
Waits = list[tuple[Task, int | None, tuple[int, int, int], int]]  # who waits, for which block, for what flag and epoch


@dataclass
class Shared:
    """What the ranks meet in."""

    flags: Flags = field(default_factory=dict)
    waits: Waits = field(default_factory=list)
    meetings: dict[tuple[Any, ...], list[Task]] = field(default_factory=dict)


class Recorder:
    """One rank, as the machine that the interpreter speaks to."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank: int | None = rank
        self.me = rank
        self.shared = shared
        self.tasks: list[Task] = []
        self.last: dict[Any, Task] = {}  # by stream, and by team for communications
        self.counts: dict[Any, int] = {}
        self.stream = CALLER
        self.symmetric = 0
        self.launched: dict[str, int] = {}
        self.pushing: list[Task] = []  # what a kernel copies and raises, if it was issued last
        self.spare = 0  # SMs that a matmul which waits leaves to signals before it

    def issue(self, what: What, *joins: Task | None, lane: Any = None, launch: str = "") -> Task:
        """A task behind what its lane, the current stream unless said, has done so far, and behind what it joins."""
        lane = self.stream if lane is None else lane
        self.launched[launch] = self.launched.get(launch, 0) + 1
        after = [self.last[lane]] if lane in self.last else []
        others = [t for t in joins if t is not None and t not in after]
        task = Task(self.me, what, after, others, launches=dict(self.launched))
        self.launched.clear()
        self.tasks.append(task)
        self.last[lane] = task
        self.pushing = []
        return task

    def push(self, what: What) -> Task:
        """A copy by SMs, or a signal behind one: part of the kernel that was issued last, or of a new one."""
        behind = self.pushing
        task = self.issue(what, launch="" if behind else "push")
        self.pushing = [*behind, task]
        return task

    def launch(self, kind: str) -> None:
        """The host does something that no stream sees."""
        self.launched[kind] = self.launched.get(kind, 0) + 1

    def number(self, key: Any) -> int:
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key]

    def meet(self, task: Task, *key: Any) -> None:
        partners = self.shared.meetings.setdefault(key, [])
        partners.append(task)
        task.partners = partners

    def close(self) -> None:
        """What ends a call that used symmetric memory: a kernel that puts its flags back."""
        if self.symmetric:
            self.issue(Traffic(0), lane=CALLER, launch="compute")

    # The machine protocol -------------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> Buffer:
        if not symmetric:
            self.launch("allocate")
            return Buffer(shape, dtype)
        self.symmetric += 1
        return Buffer(shape, dtype, self.symmetric)

    def free(self, x: Handle) -> None:
        self.launch("view")

    def select(self, x: Buffer, axis: int, index: int) -> Buffer:
        self.launch("view")
        return Buffer((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype, x.symmetric)

    def chunk(self, x: Buffer, axis: int, outer: int, count: int, index: int) -> Buffer:
        self.launch("view")
        shape = (*x.shape[:axis], x.shape[axis] // count, *x.shape[axis + 1 :])
        return Buffer(shape, x.dtype, x.symmetric)

    def reshape(self, x: Buffer, shape: tuple[int, ...]) -> Buffer:
        self.launch("view")
        return Buffer(shape, x.dtype, x.symmetric)

    def permute(self, x: Buffer, axes: tuple[int, ...]) -> Buffer:
        self.launch("view")
        return Buffer(tuple(x.shape[i] for i in axes), x.dtype, x.symmetric)

    def dense(self, x: Buffer) -> Buffer:
        return x  # callers' tensors are, as far as anyone knows before they come

    def compute(self, kind: str, out: Buffer, operands: Sequence[Buffer | None], options: Mapping[str, Any]) -> None:
        read = [x for x in operands if x is not None]
        if kind not in CONTRACTIONS:
            self.issue(Traffic(out.bytes + sum(x.bytes for x in read)), launch="compute")
            return
        k = read[0].shape[-1]
        ready: Ready | None = options.get("ready")
        beside = self.pushing if ready else []
        if ready and ready.own is not None and prod(ready.own.shape[:-1]) < FEWEST_APART:
            self.issue(Traffic(2 * ready.own.bytes), launch="compute")
        task = self.issue(Gemm(prod(out.shape[:-1]), out.shape[-1], k, out.dtype.name), launch="matmul")
        if ready is None:
            return
        if beside and beside[-1] in task.after:
            first = beside[0]
            assert isinstance(first.what, Copying)
            task.beside, task.after, task.joins = first.what.sms, [*first.after], [*first.joins]
        task.blocks, task.spare = [None] * ready.blocks, self.spare
        task.apart = ready.own is not None and prod(ready.own.shape[:-1]) >= FEWEST_APART
        for turn, slot in enumerate(ready.order):
            if slot == ready.first and ready.own is not None:
                continue
            self.shared.waits.append((task, turn, (self.me, ready.flags.symmetric, slot), ready.epoch))

    def communicate(self, exchange: Exchange, x: Buffer | None, out: Buffer | None) -> Task:
        whole = max(b.bytes for b in (x, out) if b is not None) if (x or out) else 0
        if exchange.moves is not None:
            whole = sum(_sent(move.take[1], x) for move in exchange.moves if move.source == self.me) or whole
        lane = ("team", exchange.team, exchange.moves is None)
        before = self.last.get(self.stream)
        task = self.issue(Transfer(exchange.kind, whole, len(exchange.team)), before, lane=lane, launch="communicate")
        if exchange.moves is None:
            self.meet(task, "communication", exchange.team, self.number(lane))
        return task

    def wait(self, handle: Task) -> None:
        self.issue(Nothing(), handle, launch="wait")

    def copy(self, x: Buffer, out: Buffer, source: int, target: int, sms: int = 0) -> None:
        if sms:
            self.push(Copying(x.bytes, target, source == self.me, sms, first=not self.pushing))
            return
        if source == target:  # by a kernel
            self.issue(Traffic(2 * x.bytes), launch="compute")
            return
        peer = target if source == self.me else source
        self.issue(Copying(x.bytes, peer, out=source == self.me), launch="copy")

    def signal(self, flags: Buffer, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        if sms:
            task = self.issue(Pause(kind="kernel"), launch="push")
            if task.after and isinstance(task.after[0].what, Nothing):
                # What it takes is counted from the end of what its stream waits for.
                task.after = [*task.after[0].after, *task.after[0].joins]
            self.spare = 1
        elif self.pushing:
            task = self.push(Pause(kind="raised"))
        else:
            task = self.issue(Pause(kind="signal"), launch="signal")
        self.shared.flags.setdefault((peer, flags.symmetric, slot), []).append((epoch, task))

    def wait_signal(self, flags: Buffer, slot: int, epoch: int) -> None:
        task = self.issue(Nothing(), launch="signal")
        self.shared.waits.append((task, None, (self.me, flags.symmetric, slot), epoch))

    def barrier(self, team: tuple[int, ...]) -> None:
        task = self.issue(Meeting(len(team)), launch="barrier")
        self.meet(task, "barrier", team, self.number(("barrier", team)))

    def current_stream(self) -> int:
        return self.stream

    def set_stream(self, stream: int) -> None:
        self.launch("stream")
        self.stream = stream

    def synchronize(self, stream: int) -> None:
        self.issue(Nothing(), self.last.get(stream), launch="synchronize")

    def delay(self, microseconds: int) -> None:
        self.issue(Pause(float(microseconds)), launch="delay")


def _sent(pieces: int, x: Buffer | None) -> int:
    return 0 if x is None else x.bytes // pieces


def tasks_of(program: Program, sizes: Mapping[str, int]) -> list[Task]:
    """Every rank's tasks, each rank's in the order of issue. Raises HostIRError where sizes do not fit the program."""
    shared, tasks = Shared(), []
    for rank in range(program.ranks):
        recorder = Recorder(rank, shared)
        inputs = [_input(recorder, v.tensor, sizes) for v in program.inputs]
        interpret(program, recorder, sizes, inputs)
        recorder.close()
        tasks += recorder.tasks
    for waiter, turn, flag, epoch in shared.waits:
        sent = [task for number, task in shared.flags.get(flag, ()) if number >= epoch]
        if not sent:
            continue
        if turn is None or (sent[0].rank == waiter.rank and not waiter.beside):  # there before it begins
            waiter.after.append(sent[0])
        else:
            waiter.blocks[turn] = sent[0]
    return tasks


def _input(recorder: Recorder, type: Any, sizes: Mapping[str, int]) -> Buffer | None:
    if type.mesh is not None and recorder.me not in type.mesh.devices:
        return None
    return Buffer(tuple(n.bind(sizes) for n in type.local_shape), type.dtype)


def flops(tasks: Sequence[Task]) -> float:
    """Floating point operations of the busiest rank."""
    total: dict[int, float] = {}
    for task in tasks:
        if isinstance(task.what, Gemm):
            total[task.rank] = total.get(task.rank, 0.0) + 2.0 * task.what.m * task.what.n * task.what.k
    return max(total.values(), default=0.0)
