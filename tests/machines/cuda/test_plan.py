"""The work that a CUDA plan issues, its order and its streams. Streams, events and NCCL only write to a log here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hostir.call.parts import shard
from hostir.call.random import random_inputs
from hostir.ir import parse
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.job.groups import Groups
from hostir.kernels.table import kernel_table
from hostir.machines.cuda import streams
from hostir.machines.cuda.machine import CudaMachine, CudaPlan
from hostir.plan.unroll import unroll
from tests.call.programs import ag_matmul

CPU = torch.device("cpu")
log: list[tuple[Any, ...]] = []


class Stream:
    priority = 0

    def __init__(self, name: object = None) -> None:
        self.name = "caller" if name == "caller" else f"worker {next(Stream.count)}"

    count: Iterator[int] = iter(())

    def wait_stream(self, other: Stream) -> None:
        log.append(("wait_stream", self.name, other.name))


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream.name

    def wait(self, stream: Stream) -> None:
        log.append((stream.name, "waits for", self.stream))


class Group:
    """A process group in which all ranks have the data of this rank."""

    def wait(self) -> None:
        log.append(("work.wait",))

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Group:
        log.append(("allgather", options.asyncOp))
        out.copy_(x.expand_as(out))
        return self

    def allgather(self, out: list[list[torch.Tensor]], x: list[torch.Tensor], options: Any) -> Group:
        log.append(("allgather of blocks", [block.storage_offset() for block in out[0]], options.asyncOp))
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        log.append(("start",))

    def send(self, x: list[torch.Tensor], peer: int, tag: int) -> None:
        log.append(("send", x[0].numel(), peer))

    def recv(self, x: list[torch.Tensor], peer: int, tag: int) -> None:
        log.append(("recv", x[0].numel(), peer))

    def _end_coalescing(self, device: torch.device) -> Group:
        log.append(("end",))
        return self


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch) -> None:
    log.clear()
    caller = Stream("caller")
    monkeypatch.setattr(Stream, "count", itertools.count())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    monkeypatch.setattr(streams, "_known", {})
    monkeypatch.setattr(streams, "_workers", {})
    monkeypatch.setattr(streams, "_taken", Counter())
    monkeypatch.setattr(streams, "_free", {})
    monkeypatch.setattr(streams, "new_stream", lambda device, priority: Stream())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: id(caller), raising=False)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(("set", stream.name)))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: log.append(("record_stream", stream.name)))


def planned(program: Program, rank: int = 0, messages: bool = False) -> tuple[CudaPlan, list[torch.Tensor | None]]:
    """Return a plan. `messages`: True if there are process groups for messages only."""
    groups = Groups(rank, CPU)
    machine = CudaMachine(CPU, program, kernel_table("aten", "cpu"), groups)
    (machine.messages if messages else groups).made = {(0, 1): Group(), (0, 1, 2, 3): Group()}
    parts = [shard(x, v.tensor, rank, {}) for x, v in zip(random_inputs(program, {}), program.inputs, strict=True)]
    return machine.plan(unroll(program, rank, {}, parts)), parts


PIPELINE = ag_matmul("0 1", slices=2, m=3, k=8, n=5)


def test_a_plan_changes_streams_only_where_the_program_does_and_starts_communication_asynchronously() -> None:
    plan, (a, b) = planned(parse(PIPELINE))
    log.clear()
    (c,) = plan.run([a, b])
    round_ = [("allgather", True), ("work.wait",)]
    assert log == [
        ("worker 0", "waits for", "caller"),
        ("worker 1", "waits for", "caller"),
        ("set", "worker 0"),
        *round_,
        ("set", "worker 1"),
        *round_,
        ("caller", "waits for", "worker 0"),
        ("caller", "waits for", "worker 1"),
        ("set", "caller"),
    ]
    assert torch.allclose(c, (a @ b).expand_as(c))
    assert plan.registers == plan.blank, "a plan holds no tensors between runs"


def test_a_plan_has_nothing_in_flight_before_its_first_run() -> None:
    plan, parts = planned(parse(PIPELINE))
    assert plan.issued == 0
    assert plan.in_flight() == []
    plan.run(parts)
    assert plan.issued == len(plan.steps)


def test_an_error_leaves_the_callers_stream_current_and_behind_all_workers() -> None:
    plan, parts = planned(parse(PIPELINE))
    plan.machine.kernels = {**plan.machine.kernels, "matmul": lambda *tensors: 1 / 0}
    plan = plan.machine.plan(plan.unrolled)
    log.clear()
    with pytest.raises(HostIRError, match=r"rank 0, 'matmul %g_i, %b -> %c_i' in round 0: ZeroDivisionError"):
        plan.run(parts)
    assert log[-3:] == [
        ("wait_stream", "caller", "worker 0"),
        ("wait_stream", "caller", "worker 1"),
        ("set", "caller"),
    ]
    assert [plan.unrolled.text(op) for op in plan.in_flight()] == ["matmul %g_i, %b -> %c_i"]


def test_memory_that_a_worker_may_still_use_is_marked_when_it_is_dropped() -> None:
    body = "%c: f32[4] = allocate\n  set_stream 0\n  relu %a -> %c"
    head = "hostir 1\nmesh @m [x] = 0\nprogram @p(%a: f32[4]) -> (%c) streams 1 {"
    plan, parts = planned(parse(f"{head}\n  {body}\n}}\n"))
    plan.run(parts)
    assert log == [("set", "worker 0"), ("record_stream", "worker 0"), ("record_stream", "worker 0"), ("set", "caller")]


def test_messages_go_as_one_group_numbered_within_the_team() -> None:
    program = parse("""hostir 1
