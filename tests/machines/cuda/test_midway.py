"""Calls of CUDA plans that fail at some step, on simulated GPUs: they raise, and later calls of all ranks are right."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.call.executor import Executor
from hostir.call.local import rehearse
from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.call.rank import RankExecutor
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.job.groups import Groups
from hostir.kernels.low_latency import BITS, GATHERED
from hostir.machines.cuda import machine as cuda
from hostir.machines.cuda import memory as cuda_memory
from hostir.machines.cuda.machine import CudaMachine, CudaPlan
from hostir.machines.cuda.memory import ARRIVED, PeerMemory
from hostir.machines.cuda.streams import calling_streams, communication_order, workers
from tests.machines.cuda.simulated_gpus import CPU, Gpus, Shared, Stream, gpus, layers
from tests.machines.cuda.test_flow_control import BODIES, program

__all__ = ["gpus"]  # a fixture
RANKS = 3
PATTERNS = (patterns.allgather_matmul_rows, patterns.row_parallel, patterns.row_parallel_scattered)
LOWERED = {
    f"{pattern.__name__} by {strategy}": hi.lower(pattern(RANKS, 1, 12, 4 * RANKS, 6), strategy)
    for pattern in PATTERNS
    for strategy in ("ring", "fused", "push")
}
BY_HAND = {name: program(body, "%box %keep") for name, body in BODIES.items()}


class StrikeError(Exception):
    """The error of a step that fails."""


def strike() -> None:
    raise StrikeError("on strike")


class Job:
    """All ranks of a program, with two executors on each that share memory."""

    def __init__(self, program: Program, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus, whole = gpus, random_inputs(program, {})
        ranks = range(program.ranks)
        self.parts = [[shard(x, v.tensor, r, {}) for x, v in zip(whole, program.inputs, strict=True)] for r in ranks]
        self.expected = rehearse(program, [whole], {}, "aten").run()[0]
        self.plans = layers(gpus, program, self.parts, monkeypatch, None, 2)
        self.callers = [Stream() for _ in ranks]
        self.flags = self.held()

    def run(self, rank: int, executor: int) -> tuple[torch.Tensor | None, ...]:
        """Issue a call of a rank."""
        self.gpus.current = self.callers[rank]
        return self.plans[rank][executor].run(self.parts[rank])

    def fail(self, rank: int, k: int) -> None:
        """Issue a call of a rank's first executor; step `k` of the call fails."""
        plan = self.plans[rank][0]
        with contextlib.ExitStack() as after:
            after.callback(plan.steps.__setitem__, k, plan.steps[k])
            plan.steps[k] = strike
            with pytest.raises(HostIRError, match=rf"rank {rank}, '.*: StrikeError: on strike"):
                self.run(rank, 0)

    def check(self, random: Random, executors: Callable[[int], int]) -> None:
        """Let each rank make a call by the executor with the number `executors(rank)`; check results and flags."""
        outputs = [self.run(rank, executors(rank)) for rank in range(len(self.plans))]
        self.gpus.run(random)
        for rank, outs in enumerate(outputs):
            for out, parts in zip(outs, self.expected, strict=True):
                torch.testing.assert_close(out, parts[rank], rtol=1e-5, atol=1e-5)
        assert self.held() == self.flags

    def held(self) -> list[list[int]]:
        """Return the flags of all ranks."""
        memories = [plans[0].memory for plans in self.plans]
        return [
            buffer.flatten().tolist()
            for rank, memory in enumerate(memories)
            if memory is not None
            for (_, owner), buffer in memory.buffers.items()
            if owner == rank and buffer.dtype == torch.int64
        ]

    def renew(self) -> None:
        """Let all ranks renew their groups and memory, as their next calls would."""
        problems: list[BaseException] = []

        def renew(plan: CudaPlan) -> None:
            try:
                plan.machine.groups.renew(30.0)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=renew, args=(plans[0],)) for plans in self.plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout after which GPUs that wait for peers are released."""
    monkeypatch.setattr(cuda_memory, "PATIENT", 1e-4)
    monkeypatch.setattr(cuda_memory, "PAUSE", 1e-4)


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
def test_a_failure_before_peers_can_notice_hurts_no_later_call(
    strategy: str, waiting: bool, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.waiting = waiting
    job = Job(LOWERED[f"row_parallel_scattered by {strategy}"], gpus, monkeypatch)
    assert job.plans[0][0].unnoticed > 0
    for k in range(job.plans[0][0].unnoticed):
        job.fail(0, k)
        assert not job.plans[0][0].machine.groups.abandoned
        for again in (0, 1, 0):
            job.check(Random(k), lambda rank: again * (rank == 0))  # noqa: B023


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("each", {**LOWERED, **BY_HAND}.values(), ids={**LOWERED, **BY_HAND}.keys())
def test_after_a_call_that_ended_midway_the_ranks_begin_anew(
    each: Program, waiting: bool, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any step may fail, and the other ranks may be any number of calls ahead."""
    gpus.waiting = waiting
    job = Job(each, gpus, monkeypatch)
    ranks = range(each.ranks)
    for k in range(max(len(plans[0].steps) for plans in job.plans)):
        random, lost = Random(k), k % each.ranks
        plan = job.plans[lost][0]
        if not plan.unnoticed <= k < len(plan.steps):
            continue
        for rank in random.sample(ranks, each.ranks):
            if rank == lost:
                job.fail(lost, k)
            else:
                for ahead in range(random.randrange(4)):
                    job.run(rank, ahead % 2)
        assert "StrikeError: on strike" in plan.machine.groups.abandoned
        with contextlib.suppress(AssertionError):  # some ranks wait for ever
            gpus.run(random)
        job.renew()
        assert not plan.machine.groups.abandoned
        for executor in (1, 0):
            job.check(random, lambda rank: executor)  # noqa: B023


