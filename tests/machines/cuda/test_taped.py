"""A plan's third run issues to the driver what its first run issued, by native code and for other addresses.

The GPU is not there, and neither is its driver: a library records the calls of the driver.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import _pop_mode_temporarily

import hostir as hi
from examples import patterns
from hostir.call import rank
from hostir.call.bound import BoundCall
from hostir.call.rank import RankExecutor
from hostir.ir.source import Diagnostic, HostIRError
from hostir.job.agreement import RefusedError
from hostir.job.groups import Groups
from hostir.job.links import AlikeError, MisalignedError
from hostir.kernels import devices, parameters
from hostir.kernels.devices import StandIn
from hostir.kernels.matmul.prepared import MatmulLaunch
from hostir.kernels.parameters import TAPING, KernelLaunch
from hostir.machines.binding import bind_compute, places
from hostir.machines.cuda import blocks, copies, credits, flags, machine, native, nccl, products, streams, taped
from hostir.machines.cuda import driver as cuda_driver
from hostir.machines.cuda.machine import CudaPlan
from hostir.machines.cuda.tape import (
    AWAIT,
    COLLECTIVE,
    COPY,
    COUNT,
    LAUNCH,
    MEMORY,
    MEMSET,
    RECORD,
    ROWS,
    Segment,
    TapeEntry,
    TapeWriter,
    without_redundant_waits,
)
from hostir.machines.cuda.taped import IssuedSteps, Tapes
from hostir.machines.cuda.timeline import Timeline
from hostir.plan.operations import AllocateOp, CollectiveOp, ComputeOp
from hostir.plan.unroll import unroll
from hostir.plan.unrolled import UnrolledProgram
from tests.counting import calls_of
from tests.kernels.hopper import Hopper, hopper, inputs_of
from tests.machines.cuda.test_native import NO_COMPILER, FakeDriver, Graph, Set, driver, module

__all__ = ["driver", "module"]  # fixtures
pytestmark = NO_COMPILER
WORK = LAUNCH, MEMORY, COPY, ROWS, MEMSET, COLLECTIVE, COUNT
LETTERS = {"i1": "b", "i32": "i", "i64": "l", "fp32": "f", "nvTmaDesc": "m"}


class Stream:
    """A stream with a handle."""

    handles = itertools.count(0x1000, 0x10)
    priority = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = next(self.handles)

    def wait_stream(self, other: Stream) -> None:
        """Wait for the work of another stream, as after a failure."""


class Event:
    """An event with a handle, whose calls reach the fake driver."""

    handles = itertools.count(0x9000, 0x10)
    library: Any = None

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_event = next(self.handles)

    def record(self, stream: Stream) -> None:
        self.library.cuEventRecord(ctypes.c_void_p(self.cuda_event), ctypes.c_void_p(stream.cuda_stream))

    def wait(self, stream: Stream) -> None:
        self.library.cuStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(self.cuda_event), 0)


class Current:
    """The stream that is current."""

    stream: Any = Stream()


def launched_by(fake: FakeDriver, launcher: Any) -> dict[str, Any]:
    """Methods of `devices.Compiled` whose launches reach the fake driver, with all parameters."""
    kept: list[Any] = []

    def begin(self: Any, kernel: Any) -> None:
        self.kernel_launch = KernelLaunch.of(kernel)
        letters = "".join("p" if t.startswith("*") else LETTERS[t] for t in flat_types(self.kernel_launch.types))
        kept.append(ctypes.create_string_buffer((letters + "pp").encode()))
        self.kernel_launch = replace(self.kernel_launch, function=ctypes.addressof(kept[-1]))
        self.stream = lambda index: Current.stream.cuda_stream

    def encoded(self: Any, number: int, descriptor: Any) -> tuple[int, ...]:
        return (descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides)

    def launch(self: Any, programs: int, stream: int, arguments: Sequence[Any]) -> None:
        if TAPING.writer is not None:
            TAPING.writer.launch(self, programs, stream, arguments)
        alone = TapeWriter(list, {stream: 0})
        alone.launch(self, programs, stream, arguments)
        native.native(launcher, Segment.of(alone.entries), (stream,))([])

    return {"__init__": begin, "encoded": encoded, "launch": launch}


def flat_types(types: Sequence[Any]) -> list[str]:
    """The types of the parameters that a kernel has."""
    return [t for each in types for t in (flat_types(each) if isinstance(each, tuple) else [each]) if t != "constexpr"]


@pytest.fixture
def gpu(module: Any, driver: FakeDriver) -> Iterator[Hopper]:
    """A Hopper GPU whose driver is the fake one."""
    with hopper() as hopper_gpu, pytest.MonkeyPatch.context() as patch:  # undone before the fakes of `hopper`
        compile_ = hopper_gpu.compile

        def compiled(function: Any, key: str, signature: Any, *rest: Any) -> Any:
            kernel = compile_(function, key, signature, *rest)
            kernel.src = SimpleNamespace(signature=signature)
            described = [{} for each in signature.values() if str(each).startswith("tensordesc")]
            options = {"num_warps": 4, "num_ctas": 1, "shared": 64, "launch_pdl": False}
            kernel.metadata = SimpleNamespace(
                name=function.__name__, launch_cooperative_grid=False, tensordesc_meta=described, **options
            )
            return kernel

        hopper_gpu.compile = compiled  # type: ignore[method-assign]
        for name, method in launched_by(driver, module).items():
            patch.setattr(devices.Compiled, name, method)
        for where in (cuda_driver, copies):
            patch.setattr(where, "cuda_driver", lambda: driver.library)
        for where in (blocks, credits, flags):
            patch.setattr(where, "in_batches", cuda_driver.in_batches)
        patch.setattr(copies, "StridedCopy", StridedCopy)
        patch.setattr(Event, "library", driver.library)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "default_stream", lambda device: Current.stream)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Current, "stream", stream))
        patch.setattr(machine, "current", lambda device: CALLERS[0])
        patch.setattr(streams, "new_stream", lambda device, priority: Stream())
        patch.setattr(parameters, "tensor_map", lambda address: struct.pack("<16Q", address, *[0] * 15))
        yield hopper_gpu


StridedCopy = copies.StridedCopy
STREAMS = [Stream() for _ in range(3)]  # callers' streams
CALLERS = [STREAMS[0]]  # the stream of the next call
FUSIONS = {
    "gathered": lambda: patterns.allgather_matmul(2, S=2, M=4096, K=8192, N=3584, dtype="bf16"),
    "scattered": lambda: patterns.row_parallel_scattered(2, S=2, M=4096, K=7168, N=8192, dtype="bf16"),
    "summed few": lambda: patterns.row_parallel(2, S=1, M=64, K=512, N=1024, dtype="bf16"),
}


def relative(lines: Sequence[str]) -> list[str]:
    """The lines with large addresses replaced by the order in which their memory first appears."""
    known: dict[int, int] = {}

    def name(match: re.Match[str]) -> str:
        memory, offset = divmod(int(match[0], 16), 1 << 40)
        if memory < 128:  # an address of this process, below 1 << 47: memory that the kernel reports to
            return match[0]
        return f"{known.setdefault(memory, len(known))}+{offset:x}"

    return [re.sub(r"\b[0-9a-f]{11,}\b", name, re.sub(r"/[0-9a-f]+(?= )", "", line)) for line in in_order(lines)]


def in_order(lines: Sequence[str]) -> list[str]:
    """The work without events. Each line begins with the numbers of the lines that it follows, also by events.

    Negative numbers stand for the work of each stream before these lines, and for each event recorded elsewhere.
    A last line for each stream says what later work of the stream follows.
    """
    streams = sorted({line.split(":")[0] for line in lines})
    follows: dict[str, set[int]] = {stream: {-1 - number} for number, stream in enumerate(streams)}
    events: dict[str, set[int]] = {}
    ordered: list[str] = []
    for line in lines:
        stream, what = line.split(": ", 1)
        if what.startswith("record "):
            events[what.split()[1]] = {*follows[stream]}
        elif what.startswith("wait "):
            event = what.split()[1]
            follows[stream] |= events.get(event, {-1000 - int(event, 0)})
        else:
            ordered.append(f"{sorted(follows[stream])} {line}")
            follows[stream].add(len(ordered) - 1)
    return [*ordered, *(f"{sorted(follows[stream])} {stream}: after" for stream in streams)]


@pytest.mark.parametrize("complete", [False, True])
def test_redundant_waits_are_left_out_and_the_order_stays(complete: bool) -> None:
    random, total, left = Random(), 0, 0
    for _ in range(4000):
        entries = [
            TapeEntry(random.choice([RECORD, AWAIT, random.choice(WORK)]), n, random.randrange(3), (event,), (), "")
            for n in range(random.randrange(40))
            for event in [random.randrange(4)]
        ]
        fewer = without_redundant_waits(entries, {}, complete=complete)
        kinds = {RECORD: "record", AWAIT: "wait"}
        lines, remaining = (
            [f"{e.stream}: {kinds.get(e.kind, 'work')} {e.fields[0]}" for e in each] for each in (entries, fewer)
        )
        total, left = total + len(entries), left + len(fewer)
        silent = [
            f"{stream}: work" for stream in range(3)
        ]  # one line for each stream: both lists name the same streams
        for runs in (1, 2):  # a run may wait for an event of the run before
            assert in_order([*silent, *remaining * runs]) == in_order([*silent, *lines * runs])
        awaited = {entry.fields for entry in fewer if entry.kind == AWAIT}
        records = [
            entry.fields for entry in entries if entry.kind == RECORD and (not complete or entry.fields in awaited)
        ]
        assert [entry.fields for entry in fewer if entry.kind == RECORD] == records
    assert 0 < left < total


def test_a_wait_is_redundant_if_an_earlier_wait_implies_it() -> None:
    steps = [(1, COPY, 0), (1, RECORD, 7), (1, COPY, 0), (1, RECORD, 8), (0, AWAIT, 8), (0, AWAIT, 7), (0, COPY, 0)]
    entries = [TapeEntry(kind, n, stream, (event,), (), "") for n, (stream, kind, event) in enumerate(steps)]
    numbers: dict[int, int] = {}
    fewer = without_redundant_waits(entries, numbers, complete=True)
    assert [entry.place for entry in fewer] == [0, 2, 3, 4, 6]
    assert [entry.text for entry in fewer if entry.kind in (RECORD, AWAIT)] == ["record event 0", "wait for event 0"]
    assert numbers == {8: 0}
    assert [e.place for e in without_redundant_waits(entries, numbers, complete=False)] == [0, 1, 2, 3, 4, 6]
    assert numbers == {8: 0, 7: 1}, "an event keeps its number in all segments"


PYTHON_BETWEEN = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[2@didx, 64]) -> (%y) streams 2 {
  %user = current_stream
  %r = rank of %x over didx
  %box: f32[2@didx, 64] = allocate_symmetric
  %f: flag[2] = allocate_symmetric
  %y: f32[2@didx, 64] = allocate
  delay 5 us
  set_stream 0   signal %f[0] = 1 at %r over didx
  set_stream 1   wait_signal %f[0] >= 1
  set_stream %user   synchronize 0   synchronize 1   copy %x -> %y   barrier of %x over didx
}
"""