mesh @left [x] = 3 1
mesh @right [y] = 0 2
program @p(%a: f32[8@x, 4]) -> (%c) {
  %c: f32[8, 4] on @right = allocate
  %h = gather %a -> %c
  wait %h
}
""")
    sender, parts = planned(program, rank=3)
    sender.run(parts)
    assert log == [("start",), ("send", 16, 0), ("send", 16, 2), ("end",), ("work.wait",)]
    log.clear()
    receiver, parts = planned(program, rank=2)
    receiver.run(parts)
    assert log == [("start",), ("recv", 16, 3), ("recv", 16, 1), ("end",), ("work.wait",)]


def test_messages_use_other_process_groups_than_collectives() -> None:
    program = parse("""hostir 1
mesh @mesh [x] = 1 0
program @p(%a: f32[8@x, 4]) -> (%c) {
  %c: f32[8@x, 4] = allocate
  %r = rank of %a over x
  %h = exchange %a to 1 - %r, %c from 1 - %r over x
  wait %h
}
""")
    plan, parts = planned(program, rank=1, messages=True)
    plan.run(parts)
    assert log == [("start",), ("send", 16, 0), ("recv", 16, 0), ("end",), ("work.wait",)]


def test_a_team_in_another_order_gathers_block_by_block() -> None:
    program = parse("""hostir 1
mesh @mesh [x] = 3 1 0 2
program @p(%a: f32[8@x, 4]) -> (%c) {
  %c: f32[8, 4] = allocate
  %h = allgather %a -> %c over x
  wait %h
}
""")
    plan, parts = planned(program)
    plan.run(parts)
    assert log == [("allgather of blocks", [16, 8, 24, 0], False)]


def test_a_collective_that_is_waited_for_at_once_runs_on_the_stream_that_waits() -> None:
    lines = ["%h = allgather %a -> %c over x", "wait %h", "relu %c -> %d"]

    def ran(*lines: str) -> list[Any]:
        body = "".join(f"  {line}\n" for line in lines)
        plan, parts = planned(
            parse(f"""hostir 1
mesh @mesh [x] = 0 1
program @p(%a: f32[2@x, 4]) -> (%d) streams 1 {{
  %user = current_stream
  %c: f32[2, 4] = allocate
  %d: f32[2, 4] = allocate
{body}}}
""")
        )
        log.clear()
        (out,) = plan.run(parts)
        assert out is not None
        return [entry for entry in log if entry[0] in ("allgather", "work.wait")]

    start, wait, use = lines
    assert ran(start, wait, use) == [("allgather", False)]
    apart = [("allgather", True), ("work.wait",)]
    assert ran(start, "relu %d -> %d", wait, use) == apart, "another operation runs beside the collective"
    worker = ["set_stream 0", "synchronize %user", "relu %d -> %d", "set_stream %user", "synchronize 0"]
    assert ran(start, wait, *worker, use) == apart, "other streams may run beside the collective"
    assert ran(start, wait, wait, use) == [*apart, ("work.wait",)], "the second wait needs an event"
