"""Simulated GPUs: streams are queues of tasks, which a seed runs in any order that CUDA allows.

A CUDA plan puts all its work into these queues: waits for flags, writes of flags, copies, kernels, events. The memory
of the ranks is ordinary memory of this process, which all ranks can access. A queue runs in order. Any queue may run
its next task unless that task waits. So errors in the use of flags show here without a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from hostir.ir.program import Program
from hostir.job.groups import Groups
from hostir.job.offers import ExchangeTexts, Offer
from hostir.kernels.aten import add_up
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernel_table
from hostir.machines.binding import completed, compute_block
from hostir.machines.cuda import blocks, copies, credits, flags, flow_control, streams
from hostir.machines.cuda import machine as cuda
from hostir.machines.cuda import memory as cuda_memory
from hostir.machines.cuda.blocks import BlockSteps
from hostir.machines.cuda.copies import CopySteps
from hostir.machines.cuda.credits import CallBoundary
from hostir.machines.cuda.flags import CudaFlags
from hostir.machines.cuda.machine import CudaMachine, CudaPlan
from hostir.machines.cuda.memory import PeerMemory
from hostir.plan.operations import ComputeOp
from hostir.plan.unroll import unroll

CPU = torch.device("cpu")
STEPS = 2_000_000


@dataclass
class Task:
    """A task of a stream: it does `do` once `may` returns True."""

    do: Callable[[], object]
    may: Callable[[], bool] = lambda: True


class Stream:
    """A queue of tasks in the place of a CUDA stream. `cuda_stream` is its number.

    `copying` is an event at the start of the last kernel if this kernel copies; else None.
    """

    def __init__(self, device: object = None) -> None:
        self.tasks: deque[Task] = deque()
        self.copying: Event | None = None
        with Gpus.here.running:
            self.cuda_stream = len(Gpus.here.streams)
            Gpus.here.streams.append(self)

    def add(self, do: Callable[[], object], may: Callable[[], bool] = lambda: True) -> None:
        self.tasks.append(Task(do, may))
        self.copying = None

    def query(self) -> bool:
        """Run all tasks that may run, in all queues; return True if this queue is then empty."""
        Gpus.here.advance()
        return not self.tasks

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        event.wait(self)


class Event:
    """A point in a queue."""

    def __init__(self, **_: object) -> None:
        self.reached = [True]

    def record(self, stream: Stream) -> None:
        reached = self.reached = list[bool]()
        stream.add(lambda: reached.append(True))

    def wait(self, stream: Stream) -> None:
        reached = self.reached
        stream.add(lambda: None, lambda: bool(reached))

    def query(self) -> bool:
        return bool(self.reached)


class InProduct(Event):
    """The beginning of a product that stores to peers. A task that starts there may read unwritten memory."""

    def wait(self, stream: Stream) -> None:
        raise AssertionError("the task would run beside the product")


@dataclass
class Handle:
    """The handle of torch's symmetric memory: the memory of all ranks, and the signals of torch's kernels."""

    memory: dict[int, torch.Tensor]

    def get_signal_pad(self, rank: int) -> torch.Tensor:
        return Gpus.here.pads.setdefault(rank, torch.zeros(len(self.memory), dtype=torch.int32))


class Shared(PeerMemory):
    """Symmetric memory in this process."""

    def __init__(self, rank: int, memory: dict[int, torch.Tensor]) -> None:
        super().__init__(CPU, rank)
        self.memory = memory

    @contextmanager
    def offering(self, size: int) -> Iterator[str]:
        self.memory[self.rank] = torch.zeros(size, dtype=torch.uint8)
        yield ""

    def reserve(self, size: int) -> None:
        """Do nothing: the memory exists already."""

    def map(self, offers: Sequence[Offer], ranks: set[int]) -> dict[int, torch.Tensor]:
        self.handle = Handle(dict(self.memory))
        return {rank: self.memory[rank] for rank in ranks}


@dataclass
class Gpus:
    """The GPUs of all ranks, on one thread. `waiting`: True if kernels can wait for flags of their blocks."""

    here: Gpus = field(init=False, repr=False)
    streams: list[Stream] = field(default_factory=list)
    waiting: bool = False
    pads: dict[int, torch.Tensor] = field(default_factory=dict)  # by rank: the signals of torch's kernels
    pushes: int = 0  # the number of products that have stored to peers since the latest plans were made
    current: Stream = field(init=False)
    running: threading.Lock = field(default_factory=threading.Lock)

    def kernels(self) -> Mapping[str, Kernel]:
        """Return kernels that run when their stream gets there."""

        table = kernel_table("aten", "cpu")
        waiting = {f"{name}_by_blocks": table[name] for name in ("matmul", "linear", "sum")} if self.waiting else {}
        pushed = {f"{name}_pushed": self.pushed(table[name]) for name in ("matmul", "linear")} if self.waiting else {}
        return {name: self.later(kernel) for name, kernel in table.items()} | waiting | pushed

    def later(self, kernel: Callable[..., object]) -> Callable[..., None]:
        def issue(*operands: Any, **options: Any) -> None:
            self.current.add(lambda: kernel(*operands, **options))

        return issue

    def pushed(self, kernel: Callable[..., object]) -> Callable[..., None]:
        """Return one kernel that computes and copies."""

        def issue(*operands: Any, pushed: Callable[[torch.Tensor], None], **options: Any) -> None:
            self.pushes += 1
            self.current.add(lambda: kernel(*operands, **options))
            pushed(operands[0])
            self.current.copying = InProduct()

        return issue

    def written(self, home: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `home`, to which the current stream writes a copy of `x`."""
        self.current.add(lambda: home.copy_(x))
        return home

    def synchronize(self, device: torch.device) -> None:
        """Run all queues until they are empty. Other threads run them, too, and raise flags meanwhile."""
        while any(s.tasks for s in self.streams):
            self.advance()
            time.sleep(1e-4)

    def advance(self) -> None:
        """Run all tasks that may run now. Other threads may call this at the same time."""
        with self.running:
            while ready := [s for s in self.streams if s.tasks and s.tasks[0].may()]:
                for stream in ready:
                    stream.tasks.popleft().do()

    def run(self, random: Random) -> None:
        """Run all queues. Raise AssertionError if no queue can go on."""
        for _ in range(STEPS):
            waiting = [s for s in self.streams if s.tasks]
            if not waiting:
                return
            ready = [s for s in waiting if s.tasks[0].may()]
            assert ready, f"stuck: {len(waiting)} streams wait for ever"
            # The chosen stream goes on for a while, so that other streams run late: this exposes errors.
            stream = random.choice(ready)
            for _ in range(random.choice((1, 1, 4, 100))):
                if not stream.tasks or not stream.tasks[0].may():
                    break
                stream.tasks.popleft().do()
        raise AssertionError("the streams do not end")

    def in_batches(self, ops: Sequence[Any]) -> Callable[[int], None]:
        def issue(handle: int) -> None:
            for op in ops:
                self.streams[handle].add(*op)

        return issue

    def call_end(self, flags: Sequence[int], counters: Sequence[int]) -> Callable[[], None]:
        def end() -> None:
            for flag in flags:
                _at(flag).value = 0
            for count in counters:
                _at(count).value += 1

        return lambda: self.current.add(end)

    def signal_kernel(self, flag: int, epoch: int) -> Callable[[Stream], None]:
        return lambda stream: stream.add(*_write(flag, epoch))

    def push_kernel(self, pieces: Sequence[tuple[int, ...]], size: int) -> Callable[[torch.Tensor], None]:
        """Return one kernel that copies in any order, and then raises flags in any order."""

        def push(source: torch.Tensor) -> None:
            begun, copied = Event(), Event()
            begun.record(self.current)
            for offset, target, _, _ in pieces:
                self.beside(begun, Task(partial(_move, target, source, offset, size)))
            copied.record(self.current)
            for *_, flag, epoch in pieces:
                if flag:
                    self.beside(copied, Task(*_write(flag, epoch)))
            self.current.copying = begun

        return push

    def in_one_kernel(
        self, steps: BlockSteps, op: ComputeOp, kernel: Kernel, call_end: Callable[[], None] | None
    ) -> Callable[[], None]:
        """Return a step that simulates a kernel which waits for flags and raises flags.

        It computes its blocks in any order in which their flags may rise, and raises a flag after each block. If it may
        overlap the copies before it, it begins when they begin. With `call_end`, it ends the call when it ends.
        """
        ready, done, flags = op.ready, op.done, steps.flags
        blocks = ready.results if ready is not None else done.blocks if done is not None else 0

        def step() -> None:
            begun = self.current.copying if ready is not None and ready.overlapped_sms else None
            if begun is None:
                begun = Event()
                begun.record(self.current)
            registers, computed = list(steps.context.registers), set[int]()
            for block in range(blocks):
                self.beside(begun, *tasks(block, registers, computed))
            if call_end is not None:
                call_end()

        def tasks(block: int, registers: Sequence[Any], computed: set[int]) -> Iterator[Task]:
            def compute() -> None:
                compute_block(op, registers, kernel, block, blocks, add_up)

            def raise_flags() -> None:
                computed.add(block)
                for slot in completed(done, block, blocks, computed) if done is not None else ():
                    _at(flags.address(flags.place(done.flags), slot, flags.rank)).value = done.epoch

            for slot in ready.needed(block) if ready is not None else ():
                place = flags.place(ready.flags)
                yield Task(*_wait(flags.address(place, slot, flags.rank), ready.epoch))
            yield Task(compute)
            yield Task(raise_flags)

        return step

    def beside(self, begun: Event, *tasks: Task) -> None:
        """Run tasks one after another on a side stream.

        They begin after an event, and the current stream waits for their end.
        """
        stream, ended = Stream(), Event()
        begun.wait(stream)
        for task in tasks:
            stream.add(task.do, task.may)
        ended.record(stream)
        ended.wait(self.current)

    def strided_copy(self) -> Callable[[torch.Tensor, torch.Tensor, int], None]:
        def copy(out: torch.Tensor, x: torch.Tensor, handle: int) -> None:
            self.streams[handle].add(lambda: out.copy_(x))

        return copy