def test_an_event_is_recorded_before_a_step_in_python_for_a_wait_after_it(
    gpu: Hopper, driver: FakeDriver, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    program = hi.parse(PYTHON_BETWEEN)
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    logs = [issued(plan, inputs_of(program, 0), driver) for _ in range(4)]
    first, _, last = plan.tapes.latest.text.partition("by Python")
    assert "record event 0" in first
    assert "wait for event 0" in last
    assert all(relative(log) == relative(logs[0]) for log in logs)


@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_native_code_issues_what_python_issues_for_any_addresses(
    fusion: str, strategy: str, gpu: Hopper, driver: FakeDriver, module: Any
) -> None:
    program = hi.lower(FUSIONS[fusion](), strategy)
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    driver.take()
    logs, calls = [], []
    for _ in range(5):
        inputs = inputs_of(program, 0)
        Current.stream = CALLERS[0] = STREAMS[0]
        plan.run(inputs)
        logs.append(driver.take())
        calls.append([x.data_ptr() for x in inputs if x is not None])
        assert plan.issued == len(plan.steps)
    assert len(logs[0]) > 2
    for lines in logs[1:]:
        assert relative(lines) == relative(logs[0])
    (taped,) = plan.tapes.by_key.values()
    assert len(taped.steps) < len(plan.steps)
    assert "by Python: 'sum" not in taped.text
    assert len({*map(tuple, calls)}) == 5, "the inputs of each call are elsewhere"


@pytest.mark.parametrize("strategy", ["ring", "fused", "push"])
@pytest.mark.parametrize("fusion", ["gathered", "scattered"])
def test_a_warm_call_takes_few_calls_of_functions(
    fusion: str, strategy: str, gpu: Hopper, driver: FakeDriver, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views and changes of the current stream are left out, as no step in Python needs them."""
    rows = {"gathered": patterns.allgather_matmul, "scattered": patterns.row_parallel_scattered}[fusion]
    program = hi.lower(rows(2, S=1, M=4096, K=8192, N=3584, dtype="bf16"), strategy)
    empty, at = torch.empty_strided, list[str]()  # the device on which the call allocates, if it is not the GPU

    def allocate(*layout: Any, **options: Any) -> torch.Tensor:
        return empty(*layout, **{**options, "device": at[0]} if at else options)

    monkeypatch.setattr(torch, "empty_strided", allocate)
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    for _ in range(3):
        issued(plan, inputs_of(program, 0), driver)
    monkeypatch.setattr(RankExecutor, "_join", lambda executor, *arguments: plan.machine)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAMS[0])
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    executor = RankExecutor(program, machine="cuda", graphs=False)
    (taped,) = plan.tapes.by_key.values()
    allocations = sum(isinstance(op, AllocateOp) for op in plan.unrolled.ops)
    assert taped is not None
    assert len(taped.steps) <= allocations + 2, "a segment, and what keeps workspaces"
    layouts = [(x.shape, x.dtype) for x in inputs_of(program, 0) if x is not None]
    with _pop_mode_temporarily():  # native code needs only the addresses of tensors: these are on the CPU
        at.append("cpu")
        inputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in layouts]
        executor.latest = BoundCall(plan, inputs, None, None, "")
        executor(*inputs)
        driver.take()
        calls = calls_of(lambda: executor(*inputs)) - 1 - allocations  # without the functions of this test
    assert len(driver.take()) > 2
    assert calls <= 20


class Captured:
    """An executor of `push` on rank 0 of two whose captures run `ring`, with fake plans that only record their runs."""

    def __init__(self, gpu: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing, self.ran, self.held, self.log = False, list[tuple[str, bool]](), list[Any](), list[str]()
        for name, fake in (("is_current_stream_capturing", "cuda"), ("_cuda_isCurrentStreamCapturing", "_C")):
            monkeypatch.setattr(getattr(torch, fake), name, lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAMS[0])
        monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: self.log.append("cuBLAS"))
        monkeypatch.setattr(rank, "hold", lambda plan, stream: self.held.append(plan))
        programs = {name: hi.lower(FUSIONS["summed few"](), name) for name in ("push", "ring")}
        self.inputs = tuple(inputs_of(programs["push"], 0))
        plans = {name: gpu.plan(program, 0, "triton", self.inputs) for name, program in programs.items()}
        for name, plan in plans.items():
            monkeypatch.setattr(plan, "run", lambda *given, name=name: self.ran.append((name, given[2])))
        self.push, self.ring = plans["push"], plans["ring"]
        monkeypatch.setattr(RankExecutor, "_join", lambda executor, *arguments: self.push.machine)
        self.executor, self.other = (RankExecutor(programs[name], machine="cuda", graphs=False) for name in plans)
        self.executor._communicates = False
        monkeypatch.setattr(self.executor, "_choose", lambda key, inputs, out=None, places=False: self.push)
        monkeypatch.setattr(self.other, "_unrolled", lambda inputs: ({"M": 2}, None, self.ring.unrolled))
        monkeypatch.setattr(self.other, "_plan", self.plan)
        monkeypatch.setattr(self.other._agreement, "reach", self.reach)
        self.problem: Exception | None = None
        self.watched: list[Any] = []
        dog: Any = SimpleNamespace(
            plan=None, replaced=False, disturbed=False, observe=lambda *x: self.watched.append(x)
        )
        self.executor.watchdog = dog
        self.executor.decided = lambda sizes: (self.other, "")

    def plan(self, unrolled: UnrolledProgram, kind: object, inputs: object) -> CudaPlan:
        assert (unrolled, kind) == (self.ring.unrolled, None)
        self.log.append("plan")
        if self.problem is not None:
            raise self.problem
        return self.ring

    def reach(self, sizes: object, kind: Any) -> None:
        assert (sizes, kind) == ({"M": 2}, (("M", 2),))
        self.log.append("meet")
        self.other._agreement.agreed.add(kind)

    def bind(self) -> None:
        self.executor.bound.clear()
        self.executor._bind(self.inputs, None, None)

    def issue(self, *, capturing: bool) -> None:
        self.capturing = capturing
        call: Any = SimpleNamespace(plan=self.push, graph=None)
        try:
            self.executor._issue(call, self.inputs, None)
        finally:
            self.capturing = False


@pytest.fixture
def captured(gpu: Hopper, driver: FakeDriver, module: Any, monkeypatch: pytest.MonkeyPatch) -> Captured:
    return Captured(gpu, monkeypatch)


def test_a_capture_issues_the_plan_for_captures(captured: Captured) -> None:
    captured.bind()
    assert captured.push.for_captures is captured.ring
    assert captured.log == ["meet", "cuBLAS", "plan"], "a capture neither connects ranks nor allocates for cuBLAS"
    captured.bind()
    assert len(captured.log) == 3, "there is a plan"
    captured.issue(capturing=False)
    assert not captured.held
    captured.issue(capturing=True)
    assert captured.ran == [("push", False), ("ring", True)]
    assert captured.watched == [(captured.push, False), (captured.ring, True)]
    assert captured.held == [captured.ring, captured.push]
    memory = captured.push.memory
    assert memory is not None
    assert captured.push in memory.captured, "inputs may lie in its memory"


def test_later_plans_for_captures_are_made_without_the_other_ranks(captured: Captured) -> None:
    captured.bind()
    captured.push.for_captures, captured.push.settled = None, False
    captured.bind()
    assert captured.push.for_captures is captured.ring
    assert captured.log.count("meet") == 1


def test_places_also_give_the_plan_for_captures(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "places", lambda unrolled, memory, registers: ())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=list))
    captured.executor.places(*captured.inputs)
    assert captured.push.for_captures is captured.ring


def test_captures_issue_the_plan_of_plain_calls_if_they_run_the_same_program(
    captured: Captured, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "hostir.call.rank")
    asked: list[object] = []
    for captured.executor.decided in (None, lambda sizes: None):
        captured.bind()
        assert not captured.push.settled, "it may become known"
    captured.executor.decided = lambda sizes: asked.append(sizes) or (captured.executor, "slow replays")
    for _ in range(3):
        captured.bind()
        assert captured.push.for_captures is None
    assert len(asked) == 1, "the answer is remembered"
    assert captured.push.eager_only == "slow replays"
    assert "slow replays" not in caplog.text, "this executor captures no graphs in any case"
    monkeypatch.setattr(captured.executor, "_graphs", SimpleNamespace())
    captured.push.settled, captured.push.plain = False, ""
    captured.bind()
    assert caplog.text.count("no CUDA graph is captured: slow replays") == 1
    captured.issue(capturing=True)
    assert captured.ran == [("push", True)]
    assert not captured.log


def test_calls_are_not_replayed_while_they_are_timed(captured: Captured) -> None:
    captured.executor.decided = None
    captured.bind()
    assert captured.executor._graphs is None, "the test's executor makes no graphs"
    assert captured.push.eager_only == ""
    captured.executor.issue_plainly("they are timed")
    assert captured.push.eager_only == "they are timed"
    for decided, reason in ((None, "they are timed"), ((captured.executor, ""), ""), ((captured.executor, "slow"), "")):
        captured.executor.decided = lambda sizes: decided  # noqa: B023
        captured.bind()
        assert captured.push.eager_only == reason, "what is decided holds"
    captured.push.plain, captured.push.uniform_only = "they are timed", "NCCL"
    assert captured.push.eager_only == "NCCL", "the reason that always holds comes first"


def test_a_plan_for_captures_is_not_made_in_a_capture(captured: Captured) -> None:
    captured.capturing = True
    with pytest.raises(HostIRError, match=r"for the first time inside a CUDA graph capture\n.*call it once"):
        captured.bind()
    assert not captured.log


@pytest.mark.parametrize("refused", ["", "here", "on another rank"])
def test_only_captures_fail_if_their_plan_cannot_be_made(
    refused: str, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured.problem, told = ValueError("no compiler"), list[HostIRError]()
    monkeypatch.setattr(captured.other._agreement, "refuse", told.append)
    if refused == "here":
        monkeypatch.setattr(captured.other, "_unrolled", unplanned)
    elif refused:
        monkeypatch.setattr(captured.other._agreement, "reach", unreached)
    captured.bind()
    captured.issue(capturing=False)
    for _ in range(2):
        with pytest.raises(
            HostIRError, match=r"cannot be captured in a CUDA graph: (ValueError: no compiler|no memory)"
        ):
            captured.issue(capturing=True)
    kept = captured.push.for_captures
    assert isinstance(kept, HostIRError)
    assert kept.__traceback__ is None, "it would keep the tensors of the failed captures"
    assert captured.ran == [("push", False)]
    assert [str(problem) for problem in told] == ["error: no memory"] * (refused == "here"), "ranks wait at the meeting"
    captured.capturing = True
    captured.bind()  # of a call at other addresses, which then raises the reason
    captured.capturing = False
    assert captured.push.for_captures is kept
    captured.problem = None
    captured.bind()
    assert captured.push.for_captures is (kept if refused else captured.ring), "a failure on this rank alone may pass"


@pytest.mark.parametrize("problem", [AlikeError(Diagnostic("too little")), MisalignedError("the calls differ")])
def test_an_error_of_all_ranks_that_plan_for_captures_ends_the_call(problem: HostIRError, captured: Captured) -> None:
    captured.problem = problem
    with pytest.raises(type(problem)):
        captured.bind()


def unreached(sizes: object, kind: object) -> None:
    raise RefusedError(Diagnostic("no memory"))


def unplanned(inputs: object) -> None:
    raise HostIRError(Diagnostic("no memory"))


def test_captures_run_the_same_program_if_calls_are_compared_or_write_their_inputs(captured: Captured) -> None:
    assert captured.executor.may_differ_in_captures
    for field, value in (("_compare", True), ("_written", (0,)), ("machine", "gloo")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(captured.executor, field, value)
            assert not captured.executor.may_differ_in_captures


def test_a_plan_that_only_torch_can_issue_keeps_no_tape(gpu: Hopper, driver: FakeDriver, module: Any) -> None:
    program = hi.lower(FUSIONS["summed few"](), "push")
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    step = partial(torch.zeros, 1)
    plan.tapes, plan.steps, plan.ops, plan.launches = Tapes(module), [step], plan.ops[:1], []
    plan.in_python = IssuedSteps.of(plan.steps)
    for _ in range(3):
        plan.run(inputs_of(program, 0))
    assert plan.tapes is None
    assert plan.issued == 1


@pytest.mark.parametrize("strategy", ["ring", "fused"])
def test_every_call_reads_torchs_setting_of_tf32(
    strategy: str, gpu: Hopper, driver: FakeDriver, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = hi.lower(patterns.allgather_matmul(2, S=2, M=4096, K=8192, N=3584, dtype="f32"), strategy)
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    seen: list[bool] = []
    launch = MatmulLaunch.launch
    monkeypatch.setattr(
        MatmulLaunch, "launch", lambda self, call: (seen.append("tf32" in str(self.constants)), launch(self, call))[1]
    )
    for number in range(8):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", number >= 4)
        Current.stream = CALLERS[0] = STREAMS[0]
        seen.clear()
        plan.run(inputs_of(program, 0))
        assert seen
        assert set(seen) == {number >= 4}, number


def test_the_tape_of_a_program_prints_as_text_as_in_the_page(gpu: Hopper, driver: FakeDriver, module: Any) -> None:
    fusion = patterns.allgather_matmul(2, S=1, M=2048, K=4096, N=3584, dtype="bf16")
    plan = gpu.plan(program := hi.lower(fusion, "ring"), 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    assert plan.tapes.latest is None
    for _ in range(3):
        Current.stream = CALLERS[0] = STREAMS[0]
        plan.run(inputs_of(program, 0))
    text = re.sub(r"0x[0-9a-f]{7,}", "0x...", plan.tapes.latest.text)
    page = (Path(__file__).parents[3] / "docs/calls.md").read_text(encoding="utf-8")
    assert f"```text\n{text}\n```" in page


def test_a_tape_is_for_one_stream_and_one_alignment(gpu: Hopper, driver: FakeDriver, module: Any) -> None:
    program = hi.lower(FUSIONS["gathered"](), "ring")
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    logs: dict[int, list[str]] = {}
    for number in range(9):
        CALLERS[0] = Current.stream = STREAMS[number % 3]
        plan.run(inputs_of(program, 0))
        lines = driver.take()
        handles = {line.split(":")[0] for line in lines}
        assert f"{STREAMS[number % 3].cuda_stream:#x}" in handles
        assert not handles & {f"{s.cuda_stream:#x}" for s in STREAMS if s is not CALLERS[0]}
        assert relative(logs.setdefault(number % 3, lines)) == relative(lines)
    assert [key[0] for key in plan.tapes.by_key] == [stream.cuda_stream for stream in STREAMS]
    inputs = inputs_of(program, 0)
    inputs[0] = StandIn.of(inputs[0].shape, inputs[0].stride(), inputs[0].dtype, inputs[0].device, (1 << 50) + 2)
    plan.run(inputs)
    assert [*plan.tapes.by_key.values()].count(None) == 1, "a run with another alignment is issued by Python at first"


def issued(plan: Any, inputs: Sequence[torch.Tensor | None], driver: FakeDriver) -> list[str]:
    """What a run issues to the driver."""
    driver.take()
    Current.stream = CALLERS[0] = STREAMS[0]
    plan.run(inputs)
    return driver.take()


def native_and_python(
    program: hi.Program,
    first: Callable[[Any], list[torch.Tensor | None]],
    gpu: Hopper,
    driver: FakeDriver,
    module: Any,
) -> Iterator[tuple[list[str], list[str]]]:
    """What native code and what Python issue: for inputs like `first(plan)`, and then for separate new inputs."""
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    tapes = Tapes(module)
    for number in range(8):
        inputs = first(plan) if number < 4 else inputs_of(program, 0)
        logs = []
        for plan.tapes in (tapes, None):
            logs.append(relative(issued(plan, inputs, driver)))
        yield logs[0], logs[1]
    assert any(tapes.by_key.values())


@pytest.mark.parametrize("strategy", ["ring", "fused"])
def test_inputs_that_overlap_or_are_the_same_once_may_be_separate_later(
    strategy: str, gpu: Hopper, driver: FakeDriver, module: Any
) -> None:
    program = hi.lower(FUSIONS["gathered"](), strategy)

    def overlapping(plan: Any) -> list[torch.Tensor | None]:
        a, b = inputs_of(program, 0)
        assert a is not None
        assert b is not None
        return [a, StandIn.of(b.shape, b.stride(), b.dtype, b.device, a.data_ptr() + 1024)]

    for by_native, by_python in native_and_python(program, overlapping, gpu, driver, module):
        assert by_native == by_python


def test_an_input_in_its_place_in_symmetric_memory_once_may_be_elsewhere_later(
    gpu: Hopper, driver: FakeDriver, module: Any
) -> None:
    """Rank 0's rows are first in the buffer of all rows, so their address is the buffer's address, too."""
    fusion = patterns.allgather_matmul_rows(2, S=2, M=4096, K=8192, N=3584, dtype="bf16")
    program = hi.lower(fusion, "push")

    def placed(plan: Any) -> list[torch.Tensor | None]:
        home, _ = places(plan.unrolled, plan.memory, plan.registers)
        assert home is not None
        return [home, inputs_of(program, 0)[1]]

    for by_native, by_python in native_and_python(program, placed, gpu, driver, module):
        assert by_native == by_python


def test_native_code_runs_on_the_plans_device_even_if_another_one_is_current(
    gpu: Hopper, driver: FakeDriver, module: Any
) -> None:
    """The fake driver refuses calls in another context than that of the plan's device."""
    program = hi.lower(FUSIONS["gathered"](), "ring")
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    logs = [issued(plan, inputs_of(program, 0), driver) for _ in range(3)]
    driver.library.cuCtxSetCurrent(ctypes.c_void_p(2))
    try:
        logs.append(issued(plan, inputs_of(program, 0), driver))
    finally:
        driver.library.cuCtxSetCurrent(ctypes.c_void_p(1))
    assert relative(logs[3]) == relative(logs[2])


@pytest.mark.parametrize("knob", [False, True])
def test_a_profiler_sees_the_work_of_each_statement_in_a_range_with_its_text(
    knob: bool, gpu: Hopper, driver: FakeDriver, module: Any
) -> None:
    program = hi.lower(FUSIONS["gathered"](), "ring")
    with hi.knobs.scope(profile=knob):
        plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    logs = []
    for number in range(5):
        if number < 3:
            logs.append(issued(plan, inputs_of(program, 0), driver))
        else:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                logs.append(issued(plan, inputs_of(program, 0), driver))
    names = [event.name for event in profile.events() if event.name.startswith(f"@{program.name}: ")]
    texts = [f"@{program.name}: {plan.unrolled.text(op)}" for op in plan.ops]
    assert [name.partition(" in round")[0] for name in names] == texts
    assert any(" matmul " in f" {name} " and " in round 0" in name for name in names)
    assert all(relative(log) == relative(logs[0]) for log in logs)
    assert bool(any(plan.tapes.by_key.values())) is not knob


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_a_call_of_the_driver_that_fails_names_its_statement(
    runs: int, gpu: Hopper, driver: FakeDriver, module: Any
) -> None:
    """The call is made by Python, by Python while it is recorded, or by native code."""
    program = hi.lower(FUSIONS["gathered"](), "ring")
    lines: list[str] = []
    for number in (runs + 1, runs):  # the first plan shows the calls of the run in which a call fails
        plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
        plan.tapes = Tapes(module)
        for _ in range(number):
            driver.take()
            plan.run(inputs_of(program, 0))
        lines = lines or driver.take()
    copy = [number for number, line in enumerate(lines) if "copy" in line][-1]  # the first one is within the GPU
    driver.take()
    driver.fail(copy)
    with pytest.raises(HostIRError, match=r"rank 0, 'get .*an illegal memory access was encountered") as failed:
        plan.run(inputs_of(program, 0))
    driver.fail(-1)
    assert plan.machine.groups.abandoned, "peers may wait for the rest of the call"
    assert failed.value.diagnostics[0].span is not None


# Two blocks of torch's memory, a workspace for each capture, and an address in each of them.
FIRST, SECOND, LENGTH = 0xABCD00001000, 0xABCD00500000, 1 << 20
AT_FIRST, AT_SECOND = FIRST + 256, SECOND + 256
THIRD = 0xABCD00A00000  # a block of another stream
SNAPSHOT = [
    {"address": FIRST - 512, "total_size": 512 + LENGTH, "blocks": [{"size": 512}, {"size": LENGTH}], "stream": 1},
    {"address": SECOND, "total_size": 3 * LENGTH, "blocks": [{"size": LENGTH}, {"size": 2 * LENGTH}], "stream": 2},
    {"address": THIRD, "total_size": LENGTH, "blocks": [{"size": LENGTH}], "stream": 0},
]


class OnStream:
    """Stands for torch.cuda.stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before, Current.stream = Current.stream, self.stream

    def __exit__(self, *_: object) -> None:
        Current.stream = self.before


class Products:
    """Makes the products of a plan launches of a fake kernel of cuBLAS, which a capture shows.

    The kernel's parameters are a number, the address of the left operand in a tensor map, the other addresses, and a
    number of four bytes. So their size is no multiple of eight bytes.

    Fields:
        number: what the kernel depends on besides addresses, in the second capture of a product.
        grid: the size of the grid in the second capture.
        without_out: True if the kernel does not get the address of the result.
        words: the second word of the tensor map, in the first and in the second capture.
        nodes: the number of nodes of a captured graph.
        split: True if a memset of the workspace and a second kernel belong to the product.
        error: the exception of the second capture.
        captures: the streams of the captures.
    """

    number, grid, words, nodes = 7, 4, (0, 0), 1
    without_out = split = False
    error: Exception | None = None

    def __init__(self, plan: Any, driver: FakeDriver, module: Any) -> None:
        self.plan, self.driver, self.module = plan, driver, module
        self.kernel = ctypes.create_string_buffer(b"imppi")
        self.captures: list[Stream] = []
        self.graph: Graph | None = None
        for n in plan.in_captures:
            step = plan.steps[n]
            if isinstance(step, partial):  # computes a block of rows
                op, registers, _, *block = step.args
                plan.steps[n] = partial(step.func, op, registers, self.product, *block)
            else:
                plan.steps[n] = bind_compute(plan.ops[n], plan.registers, self.product)

    def product(self, *matrices: torch.Tensor, **options: object) -> None:
        torch.zeros(1)  # torch issues it
        out, left, right = (x.data_ptr() for x in matrices)
        second = Current.stream is STREAMS[2]
        number, end = self.number if second else 7, 0 if self.without_out else out
        word = self.words[second]
        image = struct.pack("<i60x16Q2Qi", number, left + 64, word, *[0] * 14, right, end, 5)
        sizes, offsets = (4, 2, 3, 32, 1, 2), (0, 64, 192, 200, 208)
        if Current.stream in STREAMS[1:]:
            self.captures.append(Current.stream)
            if self.error is not None and second:
                raise self.error
            self.graph = Graph.of(image, offsets, ctypes.addressof(self.kernel))
            self.graph.nodes = self.nodes
            self.graph.sizes[0] = self.grid if second else 4
            if self.split:
                fill = Graph(type=2, set=Set(self.words[second], 0, 0, 4, 16, 1))
                self.graph = Graph.chain(fill, self.graph, Graph.of(image, offsets, ctypes.addressof(self.kernel)))
            self.driver.library.fake_graph(ctypes.c_void_p(self.graph.handle))
        else:
            entry = TapeEntry(LAUNCH, 0, 0, (ctypes.addressof(self.kernel), sizes, 512, b"", image, offsets), (), "")
            native.native(self.module, Segment((entry,), ()), (Current.stream.cuda_stream,))([])


@pytest.fixture(params=["ring"])
def gathered(
    request: pytest.FixtureRequest, gpu: Hopper, driver: FakeDriver, module: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[hi.Program, Any, Products]:
    """An all-gather + matmul by cuBLAS, whose products native code may launch. The parameter is the strategy."""
    monkeypatch.setattr(torch.cuda, "stream", OnStream)
    monkeypatch.setattr(products, "streams_of_captures", lambda device: (STREAMS[1], STREAMS[2]))
    monkeypatch.setattr(products, "cuda_driver", lambda: driver.library)
    snapshot = [each | {"stream": STREAMS[each["stream"]].cuda_stream} for each in SNAPSHOT]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    slices = 2 if request.param == "ring" else 1
    fusion = patterns.allgather_matmul(2, S=slices, M=4096, K=8192, N=3584, dtype="bf16")
    program = hi.lower(fusion, request.param)
    plan = gpu.plan(program, 0, "cublas", inputs_of(program, 0))
    plan.tapes = Tapes(module)
    return program, plan, Products(plan, driver, module)


def work_in(log: Sequence[str]) -> list[str]:
    """The lines of a log that are not captures."""
    return [line for line in log if "capture" not in line]


def test_native_code_launches_the_kernels_of_cublas_for_any_addresses(
    gathered: tuple[hi.Program, Any, Products], driver: FakeDriver
) -> None:
    program, plan, cublas = gathered
    logs = [issued(plan, inputs_of(program, 0), driver) for _ in range(5)]
    assert sum("launch 4x32 shared 512" in line for line in logs[0]) == len(plan.in_captures) == 2
    assert all(relative(work_in(log)) == relative(logs[0]) for log in logs)
    assert cublas.captures == [STREAMS[1], STREAMS[2]] * 2
    text = plan.tapes.latest.text
    assert "by Python" not in text
    assert "stream 1: launch gemm x 24(%a_shared of rank 0+64, %b, %c)" in text
    assert len(plan.tapes.latest.steps) == 2, "an allocation and a segment"


@pytest.mark.parametrize(
    ("gathered", "read"),
    [("fused", ["%a+64", "%a_full of rank 0+33554496"]), ("push", ["%a_full of rank 0+64"])],
    indirect=["gathered"],
)
def test_products_that_wait_for_their_rows_are_native(
    gathered: tuple[hi.Program, Any, Products], read: Sequence[str], driver: FakeDriver
) -> None:
    """A fused program computes block by block: its own rows, and then the rows that a peer sends."""
    program, plan, _ = gathered
    logs = [issued(plan, inputs_of(program, 0), driver) for _ in range(5)]
    assert sum("launch 4x32 shared 512" in line for line in logs[0]) == len(plan.in_captures) == len(read)
    assert all(relative(work_in(log)) == relative(logs[0]) for log in logs)
    text = plan.tapes.latest.text
    assert "by Python" not in text
    assert re.findall(r"launch gemm x 24\((.*?),", text) == read


def test_a_capture_calls_cublas_on_private_streams_for_blocks_of_rows_too(gpu: Hopper, module: Any) -> None:
    program = hi.lower(patterns.allgather_matmul(2, S=1, M=4096, K=8192, N=3584, dtype="bf16"), "fused")
    plan: Any = gpu.plan(program, 0, "cublas", inputs_of(program, 0))
    issued, captured = plan.steps, plan.steps_in_python(capturing=True).steps
    kernels = [(issued[n].args[2], captured[n].args[2]) for n in plan.in_captures]
    assert len(kernels) == 2, "a step for each block"
    assert all(
        "CublasStreams" not in one.__qualname__ and "CublasStreams" in other.__qualname__ for one, other in kernels
    )


def test_a_timeline_has_one_span_for_a_computation_that_waits_for_blocks(
    gpu: Hopper, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = hi.lower(patterns.allgather_matmul(2, S=1, M=4096, K=8192, N=3584, dtype="bf16"), "fused")
    make = machine.CudaMachine.plan

    def traced(self: machine.CudaMachine, unrolled: UnrolledProgram, first: Sequence[Any]) -> machine.CudaPlan:
        return make(self, unrolled, Timeline(unrolled, hi.Trace()), first=first)

    monkeypatch.setattr(machine.CudaMachine, "plan", traced)
    plan: Any = gpu.plan(program, 0, "cublas", inputs_of(program, 0))
    spans = [op for op, _, _ in plan.timeline.spans if isinstance(op, ComputeOp)]
    assert [op.computation for op in spans] == ["matmul"]
    assert not plan.in_captures, "a step captures what it issues"


def test_a_kernel_of_cublas_gets_hostirs_workspace_for_its_stream(
    gathered: tuple[hi.Program, Any, Products], driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan, cublas = gathered
    cublas.words = AT_FIRST, AT_SECOND
    sizes, segments, made = list[int](), list[Segment](), native.native

    def allocate(size: int, **_: Any) -> StandIn:
        sizes.append(size)
        return StandIn.of((size,), (1,), torch.uint8, plan.machine.device, 0xBEEF000000 + len(sizes))

    monkeypatch.setattr(products, "_workspaces", {})
    monkeypatch.setattr(products, "outside_pools", lambda device, work: allocate(*work.args))
    monkeypatch.setattr(taped, "native", lambda m, segment, s: (segments.append(segment), made(m, segment, s))[1])
    for _ in range(3):
        log = issued(plan, inputs_of(program, 0), driver)
    assert "by Python" not in plan.tapes.latest.text
    assert sizes == [LENGTH] * 2
    held = {stream: x.data_ptr() for (_, stream), x in products._workspaces.items()}
    entries = [entry for segment in segments for entry in segment.entries if "launch gemm" in entry.text]
    handles = *(stream.cuda_stream for stream in plan.machine.streams), CALLERS[0].cuda_stream
    on = [handles[entry.stream] for entry in entries]
    assert set(on) == {CALLERS[0].cuda_stream, plan.streams[0].cuda_stream}
    assert [struct.unpack_from("<Q", entry.fields[4], 72)[0] for entry in entries] == [held[s] + 256 for s in on]
    assert sum("launch 4x32 shared 512" in line for line in log) == 2
    kept = [step.args[0] for step in plan.tapes.latest.steps if isinstance(step, partial) and step.func is len]
    assert {x.data_ptr() for x in kept[0]} >= {*held.values()}, "a later tape may replace a workspace by a larger one"


def test_a_product_of_several_kernels_and_a_memset_of_its_workspace_is_native(
    gathered: tuple[hi.Program, Any, Products], driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan, cublas = gathered
    cublas.words, cublas.split = (AT_FIRST, AT_SECOND), True
    held = StandIn.of((LENGTH,), (1,), torch.uint8, plan.machine.device, 0xBEEF000000)
    monkeypatch.setattr(products, "_workspaces", {})
    monkeypatch.setattr(products, "outside_pools", lambda device, work: held)
    for _ in range(3):
        log = issued(plan, inputs_of(program, 0), driver)
    text = plan.tapes.latest.text
    assert "by Python" not in text
    assert text.count("memset workspace to 0, 64 bytes") == len(plan.in_captures) == 2
    assert text.count("launch gemm x 24(%a_shared of rank 0+64, %b, %c)") == 2, "the product of this rank's own rows"
    calls = [line.partition(": ")[2] for line in log if " set " in line or "launch 4x32" in line]
    fill = f"set {0xBEEF000000 + 256:x} to 0 16x32"
    assert [call if call == fill else call.split()[0] for call in calls] == [fill, "launch", "launch"] * 2


def test_a_tape_with_a_kernel_of_cublas_is_for_one_alignment_within_256_bytes(
    gathered: tuple[hi.Program, Any, Products], driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan, cublas = gathered
    monkeypatch.setattr(taped, "MAX_RECORDINGS", 3)

    def at(offset: int) -> None:
        inputs = inputs_of(program, 0)
        x = inputs[1]
        assert x is not None
        inputs[1] = StandIn.of(x.shape, x.stride(), x.dtype, x.device, (1 << 50) + offset)
        issued(plan, inputs, driver)

    for offset in (0, 0, 16, 256, 16):
        at(offset)
    assert [each is not None for each in plan.tapes.by_key.values()] == [True, True]
    for _ in range(2):
        at(32)
    assert not plan.tapes.by_key, "too many recordings: each alignment within 16 bytes gets a tape without products"
    count = len(cublas.captures)
    for offset in (48, 64, 80):
        at(offset)
    assert len(plan.tapes.by_key) == 1
    assert "by Python: 'matmul" in plan.tapes.latest.text
    assert len(cublas.captures) == count


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": 8}, "gemm depends on more than addresses .* 0 to 0"),
        ({"words": (AT_FIRST, AT_FIRST)}, "gemm uses other memory .* 72 to 79"),
        ({"words": (AT_FIRST, AT_SECOND + 64)}, "gemm uses other memory .* 72 to 79"),
        ({"words": (AT_FIRST, AT_SECOND + LENGTH)}, "gemm uses other memory .* 72 to 79"),
        ({"words": (AT_FIRST, 0xABCD00900000)}, "gemm uses other memory .* 72 to 79"),
        ({"words": (AT_FIRST, THIRD + 256)}, "gemm uses other memory .* 72 to 79"),
        ({"grid": 5}, "its kernel or grid depends on the addresses of its operands"),
        ({"without_out": True}, "gemm does not contain the address of the result"),
        ({"nodes": 33}, "its graph has 33 nodes"),
        ({"error": RuntimeError("CUDA error\nmore")}, "RuntimeError: CUDA error$"),
        ({"error": HostIRError(Diagnostic("no capture"))}, "no capture"),
        ({"unknown": True}, "an operand is not in a buffer of the program"),
    ],
)
def test_torch_calls_cublas_if_the_kernel_cannot_be_recorded(
    change: dict[str, Any],
    reason: str,
    gathered: tuple[hi.Program, Any, Products],
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, plan, cublas = gathered
    if change.pop("unknown", False):
        monkeypatch.setattr(taped.TapedRun, "memories", lambda self: [])
    for name, value in change.items():
        setattr(cublas, name, value)
    recordings, record = list[Any](), taped.TapedRun.tape
    monkeypatch.setattr(taped.TapedRun, "tape", lambda self, ends: (recordings.append(self), record(self, ends))[1])
    logs = [work_in(issued(plan, inputs_of(program, 0), driver)) for _ in range(4)]
    inputs = inputs_of(program, 0)
    x = inputs[1]
    assert x is not None
    inputs[1] = StandIn.of(x.shape, x.stride(), x.dtype, x.device, (1 << 50) + 16)
    assert len(in_order(issued(plan, inputs, driver))) == len(in_order(logs[0]))
    assert len(recordings) == 1, "the tape holds for all alignments within 16 bytes"
    assert all(relative(log) == relative(logs[0]) for log in logs)
    assert sum("launch 4x32 shared 512" in line for line in logs[0]) == 2
    assert Current.stream is STREAMS[0]
    lines = [line for line in plan.tapes.latest.text.splitlines() if line.startswith("by Python")]
    assert len(lines) == len(plan.in_captures) == 2
    assert all(re.search(f", as {reason}", line) for line in lines), lines
    assert len(cublas.captures) <= 4


class Backend:
    """An NCCL backend whose collectives reach the fake NCCL, on the current stream."""

    def __init__(self, driver: FakeDriver, communicator: int) -> None:
        self.driver, self.communicator = driver, communicator
        self.issued = 0
        self.error: Exception | None = None

    def _comm_ptr(self) -> int:
        if self.error is not None:
            raise self.error
        return self.communicator

    def issue(self, function: str, x: torch.Tensor, out: torch.Tensor, *numbers: int) -> None:
        self.issued += 1
        addresses = [ctypes.c_void_p(each.data_ptr()) for each in (x, out)]
        count, *rest = numbers
        end = ctypes.c_void_p(self.communicator), ctypes.c_void_p(Current.stream.cuda_stream)
        self.driver.library[function](*addresses, ctypes.c_size_t(count), *map(ctypes.c_int, rest), *end)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        self.issue("ncclAllGather", x, out, x.numel() * x.element_size(), 1)

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        self.issue("ncclReduceScatter", x, out, out.numel(), TYPES[x.dtype], 0)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        (x,) = tensors
        self.issue("ncclAllReduce", x, x, x.numel(), TYPES[x.dtype], 0)


library_problem = nccl.library_problem
TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


@pytest.fixture
def backend(gpu: Hopper, driver: FakeDriver, module: Any) -> Iterator[Backend]:
    """The NCCL backend of all ranks. Native code may issue its collectives."""
    made = Backend(driver, 0xC0)
    group = SimpleNamespace(_get_backend=lambda device: made)
    module.open_nccl(str(driver.path))
    driver.library.fake_nccl(0, 0)
    with pytest.MonkeyPatch.context() as patch:  # undone before the fakes of `gpu`
        patch.setattr(Groups, "of", lambda groups, team: (group, tuple(sorted(team))))
        patch.setattr(nccl, "library_problem", lambda module: "")
        yield made


WHOLE = {  # each with one collective of rows that are next to each other
    "allgather": lambda: patterns.allgather_matmul(2, S=1, M=4096, K=8192, N=3584, dtype="bf16"),
    "reduce_scatter": lambda: patterns.row_parallel_scattered(2, S=1, M=4096, K=7168, N=8192, dtype="bf16"),
    "allreduce": lambda: patterns.row_parallel(2, S=1, M=64, K=512, N=1024, dtype="bf16"),
}


def sequential(kind: str, gpu: Hopper, module: Any, *, collectives: bool) -> tuple[hi.Program, Any]:
    """A program whose matmul is followed or preceded by a collective of this kind, and its plan with new tapes."""
    program = hi.lower(WHOLE[kind](), "sequential")
    plan = gpu.plan(program, 0, "triton", inputs_of(program, 0))
    plan.tapes = Tapes(module, collectives=plan.machine.native_collectives if collectives else None)
    return program, plan


def of_caller(log: Sequence[str]) -> list[str]:
    """The lines of a log about the caller's stream."""
    return [line for line in log if line.startswith(f"{CALLERS[0].cuda_stream:#x}: ")]


@pytest.mark.parametrize("kind", WHOLE)
def test_native_code_issues_collectives_of_nccl_for_any_addresses(
    kind: str, backend: Backend, gpu: Hopper, driver: FakeDriver, module: Any
) -> None:
    program, plan = sequential(kind, gpu, module, collectives=True)
    logs = [issued(plan, inputs_of(program, 0), driver) for _ in range(6)]
    assert sum(kind in line for line in logs[0]) == 1
    assert all(relative(of_caller(log)) == relative(logs[0]) for log in logs)
    segments = plan.machine.native_collectives.streams[CALLERS[0].cuda_stream]
    here, aside, event = CALLERS[0].cuda_stream, segments.aside.cuda_stream, segments.event.cuda_event
    *waits, ends = zip(*(log[-3:] for log in logs[2:]), strict=True)
    assert {*zip(*waits, strict=True)} == {(f"{here:#x}: record {event:#x}", f"{aside:#x}: wait {event:#x} 0")}
    assert all(line.startswith(f"{aside:#x}: memory 0 5 ") for line in ends)
    assert [line.split()[-1] for line in ends] == ["1", "2", "3", "4"], "the numbers of the runs, at their ends"
    assert backend.issued == 2, "through torch: in the first run, and in the one that is recorded"
    text = plan.tapes.latest.text
    assert "by Python" not in text
    assert f"{kind} %" in text
    assert " by NCCL, " in text


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ("error", "torch does not show NCCL's communicator (RuntimeError: no communicator)"),
        ("communicator", "torch does not show NCCL's communicator"),
        ("library", "libnone.so is not loaded"),
        ("memory", "a tensor is not in a buffer of the program"),
        ("type", "hostir does not know how NCCL adds up torch.bfloat16"),
        ("handling", "with NCCL_ASYNC_ERROR_HANDLING=2 torch does not end the process if a collective does not end"),
        ("streams", "native code issues collectives to 8 other streams"),
        ("off", ""),
    ],
)
def test_torch_calls_nccl_if_the_collective_cannot_be_recorded(
    spoiled: str,
    reason: str,
    backend: Backend,
    gpu: Hopper,
    driver: FakeDriver,
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, plan = sequential("reduce_scatter", gpu, module, collectives=spoiled != "off")
    if spoiled == "error":
        backend.error = RuntimeError("no communicator")
    elif spoiled == "communicator":
        backend.communicator = 0
    elif spoiled == "library":
        monkeypatch.setattr(nccl, "library_problem", partial(library_problem, library="libnone.so"))
    elif spoiled == "memory":
        memories = taped.TapedRun.memories
        monkeypatch.setattr(taped.TapedRun, "memories", lambda self: [m for m in memories(self) if m.name != "%c"])
    elif spoiled == "type":
        monkeypatch.setattr(nccl, "SUMMED", {})
    elif spoiled == "handling":
        monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", " 2")
    elif spoiled == "streams":
        for handle in range(nccl.STREAMS):
            assert plan.machine.native_collectives.watches(handle)
    logs = [issued(plan, inputs_of(program, 0), driver) for _ in range(5)]
    assert all(relative(of_caller(log)) == relative(logs[0]) for log in logs)
    assert backend.issued == 5
    (line,) = [line for line in plan.tapes.latest.text.splitlines() if line.startswith("by Python: ")]
    assert "reduce_scatter" in line
    assert line.partition(", as ")[2] == reason


def test_collectives_of_other_streams_or_in_another_order_of_ranks_stay_with_torch(
    backend: Backend, gpu: Hopper, driver: FakeDriver, module: Any
) -> None:
    program = hi.lower(WHOLE["allgather"](), "sequential")
    (op,) = [op for op in unroll(program, 0, {}).ops if isinstance(op, CollectiveOp)]
    assert nccl.recordable(op, (0, 1))
    assert not nccl.recordable(replace(op, team=(1, 0)), (0, 1)), "NCCL would put the blocks in its own order"
    assert nccl.recordable(replace(op, team=(1, 0), communication="allreduce"), (0, 1))
    assert not nccl.recordable(replace(op, communication="alltoall"), (0, 1))
    assert not nccl.recordable(replace(op, by="one_shot"), (0, 1))
    assert gpu.plan(program, 0, "triton", inputs_of(program, 0)).recordable
    sliced = hi.lower(patterns.allgather_matmul(2, S=2, M=4096, K=8192, N=3584, dtype="bf16"), "pipeline")
    assert not gpu.plan(sliced, 0, "triton", inputs_of(sliced, 0)).recordable, "they run beside matmuls"


def test_an_error_of_nccl_names_its_statement(backend: Backend, gpu: Hopper, driver: FakeDriver, module: Any) -> None:
    program, plan = sequential("allgather", gpu, module, collectives=True)
    for _ in range(3):
        issued(plan, inputs_of(program, 0), driver)
    driver.library.fake_nccl(0, 6)
    with pytest.raises(HostIRError, match=r"rank 0, '.*allgather .*remote process exited \(NCCL error 6\)"):
        plan.run(inputs_of(program, 0))
    assert plan.machine.groups.abandoned, "peers may wait for this rank"
    assert counts_of(plan)[0] == 1, "nobody waits for the end of the run that failed"


def counts_of(plan: Any, stream: Stream = STREAMS[0]) -> torch.Tensor:
    """The numbers of the segments that native code has issued to a stream."""
    counts: torch.Tensor = plan.machine.native_collectives.streams[stream.cuda_stream].memory
    return counts


class Time:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(nccl.time, "monotonic", lambda: self.now)

    def look(self, late: Callable[[], str], seconds: float) -> list[str]:
        """Let a watchdog look twice a second; return what it sees."""
        seen = []
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            seen.append(late())
        return seen


def test_a_collective_of_native_code_that_does_not_end_is_late_at_the_timeout_of_its_group(
    backend: Backend, gpu: Hopper, driver: FakeDriver, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan = sequential("allgather", gpu, module, collectives=True)
    groups, clock = plan.machine.groups, Time(monkeypatch)
    groups.native.seconds, groups.native.asked = 60, clock.now
    assert groups.late() == ""
    for _ in range(2):
        issued(plan, inputs_of(program, 0), driver)
    assert not any(clock.look(groups.late, 100)), "torch issued them, and watches them"
    issued(plan, inputs_of(program, 0), driver)
    counts = counts_of(plan)
    for number in (2, 3, 4):
        issued(plan, inputs_of(program, 0), driver)
        assert counts[0] == number
        assert not any(clock.look(groups.late, 40))
        counts[1] = number - 1  # as the device does at the end of the run before
    clock.now += 10_000  # the process was stopped
    assert groups.late() == ""
    text, _, rest = clock.look(groups.late, 60)[-1].partition(", or ")
    assert re.fullmatch(r"'.* = allgather %a_dense -> .*'", text)
    assert rest == "what follows it in its call, has not ended for 60 s, the group's timeout"
    counts[1] = 4
    assert not any(clock.look(groups.late, 100))


def test_native_code_that_waits_on_the_host_is_late_too(
    backend: Backend, gpu: Hopper, driver: FakeDriver, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, plan = sequential("allgather", gpu, module, collectives=True)
    for _ in range(3):
        issued(plan, inputs_of(program, 0), driver)
    groups, clock = plan.machine.groups, Time(monkeypatch)
    counts_of(plan)[1] = 1  # the run has ended
    (segment,) = [step.func for step in plan.tapes.latest.steps if getattr(step, "func", len) is not len]
    driver.library.fake_block(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(segment, [0x50000 + 0x1000 * n for n in range(len(plan.registers))])
        while not driver.library.fake_waits() and not waiting.done():
            time.sleep(0)
        late = clock.look(groups.late, groups.native.seconds + 1)[-1]
        driver.library.fake_block(0)
    assert waiting.exception() is None
    assert "allgather" in late


def test_many_runs_may_be_under_way_and_the_oldest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "own_stream", lambda owner, device, priority: Stream())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=id, cuda_event=1))
    clock, native = Time(monkeypatch), nccl.NativeCollectives(10, torch.device("cpu"), 0)
    assert native.watches(0)
    tags = [native.entry(text, 0, 0, 0).fields[1] for text in ("first", "second", "first")]
    assert tags == [0, 1, 0]
    counts, ring = native.streams[0].memory, nccl.COUNTS - 2
    for begun, ended, named in ((3, 0, "second"), (ring, 0, "second"), (ring + 5, 5, "first"), (ring + 5, 4, "a coll")):
        counts[0], counts[1] = begun, ended
        for number in range(1, begun + 1):
            counts[2 + number % ring] = 1 if number == 1 else 0
        assert clock.look(native.late, 12)[-1].startswith(named), (begun, ended)


EXITING = """
import ctypes, os, sys, time
from types import SimpleNamespace
import torch
from hostir.job.groups import Groups
from hostir.machines.cuda import native, nccl

path, seconds, what = sys.argv[1:]
nccl.AFTER_ERROR = 0.1 if what in ("error", "session") else 60
library, module = ctypes.CDLL(path), native.build()
module.open(path, native.DriverError)
assert nccl.library_problem(module, path) == ""
timeout = {"error": 60, "session": 60, "ends": 3}.get(what, 0.1)
collectives = nccl.NativeCollectives(timeout, torch.device("cpu"), 3)
usual = nccl._stream_and_event
nccl._stream_and_event = lambda *_: (SimpleNamespace(cuda_stream=1), SimpleNamespace(cuda_event=2))
assert collectives.watches(0)
nccl._stream_and_event = usual  # the lambda would keep this module's objects, and `waits` must be destroyed
collectives.entry("'allgather %a -> %b'", 0, 0, 0)
counts = collectives.streams[0].memory
counts[0] = what != "nothing begun"

class Waits:
    def __del__(self, sleep=time.sleep, seconds=float(seconds), counts=counts, ends=what == "ends"):
        if ends:
            counts[1] = 1
        print("a destructor waits for the device", flush=True)
        sleep(seconds)

waits = Waits()
if what == "child" and os.fork():
    counts[1] = 1
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
if what == "error":
    raise ValueError
if what == "session":
    groups = Groups(3, torch.device("cpu"), native=collectives)
    groups.end(done=False)
    sys.exit(5)
"""


@pytest.mark.parametrize(
    ("what", "seconds", "code"),
    [("hangs", 60, 1), ("error", 60, 1), ("session", 60, 1), ("ends", 4, 0), ("nothing begun", 1, 0), ("child", 1, 0)],
)
def test_a_process_exits_even_if_a_collective_does_not_end(
    what: str, seconds: float, code: int, driver: FakeDriver
) -> None:
    """A collective may take the group's timeout, and less time after an error. It does not concern a child process."""
    command = [sys.executable, "-c", EXITING, str(driver.path), str(seconds), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code, done.stderr
    assert code or "a destructor waits for the device" in done.stdout
    ended = "error: hostir ends rank 3, which could not exit: 'allgather %a -> %b', or what follows it in its call, has"
    assert (ended in done.stderr) is bool(code), done.stderr


def test_what_the_end_of_a_process_cannot_wait_for_is_refused(module: Any) -> None:
    wrong = ((), ((1,), "x", ""), ([1], 1.0, ""), ((-1,), 1.0, ""), (("x",), 1.0, ""), ((), -1.0, ""), ((), nan, ""))
    for arguments in wrong:
        with pytest.raises((TypeError, OverflowError, ValueError)):
            module.exit_unless_ended(*arguments)


def test_each_stream_has_its_own_numbers(
    backend: Backend, gpu: Hopper, driver: FakeDriver, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls on two streams may end in any order."""
    program, plan = sequential("allgather", gpu, module, collectives=True)
    for _ in range(4):
        for stream in STREAMS[:2]:
            Current.stream = CALLERS[0] = stream
            plan.run(inputs_of(program, 0))
    one, two = (counts_of(plan, stream) for stream in STREAMS[:2])
    assert [one[0], two[0]] == [2, 2]
    clock = Time(monkeypatch)
    for ended in ((2, 0), (2, 1)):
        one[1], two[1] = ended
        assert "allgather" in clock.look(plan.machine.groups.late, plan.machine.native_collectives.seconds + 2)[-1]
    two[1] = 2
    assert not any(clock.look(plan.machine.groups.late, 10))


@pytest.mark.parametrize(
    ("name", "left_alone", "watched"),
    [
        *((f"{prefix}NCCL_ASYNC_ERROR_HANDLING", (" 2", "0"), ("1", "3", "")) for prefix in ("TORCH_", "")),
        *((f"{prefix}NCCL_BLOCKING_WAIT", ("1 ",), ("0", "")) for prefix in ("TORCH_", "")),
    ],
)
def test_torch_calls_nccl_if_it_would_leave_the_process_alone(
    name: str,
    left_alone: Sequence[str],
    watched: Sequence[str],
    backend: Backend,
    gpu: Hopper,
    driver: FakeDriver,
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in (*left_alone, *watched):
        monkeypatch.setenv(name, value)
        program, plan = sequential("allgather", gpu, module, collectives=True)
        for _ in range(3):
            issued(plan, inputs_of(program, 0), driver)
        text = plan.tapes.latest.text
        assert (f"with {name}={value.strip()} torch does not end the process" in text) is (value in left_alone)
        assert (" by NCCL, " in text) is (value in watched)


def test_products_that_read_torchs_settings_remain_with_torch() -> None:
    def reason(dtype: torch.dtype, computation: str = "matmul", rows: int = 4) -> str:
        op = SimpleNamespace(out=3, computation=computation)
        return products.refusal(op, {3: torch.empty(rows, 4, dtype=dtype)})  # type: ignore[arg-type]

    assert [reason(dtype) for dtype in (torch.bfloat16, torch.float16)] == ["", ""]
    assert reason(torch.float32) == reason(torch.float64) == "each call reads torch's settings of precision"
    assert reason(torch.bfloat16, "grouped_matmul") == "only matmul, linear, scaled_matmul are recorded"
    assert reason(torch.bfloat16, rows=0) == "an operand is empty"
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert reason(torch.float16) == "torch allows sums in f16"
        assert reason(torch.bfloat16) == ""
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


def test_operands_are_moved_to_memory_of_the_same_layout_and_alignment() -> None:
    memory = torch.empty(4096, dtype=torch.uint8)
    begin = -memory.data_ptr() % 256
    x = memory[begin + 48 : begin + 48 + 480].view(torch.bfloat16).view(12, 20).t()[::2]
    inside = memory[begin + 64 :][:8].view(torch.float32)
    operands = {3: x, 5: memory[begin + 1024 :][:64].view(torch.float32), 6: x, 7: inside}
    moved = products.elsewhere(operands)
    for register, tensor in operands.items():
        other = moved[register]
        assert (other.shape, other.stride(), other.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert other.data_ptr() % 256 == tensor.data_ptr() % 256
        assert other.untyped_storage().data_ptr() != memory.data_ptr()
    assert moved[3].data_ptr() == moved[6].data_ptr()
    assert len({each.data_ptr() for each in moved.values()}) == 3
    last = x.data_ptr() + products.extent(x) - 1
    image = struct.pack("<5Q", 5, x.data_ptr(), last, last + 1, inside.data_ptr() + 4)
    assert [*products.addresses_in(image, operands)] == [(8, 3, 0), (16, 3, products.extent(x) - 1), (32, 7, 4)]