ALONE = """hostir 1
mesh @mesh [didx] = 0
program @alone(%x: f32[8]) -> (%y) streams 1 {
  %user = current_stream
  %f: flag[1] = allocate_symmetric
  %y: f32[8] = allocate
  set_stream 0
  synchronize %user
  wait_signal %f[0] >= 1
  relu %x -> %y
  set_stream %user
  signal %f[0] = 1 at 0 over didx
  synchronize 0
}
"""


@pytest.mark.usefixtures("impatient")
def test_a_rank_alone_begins_anew_at_once(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    lone = hi.parse(ALONE)
    monkeypatch.setattr(cuda, "PeerMemory", lambda device, rank, group: Shared(rank, {}))
    machine = CudaMachine(CPU, lone, gpus.kernels(), Groups(0, CPU))
    monkeypatch.setattr(RankExecutor, "_join", lambda *_: machine)
    executor = Executor(lone, machine="cuda", graphs=False)
    x = torch.randn(8)
    for k in range(20):
        (y,) = executor(x)
        gpus.run(Random(k))
        assert torch.equal(y, x.relu()), k
        (plan,) = executor.plans.values()
        assert isinstance(plan, CudaPlan)
        if k < len(plan.steps):
            step, plan.steps[k] = plan.steps[k], strike
            with pytest.raises(HostIRError, match=r"rank 0, '.*: StrikeError: on strike"):
                executor(x)
            plan.steps[k] = step
            assert (plan in executor.plans.values()) is (k < plan.unnoticed)
    assert len(plan.steps) < 20


class Clock:
    """A clock that only sleep moves, and a GPU and an abort of NCCL that take their time by it.

    Fields:
        works: the time at which the GPU becomes idle.
        aborts: the seconds that the abort takes.
        done: what was done, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, works: float = 0.0, aborts: float = 0.0) -> None:
        self.works, self.aborts = works, aborts
        self.now = 0.0
        self.done: list[str] = []
        monkeypatch.setattr(cuda_memory, "calling_streams", lambda device: [self])
        monkeypatch.setattr(cuda_memory, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def query(self) -> bool:
        return self.now >= self.works


class Aborting:
    """A thread that runs at once, and lives for as long as the clock says."""

    def __init__(self, clock: Clock, target: Callable[[], None], **_: object) -> None:
        self.clock, self.target = clock, target
        self.ident: int | None = None
        self.until = 0.0

    def start(self) -> None:
        self.ident, self.until = 1, self.clock.now + self.clock.aborts
        self.target()

    def is_alive(self) -> bool:
        return self.clock.now < self.until


def released(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, refusal: Exception | None = None, slow: float = 0.0
) -> list[str]:
    """Release a GPU with a timeout of 0.4 s; return what was done, in order.

    Raising flags takes `slow` seconds at least. The abort of NCCL raises `refusal`.
    """
    done, memory = clock.done, PeerMemory(CPU, 0)
    monkeypatch.setattr(cuda_memory, "threading", SimpleNamespace(Thread=partial(Aborting, clock)))
    monkeypatch.setattr(memory, "synchronize", lambda: done.append("synchronized"))

    def raise_flags(memories: object, needed: Callable[[], bool]) -> None:
        done.append("raised")
        clock.sleep(slow)
        while needed():
            clock.sleep(1e-3)

    def abort() -> None:
        done.append("aborted")
        if refusal is not None:
            raise refusal

    monkeypatch.setattr(memory, "raise_flags", raise_flags)
    done.append(memory.release([], abort, 0.4))
    return done


LATE = "its GPU has not ended its work after 0.34 s"


@pytest.mark.parametrize(
    ("works", "aborts", "slow", "done"),
    [
        (0.0, 0.05, 0.0, ["aborted", "synchronized", ""]),
        (0.05, 0.0, 0.0, ["aborted", "synchronized", ""]),
        (0.15, 0.0, 0.0, ["raised", "aborted", "synchronized", ""]),
        (0.25, 0.0, 0.0, ["raised", "aborted", "raised", "synchronized", ""]),
        (9.0, 0.0, 0.0, ["raised", "aborted", "raised", LATE]),
        (9.0, 0.0, 0.5, ["raised", "aborted", "raised", LATE]),
        (0.0, 9.0, 0.0, ["aborted", LATE]),
    ],
)
def test_flags_are_raised_only_while_a_gpu_works(
    works: float, aborts: float, slow: float, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert released(monkeypatch, Clock(monkeypatch, works, aborts), slow=slow) == done


def test_an_error_of_the_abort_of_nccl_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    done = released(monkeypatch, Clock(monkeypatch), ValueError("NCCL is gone"))
    assert done == ["aborted", "synchronized", "ValueError: NCCL is gone"]


@pytest.mark.parametrize("refusal", [None, ValueError("NCCL is gone")])
def test_nccl_is_aborted_after_an_error_of_the_gpu(refusal: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, problem = Clock(monkeypatch), "CUDA error: an illegal memory access"

    def query() -> bool:
        raise RuntimeError(problem)

    monkeypatch.setattr(clock, "query", query)
    assert released(monkeypatch, clock, refusal) == ["aborted", problem]


def test_an_abort_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    over = threading.Event()

    def abort() -> None:
        over.wait()

    assert PeerMemory(CPU, 0).release([], abort, 0.4) == LATE
    over.set()


def test_a_gpu_works_while_a_stream_of_calls_or_of_the_memory_works(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self) -> None:
            self.idle = True

        def query(self) -> bool:
            return self.idle

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    of_calls, aside = Stream(), Stream()
    monkeypatch.setattr(cuda_memory, "calling_streams", lambda device: [of_calls])
    memory: Any = SimpleNamespace(kept={"apart": aside, "calls": torch.zeros(1)})
    working = PeerMemory(CPU, 0).working([memory])
    assert not working()
    for stream in (of_calls, aside):
        stream.idle = False
        assert working()
        stream.idle = True


@pytest.mark.parametrize("dtype", GATHERED)
def test_slots_are_filled_with_what_the_kernel_takes_for_nan(dtype: torch.dtype) -> None:
    filled = torch.full((64,), ARRIVED, dtype=torch.int16).view(BITS[dtype.itemsize])
    assert (filled != 0).all(), "an element looks as if it were not there"
    assert (~filled).view(dtype).float().view(-1, 2).isnan().any(1).all()


def test_the_streams_of_calls_are_all_workers_and_the_latest_callers(gpus: Gpus) -> None:
    assert calling_streams(CPU) == []
    made, order = workers(CPU, 2), communication_order(CPU)
    for caller in (gpus.current, Stream()):
        gpus.current = caller
        order.follow()
        assert calling_streams(CPU) == [*made, caller]


def test_a_rank_overwrites_its_own_rows_and_no_flags(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(LOWERED["row_parallel by push"], gpus, monkeypatch)
    memory = job.plans[0][0].memory
    assert memory is not None
    for buffer in memory.flat.values():
        buffer.fill_(1)
    memory.overwrite(1, torch.full((7,), 0xFF, dtype=torch.uint8))  # no buffer is a multiple of this page
    for (_, owner), buffer in memory.flat.items():
        overwritten = owner == 1 and buffer.is_floating_point()
        assert buffer.isnan().all() if overwritten else (buffer == 1).all()
    assert {owner for _, owner in memory.flat} == {0, 1, 2}