def _move(target: int, source: torch.Tensor, offset: int, size: int) -> None:
    ctypes.memmove(target, source.data_ptr() + offset, size)


def _at(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def _write(address: int, value: int) -> tuple[Callable[[], object], ...]:
    def write() -> None:
        _at(address).value = value

    return (write,)


def _wait(address: int, value: int) -> tuple[Callable[[], object], ...]:
    return (lambda: None), (lambda: _at(address).value >= value)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Replace torch.cuda and the driver by simulated GPUs."""
    these = Gpus()
    Gpus.here = these
    these.current = Stream()

    def set_stream(stream: Stream) -> None:
        these.current = stream

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: these.current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: these.current)
    monkeypatch.setattr(streams, "_known", {})
    monkeypatch.setattr(streams, "_workers", {})
    monkeypatch.setattr(streams, "_taken", Counter())
    monkeypatch.setattr(streams, "_free", {})
    monkeypatch.setattr(streams, "_communicating", {})
    monkeypatch.setattr(streams, "new_stream", lambda device, priority: Stream())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: id(these.current), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", these.synchronize)
    monkeypatch.setattr(cuda_memory, "calling_streams", lambda device: [*these.streams])  # ranks share this device
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    # Issued tasks hold their tensors, so no memory is reused before they have run.
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(CudaPlan, "load", lambda plan, first: None)  # these kernels are not compiled
    for module in (flags, credits, blocks, cuda_memory):
        monkeypatch.setattr(module, "in_batches", these.in_batches)
        if module is not cuda_memory:
            monkeypatch.setattr(module, "wait_at_least", _wait)
    for module in (flags, credits, blocks, flow_control):
        monkeypatch.setattr(module, "write", _write)
    monkeypatch.setattr(CallBoundary, "end_of", lambda _, flags, counters: these.call_end(flags, counters))
    monkeypatch.setattr(CopySteps, "push_kernel", lambda _, pieces, size, sms: these.push_kernel(pieces, size))
    monkeypatch.setattr(CudaFlags, "signal_kernel", lambda _, flag, epoch: these.signal_kernel(flag, epoch))
    monkeypatch.setattr(BlockSteps, "in_one_kernel", lambda *arguments: these.in_one_kernel(*arguments))
    monkeypatch.setattr(BlockSteps, "add_up", lambda _, *parts, **options: these.later(add_up)(*parts, **options))
    monkeypatch.setattr(copies, "StridedCopy", these.strided_copy)
    return these


def plans(
    gpus: Gpus,
    program: Program,
    parts: Sequence[Sequence[torch.Tensor | None]],
    monkeypatch: pytest.MonkeyPatch,
    sizes: Mapping[str, int] | None = None,
) -> list[CudaPlan]:
    """Return a plan for each rank."""
    return [plan for (plan,) in layers(gpus, program, parts, monkeypatch, sizes, 1)]


def layers(
    gpus: Gpus,
    program: Program,
    parts: Sequence[Sequence[torch.Tensor | None]],
    monkeypatch: pytest.MonkeyPatch,
    sizes: Mapping[str, int] | None,
    count: int,
) -> list[list[CudaPlan]]:
    """Return `count` plans for each rank, as of executors of one program. Each rank has a thread to meet the others."""
    memory, gpus.pushes = dict[int, torch.Tensor](), 0
    monkeypatch.setattr(cuda, "PeerMemory", lambda device, rank, group: Shared(rank, memory))
    by_rank: dict[int, list[CudaPlan]] = {}

    def plan(rank: int, exchange: ExchangeTexts) -> None:
        groups = Groups(rank, CPU, exchange)
        machines = [CudaMachine(CPU, program, gpus.kernels(), groups) for _ in range(count)]
        by_rank[rank] = [machine.plan(unroll(program, rank, sizes or {}, parts[rank])) for machine in machines]

    together(len(parts), plan)
    return [by_rank[rank] for rank in range(len(parts))]


def together(ranks: int, do: Callable[[int, ExchangeTexts], None]) -> None:
    """Call `do` for all ranks at once, each on a thread, with a function that exchanges texts."""
    gate, said = threading.Barrier(ranks), dict[tuple[str, int], dict[int, str]]()
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        turns = Counter[str]()

        def exchange(key: str, mine: str) -> list[str]:
            turns[key] += 1
            there = said.setdefault((key, turns[key]), {})
            there[rank] = mine
            gate.wait(10)
            return [there[r] for r in range(ranks)]

        try:
            do(rank, exchange)
        except BaseException as problem:
            problems.append(problem)
            gate.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
