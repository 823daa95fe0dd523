"""Collectives by symmetric memory as CUDA plans issue them, on simulated GPUs that model the kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.constants import default_pg_timeout

import hostir as hi
from examples import patterns
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.job.groups import Groups
from hostir.job.offers import SLOTS, WORKSPACE
from hostir.kernels import aten, low_latency
from hostir.kernels.low_latency import NO_ROWS, Epilogue, RowTensors
from hostir.machines.cuda import implementations
from hostir.machines.cuda.graphs import uniform_only
from hostir.machines.cuda.implementations import SymmetricCollectives
from hostir.machines.cuda.machine import CudaMachine
from hostir.machines.cuda.timeline import Timeline
from hostir.machines.normed import NormedSum
from hostir.machines.trace import Trace
from hostir.plan.lifetimes import input_in_workspace, workspace_buffers
from hostir.plan.operations import NONE, AllocateOp, CollectiveOp
from hostir.plan.unroll import unroll
from tests.machines.cuda.simulated_gpus import Event, Gpus, Handle, Stream, gpus, plans
from tests.machines.cuda.test_midway import Job, impatient
from tests.machines.cuda.test_onesided import check_calls

__all__ = ["gpus", "impatient"]  # fixtures
OPERATORS = (
    "one_shot_all_reduce_copy_out",
    "one_shot_all_reduce_out",
    "two_shot_all_reduce_out",
    "two_shot_all_reduce_",
    "reduce_scatter_out",
)


class Kernels:
    """Models torch's kernels: each copies and sums between exchanges of signals, as tasks of the current stream."""

    def __init__(self, gpus: Gpus, collectives: SymmetricCollectives, handle: Handle) -> None:
        self.gpus, self.handle = gpus, handle
        self.rank, self.memory = collectives.context.unrolled.rank, handle.memory

    def add(self, do: Callable[[], object]) -> None:
        self.gpus.current.add(do)

    def barrier(self) -> None:
        """Set this rank's signal at every peer once it is reset, then wait for every peer's signal and reset it."""
        mine = self.handle.get_signal_pad(self.rank)
        for peer in self.memory:
            theirs = self.handle.get_signal_pad(peer)
            self.gpus.current.add(partial(theirs.__setitem__, self.rank, 1), lambda pad=theirs: not pad[self.rank])
        for peer in self.memory:
            self.gpus.current.add(partial(mine.__setitem__, peer, 0), lambda peer=peer: bool(mine[peer]))

    def spaces(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the workspaces of all ranks, flat."""
        size = like.numel() * like.element_size()
        return [self.memory[rank][:size].view(like.dtype) for rank in sorted(self.memory)]

    def get_buffer(self, peer: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.spaces(torch.empty(shape, dtype=dtype))[peer].view(shape)

    def one_shot_all_reduce_copy_out(self, space: torch.Tensor, x: torch.Tensor, *rest: Any) -> None:
        assert implementations.is_aligned(x)
        self.add(lambda: space.copy_(x))
        self.one_shot(space, *rest)

    def one_shot_all_reduce_out(self, space: torch.Tensor, *rest: Any) -> None:
        self.one_shot(space, *rest)

    def one_shot(self, space: torch.Tensor, op: str, group: str, out: torch.Tensor) -> None:
        assert (op, group) == ("sum", "everyone")
        assert implementations.is_aligned(out)
        assert out.shape == space.shape
        spaces = self.spaces(space)
        self.barrier()
        self.add(lambda: out.copy_(sum(spaces).view(out.shape)))
        self.barrier()

    def parts(self, space: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return the part of each rank in each workspace, first by workspace."""
        return [[*x.tensor_split(len(self.memory))] for x in self.spaces(space)]

    def two_shot_all_reduce_out(self, space: torch.Tensor, op: str, group: str, out: torch.Tensor) -> None:
        assert len(self.memory) in (2, 4, 8)
        assert implementations.is_aligned(out)
        parts = self.parts(space)
        mine = parts[self.rank][self.rank]
        self.barrier()
        self.add(lambda: mine.copy_(sum(each[self.rank] for each in parts)))
        self.barrier()
        self.add(lambda: out.copy_(torch.cat([each[i] for i, each in enumerate(parts)]).view(out.shape)))
        self.barrier()

    def two_shot_all_reduce_(self, space: torch.Tensor, op: str, group: str) -> None:
        parts = self.parts(space)

        def store() -> None:
            total = sum(each[self.rank] for each in parts)
            for each in parts:
                each[self.rank].copy_(total)

        self.barrier()
        self.add(store)
        self.barrier()

    def reduce_scatter_out(self, space: torch.Tensor, group: str, last: bool, out: torch.Tensor) -> None:
        assert (space.dim(), out.dim(), last) == (1, 1, False)
        parts = self.parts(space)
        self.barrier()
        self.add(lambda: out.copy_(sum(each[self.rank] for each in parts)))
        self.barrier()


class LowLatencyModel:
    """Models hostir's kernel: it sends to one peer after another, and takes each part once all of it came.

    It computes an epilogue at the end, from the values that its inputs have then. Three things can be left out: calls
    use the halves of the slots in turn, a rank waits for each part, and it empties the slots.
    """

    epilogues = 0  # launches with an epilogue
    halves, waits, empties = 2, True, True

    def __init__(
        self,
        device: torch.device,
        rank: int,
        slots: list[torch.Tensor],
        calls: torch.Tensor,
        timeouts: torch.Tensor,
        collective: str,
        epilogue: Epilogue | None = None,
        seconds: float = 600.0,
    ) -> None:
        assert timeouts.shape == (len(slots), 2)
        assert seconds == default_pg_timeout.total_seconds(), "as long as NCCL would wait"
        ranks, self.epilogue = len(slots), epilogue
        self.rank, self.calls, self.collective = rank, calls, collective
        self.slots = [x[: x.numel() // (2 * ranks) * 2 * ranks].view(torch.int32).view(2, ranks, -1) for x in slots]

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None, rows: RowTensors = NO_ROWS) -> None:
        result = out if rows.residual is None else rows.residual
        assert result is not None
        scatters, gathers = self.collective == "reduce_scatter", self.collective == "allgather"
        gpu, ranks, size = Gpus.here.current, range(len(self.slots)), x.numel() if gathers else result.numel()
        parts = [x.view(-1)[rank * size :] if scatters else x.view(-1) for rank in ranks]
        taken: dict[int, torch.Tensor] = {}

        def slot(at: int, source: int) -> torch.Tensor:
            return self.slots[at][int(self.calls[0]) % self.halves, source, :size]

        def send(peer: int) -> None:
            assert not slot(peer, self.rank).any(), "the peer still needs what is in the slot"
            slot(peer, self.rank).copy_(~parts[peer][:size].view(torch.int32))

        def take(peer: int) -> None:
            taken[peer] = (~slot(self.rank, peer)).view(torch.float32)
            if self.empties:
                slot(self.rank, peer).zero_()

        def finish() -> None:
            taken[self.rank] = parts[self.rank][:size]
            in_order = [taken[rank] for rank in ranks]
            total = torch.cat(in_order) if gathers else sum(in_order, torch.zeros(()))
            if self.epilogue is not None:
                self.finish(total.view(result.shape), rows)
            if out is not None:
                out.view(-1).copy_(total)
            self.calls += 1

        others = [peer for peer in ranks if peer != self.rank]
        for peer in others:
            gpu.add(partial(send, peer))
        for peer in others:
            gpu.add(partial(take, peer), lambda peer=peer: not self.waits or bool(slot(self.rank, peer).all()))
        gpu.add(finish)

    def finish(self, total: torch.Tensor, rows: RowTensors) -> None:
        assert self.epilogue is not None
        assert rows.residual is not None
        LowLatencyModel.epilogues += 1
        added, normed, scales = total + rows.residual, torch.empty_like(total), torch.empty(*total.shape[:-1], 1)
        aten.rms_norm(normed, added, rows.weight, eps=self.epilogue.eps)
        if rows.quantized is not None:
            aten.row_scales(scales, normed, dtype=self.epilogue.fp8)
            aten.quantize(rows.quantized, normed, scales, dtype=self.epilogue.fp8)
        for place, x in ((rows.added, added), (rows.normed, normed), (rows.scales, scales)):
            if place is not None:
                place.copy_(x)


@pytest.fixture(autouse=True)
def torchs_kernels(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's operators and copies, and hostir's kernel, by the models."""
    monkeypatch.setattr(low_latency, "LowLatency", LowLatencyModel)
    monkeypatch.setattr(LowLatencyModel, "epilogues", 0)
    monkeypatch.setattr(SymmetricCollectives, "in_one_kernel", lambda self, normed: True)
    original = SymmetricCollectives.__init__

    def init(self: SymmetricCollectives, context: Any, memory: Any, all_ranks: Any, patience: float) -> None:
        original(self, context, memory, lambda: SimpleNamespace(group_name="everyone"), patience)
        memory.kept["kernels"] = Kernels(gpus, self, memory.kept["handle"])

    handle = property(lambda self: self.memory.kept["kernels"])
    monkeypatch.setattr(SymmetricCollectives, "__init__", init)
    monkeypatch.setattr(SymmetricCollectives, "handle", handle)
    monkeypatch.setattr(SymmetricCollectives, "operator", lambda self, op, name: getattr(self.handle, name))
    monkeypatch.setattr(implementations, "copy", lambda out, x: gpus.current.add(lambda: out.copy_(x)))


def program(ranks: int, body: str, x: str, y: str, streams: int = 0) -> Program:
    lines = "".join(f"  {line}\n" for line in body.splitlines())
    pool = f" streams {streams}" if streams else ""
    mesh = " ".join(map(str, range(ranks)))
    return hi.parse(f"hostir 1\nmesh @mesh [didx] = {mesh}\nprogram @p(%x: {x}) -> (%y){pool} {{\n{lines}}}\n")


def reduced(by: str, ranks: int) -> Program:
    body = f"%y: f32[6, 8] = allocate\n%h = allreduce %x -> %y over didx by {by}\nwait %h"
    return program(ranks, body, "f32[6, 8] partial(didx)", "f32[6, 8]")


def gathered(ranks: int, dtype: str = "f32", by: str = "copy_engine", columns: int = 3) -> Program:
    body = f"%y: {dtype}[{ranks}, {columns}] = allocate\n%h = allgather %x -> %y over didx by {by}\nwait %h"
    return program(ranks, body, f"{dtype}[{ranks}@didx, {columns}]", f"{dtype}[{ranks}, {columns}]")


def scattered(ranks: int, by: str = "one_shot") -> Program:
    y = f"f32[{ranks}@didx, 8]"
    body = f"%y: {y} = allocate\n%h = reduce_scatter %x -> %y over didx by {by}\nwait %h"
    return program(ranks, body, f"f32[{ranks}, 8] partial(didx)", y)


WIDE = """%box: f32[4, 6] = allocate_symmetric
copy %x -> %box
%y: f32[4, 6] = allocate
copy %box -> %y"""
GATHERED_TWICE = """%z: f32[2, 3] = allocate
%g = allgather %x -> %z over didx by copy_engine
wait %g
%y: f32[2, 3] = allocate
%h = allgather %x -> %y over didx by copy_engine
wait %h"""
WRITTEN = """relu %x -> %x
%y: f32[2, 3] = allocate
%h = allgather %x -> %y over didx by copy_engine
wait %h"""
COMPUTED = """%z: f32[2@didx, 3] = allocate
relu %x -> %z
%y: f32[2, 3] = allocate
%h = allgather %z -> %y over didx by copy_engine
wait %h"""
CONDITIONAL = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[2@didx, 3]) -> (%y) {
  %r = rank of %x over didx
  %y: f32[2, 3] = allocate
  %h = allgather %x -> %y over didx by copy_engine
  wait %h
  if %r == 0 { relu %y -> %y }
}
"""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "text",
    [
        *(reduced(by, ranks) for by in ("low_latency", "one_shot", "two_shot") for ranks in (2, 3, 4)),
        *(gathered(ranks) for ranks in (2, 3, 4)),
        *(gathered(ranks, by="low_latency", columns=8) for ranks in (2, 3, 4)),
        *(scattered(ranks) for ranks in (2, 4)),
        *(scattered(ranks, "low_latency") for ranks in (2, 3, 4)),
    ],
    ids=lambda p: f"{p.body[1].keyword()} by {p.body[1].by} {p.ranks}",
)
@pytest.mark.parametrize("executors", [1, 2])
def test_calls_that_follow_each_other_at_once_are_right_in_every_order(
    text: Program, seed: int, executors: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(text, gpus, seed, monkeypatch, calls=4, executors=executors)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(("part", "value"), [("halves", 1), ("waits", False), ("empties", False)])
def test_no_part_of_the_low_latency_protocol_can_be_left_out(
    part: str, value: int, gathers: bool, ranks: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LowLatencyModel, part, value)
    text = gathered(ranks, by="low_latency", columns=8) if gathers else reduced("low_latency", ranks)

    def run_until_it_fails() -> None:
        for seed in range(40):
            check_calls(text, gpus, seed, monkeypatch, calls=4)

    with pytest.raises(AssertionError):
        run_until_it_fails()


def test_a_thousand_sums_have_the_bits_of_a_sum_in_the_order_of_ranks(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs = torch.randn(1000, 3, 6, 8) * 10.0 ** torch.randint(-3, 4, (1000, 3, 1, 1))
    wanted = sum(xs.unbind(1), torch.zeros(()))
    outs: dict[tuple[int, int], torch.Tensor] = {}
    for rank, plan in enumerate(plans(gpus, reduced("low_latency", 3), [[x] for x in xs[0]], monkeypatch)):
        gpus.current = Stream()
        outs |= {(n, rank): plan.run([x])[0] for n, x in enumerate(xs[:, rank])}
    gpus.run(Random())  # ranks are late by random times
    assert all(torch.equal(out, wanted[n]) for (n, _), out in outs.items())


GATHERED_SOON = gathered(3, by="low_latency", columns=8)
BESIDE = """%y: f32[2, 3] = allocate
%z: f32[2@didx, 3] = allocate
%h = allgather %x -> %y over didx by copy_engine
relu %x -> %z
wait %h"""
ON_WORKERS = """%y: f32[2, 3] = allocate
%user = current_stream
set_stream 0
synchronize %user
%h = allgather %x -> %y over didx by copy_engine
set_stream 1
synchronize %user
wait %h
set_stream %user
synchronize 1"""
IN_PLACE = [
    *(gathered(ranks) for ranks in (2, 3, 4)),
    *(scattered(ranks) for ranks in (2, 4)),
    program(2, BESIDE, "f32[2@didx, 3]", "f32[2, 3]"),
    program(2, ON_WORKERS, "f32[2@didx, 3]", "f32[2, 3]", streams=2),
]


@pytest.mark.parametrize("executors", [1, 2])
@pytest.mark.parametrize("text", IN_PLACE)
def test_the_caller_may_compute_an_input_in_the_workspace(
    text: Program, executors: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    monkeypatch.setattr(SymmetricCollectives, "fill", recording_copies(copied))
    for seed in range(6):
        check_calls(text, gpus, seed, monkeypatch, calls=4, executors=executors, in_place=True)
    assert not copied
    check_calls(text, gpus, 0, monkeypatch, calls=4, executors=executors)
    assert len(copied) == 4 * text.ranks


def test_memory_that_is_cleared_keeps_what_the_caller_wrote(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    text = program(1, WIDE, "f32[4, 6]", "f32[4, 6]")
    (plan,) = plans(gpus, text, [[torch.rand(4, 6)]], monkeypatch)
    assert plan.memory is not None
    (box,) = (x for x in plan.memory.flat.values() if x.dtype == torch.float32)
    page = torch.full((16,), 0xFF, dtype=torch.uint8)
    for clear in (lambda: plan.memory.clear(0), lambda: plan.memory.overwrite(0, page)):
        whole = box[:24]
        for given in (box[:0], box[5:9], box[7:12], box, whole.view(4, 6)[:3, 2:4], whole.view(2, 2, 6)[:, 1]):
            plan.memory.given.clear()
            plan.memory.give(given)
            plan.memory.give(given[:1])
            kept = torch.zeros_like(box, dtype=torch.bool)
            kept.as_strided(given.shape, given.stride(), given.storage_offset() - box.storage_offset()).fill_(True)
            box.fill_(3.0)
            clear()
            assert torch.equal(box == 3.0, kept)
            assert torch.equal(box.isnan(), ~kept)
        plan.memory.given.clear()
        halves = box.view(torch.bfloat16)[4:9]  # ends in the middle of an element of the buffer
        plan.memory.give(halves)
        halves.fill_(2.0)
        clear()
        assert bool((halves == 2.0).all())


def recording_copies(copied: list[int]) -> Callable[..., Any]:
    """Return a method in the place of `SymmetricCollectives.fill` that records the ranks that copy their operands."""
    fill = SymmetricCollectives.fill

    def recorded(self: SymmetricCollectives, op: CollectiveOp, space: torch.Tensor) -> Callable[[torch.Tensor], object]:
        filled = fill(self, op, space)

        def run(x: torch.Tensor) -> None:
            before = len(self.handle.gpus.current.tasks)
            filled(x)
            copied.extend([self.context.unrolled.rank] * (len(self.handle.gpus.current.tasks) - before))

        return run

    return recorded


@pytest.mark.parametrize("kept", [0, 1])
def test_both_barriers_of_a_gather_are_needed(kept: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, count = Kernels.barrier, Counter[Kernels]()

    def one_of_two(self: Kernels) -> None:
        if count[self] % 2 == kept:
            barrier(self)
        count[self] += 1

    monkeypatch.setattr(Kernels, "barrier", one_of_two)

    def run_until_it_fails() -> None:
        for seed in range(40):
            check_calls(gathered(2), gpus, seed, monkeypatch, calls=4, in_place=True)

    with pytest.raises(AssertionError):
        run_until_it_fails()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (gathered(2), True),
        (scattered(2), True),
        (scattered(2, "low_latency"), False),  # it uses slots
        (gathered(2, by="low_latency", columns=8), False),
        (reduced("one_shot", 2), False),  # the kernel copies the operand itself
        (reduced("two_shot", 2), False),  # the kernel stores parts of the result in the workspace
        (program(2, GATHERED_TWICE, "f32[2@didx, 3]", "f32[2, 3]"), False),
        (program(2, WRITTEN, "f32[2@didx, 3]", "f32[2, 3]"), False),
        (program(2, COMPUTED, "f32[2@didx, 3]", "f32[2, 3]"), False),
        (hi.parse(CONDITIONAL), False),
    ],
)
def test_an_input_has_a_place_in_the_workspace_if_nothing_else_uses_the_workspace(text: Program, place: bool) -> None:
    (x,) = unroll(text, 0, {}).inputs
    assert input_in_workspace(unroll(text, 0, {})) == (x if place else None)


SLICES = """%y: f32[4, 8, 8] = allocate
%z: f32[4, 8, 8] partial(didx) = allocate
%user = current_stream
for %s in 0..2 { set_stream %s   synchronize %user }
for %i in 0..4 {
  set_stream %i % 2
  %x_i = select %x[%i]
  %y_i = select %y[%i]
  %z_i = select %z[%i]
  add %x_i, %x_i -> %z_i
  %h = allreduce %z_i -> %y_i over didx by one_shot
  wait %h
  relu %y_i -> %y_i
}
set_stream %user
for %s in 0..2 { synchronize %s }
free %z"""


def slices(by: str = "one_shot") -> Program:
    body = SLICES.replace("one_shot", by)
    return program(2, body, "f32[4, 8, 8] partial(didx)", "f32[4, 8, 8]", streams=2)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("by", ["low_latency", "one_shot", "two_shot"])
def test_collectives_on_several_streams_run_one_after_another(
    by: str, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(slices(by), gpus, seed, monkeypatch, calls=2)


def test_collectives_of_all_kinds_share_a_workspace_of_the_largest_operand(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """%s: f32[2@didx, 64] = allocate
%h = reduce_scatter %x -> %s over didx by one_shot
wait %h
%y: f32[2, 64] = allocate
%g = allgather %s -> %y over didx by copy_engine
wait %g"""
    text = program(2, body, "f32[2, 64] partial(didx)", "f32[2, 64]")
    for seed in range(8):
        check_calls(text, gpus, seed, monkeypatch)
    assert [unroll(text, rank, {}).memory[1] for rank in range(2)] == [512, 512]
    (plan, _) = plans(gpus, text, [[torch.rand(2, 64)]] * 2, monkeypatch)
    assert plan.memory is not None
    assert plan.memory.flat[WORKSPACE, 0].numel() == 128
    assert plan.memory.offers[0].buffers[0].place == WORKSPACE, "torch's operators need one offset on all ranks"


@pytest.mark.parametrize("text", [reduced("low_latency", 3), GATHERED_SOON], ids=["sum", "gather"])
def test_a_kernel_that_gave_up_is_reported_with_its_statement_and_the_ranks_that_it_waited_for(
    text: Program, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = text.inputs[0].tensor.local_shape
    inputs = [[torch.rand([int(str(n)) for n in columns])] for _ in range(3)]
    for rank, plan in enumerate(plans(gpus, text, inputs, monkeypatch)):
        assert plan.problem() is None
        op = next(op for op in plan.unrolled.ops if isinstance(op, CollectiveOp))
        words = plan.machine.timeouts.of_data(plan.unrolled, op)
        late = [other for other in range(3) if other != rank]
        words[late, 0] = 1
        message = str(plan.problem())
        assert f"rank {rank}, '%h = {op.communication} %x -> %y over didx by low_latency'" in message
        assert f"the data of ranks {late[0]}, {late[1]} did not arrive" in message
        assert "did not arrive" in plan.machine.groups.abandoned, "late data would count for the next call"
        assert plan.problem() is None


def test_the_slots_have_room_for_the_largest_piece_twice_for_each_rank(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """%s: f32[2@didx, 64] = allocate
%h = reduce_scatter %x -> %s over didx by low_latency
wait %h
%z: f32[2, 64] = allocate
%f = allgather %s -> %z over didx by low_latency
wait %f
%y: f32[2, 64] = allocate
%g = allgather %s -> %y over didx by copy_engine
wait %g
add %z, %y -> %y"""
    text = program(2, body, "f32[2, 64] partial(didx)", "f32[2, 64]")
    for seed in range(8):
        check_calls(text, gpus, seed, monkeypatch)
    assert [unroll(text, rank, {}).memory[1] for rank in range(2)] == [2 * 2 * 256 + 256] * 2
    (plan, _) = plans(gpus, text, [[torch.rand(2, 64)]] * 2, monkeypatch)
    assert plan.memory is not None
    assert plan.memory.flat[SLOTS, 0].numel() == 2 * 2 * 64
    assert plan.memory.offers[0].buffers[0].place == WORKSPACE, "torch's operators need one offset on all ranks"


@pytest.mark.parametrize("by", ["low_latency", "one_shot", "two_shot"])
def test_a_collective_may_run_in_place(by: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"""%y: f32[6, 8] = allocate
%p = as_partial %y over didx
add %x, %x -> %p
%h = allreduce %p -> %y over didx by {by}
wait %h"""
    for seed in range(6):
        check_calls(program(2, body, "f32[6, 8] partial(didx)", "f32[6, 8]"), gpus, seed, monkeypatch)


@pytest.mark.parametrize("by", ["one_shot", "two_shot"])
@pytest.mark.parametrize("pattern", [patterns.row_parallel, patterns.mlp_replicated])
def test_an_operand_is_computed_in_the_workspace(
    by: str, pattern: Callable[..., hi.Fusion], gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = hi.lower(pattern(2, 1, 8, 8, 16), f"sequential by {by}")
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(implementations, "copy", lambda out, x: copied.append(x))
    monkeypatch.setattr(Kernels, "one_shot_all_reduce_copy_out", None)
    for seed in range(6):
        check_calls(text, gpus, seed, monkeypatch, calls=4, executors=2)
    assert not copied


@pytest.mark.parametrize(
    ("lines", "in_workspace"),
    [
        (["%p: P = allocate", "add %x, %x -> %p", "REDUCE %p -> %y", "free %p"], 1),
        (["%p = as_partial %y over didx", "add %x, %x -> %p", "REDUCE %p -> %y"], 0),
        (["REDUCE %x -> %y"], 0),
        (
            [
                "%p: P = allocate",
                "add %x, %x -> %p",
                "REDUCE %p -> %y",
                "%q = as_partial %y over didx",
                "copy %p -> %q",
                "free %p",
            ],
            0,
        ),
        (
            [
                "%p: P = allocate",
                "%q: P = allocate",
                "add %x, %x -> %p",
                "add %x, %x -> %q",
                "%z: f32[6, 8] = allocate",
                "REDUCE %p -> %z",
                "REDUCE %q -> %y",
                "free %p",
                "free %q",
                "free %z",
            ],
            1,
        ),
        (
            [
                "%p: P = allocate",
                "%z: f32[6, 8] = allocate",
                "add %x, %x -> %p",
                "REDUCE %p -> %z",
                "add %x, %x -> %p",
                "REDUCE %p -> %y",
                "free %p",
                "free %z",
            ],
            0,
        ),
    ],
    ids=["computed for it", "in place", "an input", "read later", "two at a time", "used twice"],
)
def test_only_operands_that_nothing_else_needs_lie_in_the_workspace(
    lines: list[str], in_workspace: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, count = ["%y: f32[6, 8] = allocate"], 0
    for line in lines:
        if line.startswith("REDUCE"):
            count += 1
            body += [f"%h{count} = allreduce{line.removeprefix('REDUCE')} over didx by two_shot", f"wait %h{count}"]
        else:
            body.append(line.replace(": P", ": f32[6, 8] partial(didx)"))
    text = program(2, "\n".join(body), "f32[6, 8] partial(didx)", "f32[6, 8]")
    assert len(workspace_buffers(unroll(text, 0, {}))) == in_workspace
    for seed in range(8):
        check_calls(text, gpus, seed, monkeypatch)


def test_no_operand_lies_in_the_workspace_if_ranks_may_differ() -> None:
    """The ranks of a one-shot all-reduce would call different operators."""
    body = """%y: f32[6, 8] = allocate
%r = rank of %x over didx
%p: f32[6, 8] partial(didx) = allocate
add %x, %x -> %p
if %r == 0 { add %x, %p -> %p }
%h = allreduce %p -> %y over didx by one_shot
wait %h
free %p"""
    text = program(2, body, "f32[6, 8] partial(didx)", "f32[6, 8]")
    assert workspace_buffers(unroll(text, 0, {})) == frozenset()
    without = hi.parse(str(text).replace("  if %r == 0 { add %x, %p -> %p }\n", ""))
    assert len(workspace_buffers(unroll(without, 0, {}))) == 1


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor at an address that torch's kernels cannot take."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert not implementations.is_aligned(moved)
    return moved


@pytest.mark.parametrize("text", [reduced("one_shot", 2), reduced("two_shot", 2), scattered(2), gathered(2)])
def test_inputs_at_addresses_that_the_kernels_cannot_take_are_copied(
    text: Program, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        check_calls(text, gpus, seed, monkeypatch, layout=shifted)


@pytest.mark.parametrize("text", [reduced("one_shot", 2), reduced("two_shot", 2), reduced("two_shot", 3)])
def test_results_at_addresses_that_the_kernels_cannot_take_are_copied(
    text: Program, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs = [[torch.full((6, 8), rank + 1.0)] for rank in range(text.ranks)]
    outs = [shifted(torch.zeros(6, 8)) for _ in xs]
    for plan, x, out in zip(plans(gpus, text, xs, monkeypatch), xs, outs, strict=True):
        gpus.current = Stream()
        plan.run(x, [out])
    gpus.run(Random(0))
    assert all(torch.equal(out, sum(x for (x,) in xs)) for out in outs)


def test_torch_without_an_operator_is_refused_at_the_statement(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = reduced("one_shot", 2)
    op = next(op for op in unroll(text, 0, {}).ops if isinstance(op, CollectiveOp))
    operator = partial(SymmetricCollectives.operator, SimpleNamespace(), op)
    for name in OPERATORS:
        assert callable(operator(name))
    message = rf"torch {torch.__version__} has no operator symm_mem.none, which 'allreduce by one_shot' needs".replace(
        "+", r"\+"
    )
    with pytest.raises(HostIRError, match=message):
        operator("none")


def test_an_executor_captures_these_collectives_but_not_those_of_nccl() -> None:
    text = reduced("two_shot", 2)
    assert uniform_only(unroll(text, 0, {})) == ""
    nccl = hi.parse(str(text).replace(" by two_shot", ""))
    assert "goes through NCCL" in uniform_only(unroll(nccl, 0, {}))


def test_a_group_with_other_ranks_than_the_program_is_refused(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostIRError, match=r"needs the symmetric memory of exactly the 2 ranks of @p, and there are 3"):
        plans(gpus, reduced("one_shot", 2), [[torch.rand(6, 8)]] * 3, monkeypatch)


class Nccl:
    """Models the process group of all ranks on one rank: its communications run on a stream of their own."""

    def __init__(self, gpus: Gpus, rank: int, ranks: int, issued: dict[int, list[torch.Tensor]]) -> None:
        self.gpus, self.rank, self.ranks, self.issued = gpus, rank, ranks, issued
        self.stream, self.number = Stream(), 0

    def _get_backend(self, device: torch.device) -> Nccl:
        return self

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Nccl:
        (x,), everyone = tensors, self.issued.setdefault(self.number, [])
        self.number += 1
        self.stream.wait_stream(self.gpus.current)
        self.stream.add(lambda: everyone.append(x.clone()))
        self.stream.add(lambda: x.copy_(sum(everyone)), lambda: len(everyone) == self.ranks)
        self.ended = Event()
        self.ended.record(self.stream)
        return self

    def wait(self) -> None:
        self.ended.wait(self.gpus.current)


IN_ORDER = """hostir 1
mesh @mesh [didx] = 0 1
program @p(%x: f32[2@didx, 4], %v: f32[4] partial(didx)) -> (%y, %z) streams 1 {
  %user = current_stream
  %r = rank of %x over didx
  %mine: f32[1, 4] = allocate_symmetric
  %y: f32[2, 4] = allocate
  %z: f32[4] = allocate
  %w: f32[4] = allocate
  %t: f32[2@didx, 4] = allocate
  set_stream 0
  synchronize %user
  for %i in 0..30 { copy %x -> %t }  // rank 0 may be far ahead of rank 1 on the caller's stream
  put %x -> %mine at %r over didx
  %a = allreduce %v -> %w over didx
  set_stream %user
  %b = allreduce %v -> %z over didx by one_shot
  wait %b  // so %a has started on all ranks, and every part is there
  for %i in 0..2 {
    %y_i = chunk %y[%i of 2]
    get %mine from %i over didx -> %y_i
  }
  wait %a
  synchronize 0
  free %w
  free %t
  barrier of %mine over didx
}
"""


@pytest.mark.parametrize("seed", range(40))
def test_a_collective_starts_after_earlier_collectives_of_nccl(
    seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued: dict[int, list[torch.Tensor]] = {}
    groups = {rank: Nccl(gpus, rank, 2, issued) for rank in range(2)}
    monkeypatch.setattr(Groups, "of", lambda self, team: (groups[self.rank], tuple(sorted(team))))
    assert hi.check(hi.parse(IN_ORDER)) == []
    check_calls(hi.parse(IN_ORDER), gpus, seed, monkeypatch, calls=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "text", [slices(), reduced("two_shot", 3), reduced("low_latency", 3), gathered(2), GATHERED_SOON]
)
def test_kernels_that_wait_for_a_lost_call_end_and_later_calls_are_right(
    text: Program, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    job, random = Job(text, gpus, monkeypatch), Random(seed)
    job.check(random, lambda rank: 0)
    lost = random.randrange(text.ranks)
    released = [job.run(rank, 0) for rank in range(text.ranks) if rank != lost]
    gpus.advance()
    assert any(stream.tasks for stream in gpus.streams), "the other ranks wait"
    job.renew()
    assert not any(stream.tasks for stream in gpus.streams)
    assert not any(pad.any() for pad in gpus.pads.values())
    for (y,) in released if "allreduce" in str(text) or "low_latency" in str(text) else ():
        assert y is not None
        assert y.isnan().any(), "a result without a rank must not look like a result"
    job.check(random, lambda rank: 1)


def residual_norm(
    ranks: int, keyword: str = "allreduce", *, fp8: str = "", body: str = "", results: str = ""
) -> Program:
    """Return a program that sums %x, adds %r, normalizes the rows and perhaps quantizes them."""
    shape = f"f32[{f'{ranks}@didx' if keyword == 'reduce_scatter' else '2'}, 8]"
    one = shape.replace(", 8]", ", 1]")
    lines = f"""%y: {shape} = allocate
%h = {keyword} %x -> %y over didx by low_latency
wait %h
%t: {shape} = allocate
add %y, %r -> %t
free %y
%n: {shape} = allocate
rms_norm %t eps 1e-05 times %w -> %n
"""
    if fp8:
        lines += f"""%s: {one} = allocate
row_scales %n to {fp8} -> %s
%q: {shape.replace("f32", fp8)} = allocate
quantize %n by %s to {fp8} -> %q
free %n
"""
    indented = "".join(f"  {line}\n" for line in (body or lines).splitlines())
    mesh, results = " ".join(map(str, range(ranks))), results or ("%t, %s, %q" if fp8 else "%t, %n")
    x = f"f32[{ranks if keyword == 'reduce_scatter' else 2}, 8] partial(didx)"
    inputs = f"%x: {x}, %r: {shape}, %w: f32[8]"
    return hi.parse(f"hostir 1\nmesh @mesh [didx] = {mesh}\nprogram @p({inputs}) -> ({results}) {{\n{indented}}}\n")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fp8", ["", "f8e4m3"])
@pytest.mark.parametrize("keyword", ["allreduce", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_follows_a_sum_is_right_in_its_kernel_in_every_order(
    ranks: int, keyword: str, fp8: str, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = residual_norm(ranks, keyword, fp8=fp8)
    check_calls(text, gpus, seed, monkeypatch, calls=4, executors=1 + seed % 2)
    assert LowLatencyModel.epilogues == 4 * ranks


NORM_INPUTS = [torch.rand(2, 8), torch.rand(2, 8), torch.rand(8)]


def test_only_results_that_something_reads_have_memory(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    text = residual_norm(2, fp8="f8e4m3")
    unrolled = unroll(text, 0, {})
    (normed,) = NormedSum.of(unrolled)
    names = dict(zip(normed.results, "ytnsq", strict=True))
    assert [names.get(x, "") for x in normed.stored] == ["", "t", "", "s", "q"]
    assert {names[x] for x in normed.needless} == {"y", "n"}
    issued: list[tuple[torch.Tensor | None, RowTensors]] = []
    monkeypatch.setattr(LowLatencyModel, "__call__", lambda self, x, out, rows: issued.append((out, rows)))
    plan = plans(gpus, text, [NORM_INPUTS] * 2, monkeypatch)[0]
    results = plan.run(NORM_INPUTS)
    ((out, rows),) = issued
    assert out is None
    assert rows.normed is None
    assert all(x is y for x, y in zip(results, (rows.added, rows.scales, rows.quantized), strict=True))
    assert sum(isinstance(op, AllocateOp) for op in plan.ops) == 3


CHAIN = """%y: f32[2, 8] = allocate
%h = allreduce %x -> %y over didx by low_latency
wait %h
%t: f32[2, 8] = allocate
add %y, %r -> %t
%n: f32[2, 8] = allocate
rms_norm %t eps 1e-05 times %w -> %n"""
GATHERED_ROWS = """%z: f32[2@didx, 8] = allocate
%g = reduce_scatter %x -> %z over didx by low_latency
wait %g
%h = allgather %z -> %y"""
QUANTIZED = """
%s: f32[2, 1] = allocate
row_scales %n to f8e4m3 -> %s
%q: f8e4m3[2, 8] = allocate
quantize %n by %s to f8e4m3 -> %q"""


@pytest.mark.parametrize(
    ("old", "new", "computations"),
    [
        ("", "", 2),
        ("add %y, %r", "add %r, %y", 2),
        (" times %w", "", 2),
        (" -> %n", " -> %n" + QUANTIZED, 4),
        (" -> %n", " -> %n" + QUANTIZED.replace("to f8e4m3 -> %s", "to f8e5m2 -> %s"), 2),
        (" -> %n", " -> %n" + QUANTIZED.replace("quantize %n", "quantize %t"), 2),
        (" -> %n", " -> %n\nrelu %y -> %y", 2),
        ("add %y, %r -> %t", "add %y, %r -> %r\ncopy %r -> %t", 0),
        ("add %y, %r", "add %y, %w", 0),
        ("add %y, %r", "add %r, %r", 0),
        ("add %y, %r", "add %y, %y", 0),
        ("rms_norm %t", "rms_norm %y", 0),
        ("wait %h\n", "wait %h\nrelu %y -> %y\n", 0),
        ("add %y, %r -> %t\n", "add %y, %r -> %t\nrelu %y -> %y\n", 0),
        ("wait %h\n%t: f32[2, 8] = allocate\n", "%t: f32[2, 8] = allocate\nrelu %r -> %t\nwait %h\n", 0),
        (" by low_latency", "", 0),
        (" by low_latency", " by two_shot", 0),
        ("%h = allreduce %x -> %y", GATHERED_ROWS, 0),
        ("%t: f32[2, 8] = allocate", "%t: f32[2, 8] = allocate_symmetric", 0),
    ],
)
def test_a_kernel_takes_only_what_directly_follows_its_sum(
    old: str, new: str, computations: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = residual_norm(2, body=CHAIN.replace(old, new))
    (normed,) = NormedSum.of(unroll(text, 0, {})) or [None]
    assert (len(normed.computations) if normed else 0) == computations
    if "by " in str(text):
        for seed in range(4):
            check_calls(text, gpus, seed, monkeypatch)


IN_PLACE = {
    "over the residual": (
        """%y: f32[2, 8] = allocate
%h = allreduce %x -> %y over didx by low_latency
wait %h
add %y, %r -> %r
%n: f32[2, 8] = allocate
rms_norm %r eps 1e-05 times %w -> %n
%t: f32[2, 8] = allocate
copy %r -> %t""",
        "%t, %n",
    ),
    "over the summands": (
        """%n: f32[2, 8] = allocate
%p = as_partial %n over didx
add %x, %x -> %p
%h = allreduce %p -> %n over didx by low_latency
wait %h
%t: f32[2, 8] = allocate
add %n, %r -> %t
rms_norm %t eps 1e-05 times %w -> %n""",
        "%t, %n",
    ),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_results_may_replace_tensors_of_equal_layout(case: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    body, results = IN_PLACE[case]
    text = residual_norm(2, body=body, results=results)
    (normed,) = NormedSum.of(unroll(text, 0, {}))
    assert [register != NONE for register in normed.stored] == [False, True, True]
    for seed in range(6):
        check_calls(text, gpus, seed, monkeypatch, calls=4)
    assert LowLatencyModel.epilogues


SHARED = {
    "a part of the residual": """%y: f32[2, 8] = allocate
%h = allreduce %x -> %y over didx by low_latency
wait %h
%both: f32[2, 2, 8] = allocate
%t = select %both[0]
%n = select %both[1]
add %y, %r -> %t
rms_norm %t eps 1e-05 times %w -> %n""",
    "the weight": """%y: f32[2, 8] = allocate
%h = allreduce %x -> %y over didx by low_latency
wait %h
%both: f32[2, 8] = allocate
%t: f32[2, 8] = allocate
%n: f32[2, 8] = allocate
add %y, %r -> %t
%v = select %y[0]
rms_norm %t eps 1e-05 times %v -> %n""",
}


@pytest.mark.parametrize("case", SHARED)
def test_results_do_not_replace_a_part_of_another_tensor(
    case: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = residual_norm(2, body=SHARED[case])
    assert NormedSum.of(unroll(text, 0, {})) == []
    for seed in range(3):
        check_calls(text, gpus, seed, monkeypatch)


@pytest.mark.parametrize("normed", [False, True])
def test_a_timeline_has_the_end_of_a_collective_for_which_no_step_waits(
    normed: bool, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CudaMachine.plan
    monkeypatch.setattr(CudaMachine, "plan", lambda machine, x: original(machine, x, Timeline(x, Trace())))
    text, inputs = (residual_norm(2), NORM_INPUTS) if normed else (reduced("low_latency", 2), [torch.rand(6, 8)])
    (plan, _) = plans(gpus, text, [inputs] * 2, monkeypatch)
    plan.run(inputs)
    assert plan.timeline is not None
    ((op, start, end),) = plan.timeline.spans
    assert op.starts
    assert [event.query() for event in (start, end)] == [False, False], "no step records an event"
