"""Collectives of torch's symmetric memory as CUDA plans issue them, on simulated GPUs that model torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hostir as hi
from examples import patterns
from hostir.ir.program import Program
from hostir.ir.source import HostIRError
from hostir.job.offers import WORKSPACE
from hostir.machines.cuda import implementations
from hostir.machines.cuda.graphs import uniform_only
from hostir.machines.cuda.implementations import SymmetricCollectives
from hostir.plan.operations import CollectiveOp
from hostir.plan.unroll import unroll
from tests.machines.cuda.simulated_gpus import Gpus, Handle, Stream, gpus, plans
from tests.machines.cuda.test_onesided import check_calls

__all__ = ["gpus"]  # a fixture


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
        self.one_shot_all_reduce_out(space, *rest)

    def one_shot_all_reduce_out(self, space: torch.Tensor, op: str, group: str, out: torch.Tensor) -> None:
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


@pytest.fixture(autouse=True)
def torchs_kernels(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's operators and copies by the models."""
    original = SymmetricCollectives.__init__

    def init(self: SymmetricCollectives, context: Any, memory: Any, all_ranks: Any) -> None:
        original(self, context, memory, lambda: SimpleNamespace(group_name="everyone"))
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


def gathered(ranks: int, dtype: str = "f32") -> Program:
    body = f"%y: {dtype}[{ranks}, 3] = allocate\n%h = allgather %x -> %y over didx by copy_engine\nwait %h"
    return program(ranks, body, f"{dtype}[{ranks}@didx, 3]", f"{dtype}[{ranks}, 3]")


def scattered(ranks: int) -> Program:
    y = f"f32[{ranks}@didx, 8]"
    body = f"%y: {y} = allocate\n%h = reduce_scatter %x -> %y over didx by one_shot\nwait %h"
    return program(ranks, body, f"f32[{ranks}, 8] partial(didx)", y)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "text",
    [
        *(reduced(by, ranks) for by in ("one_shot", "two_shot") for ranks in (2, 3, 4)),
        *(gathered(ranks) for ranks in (2, 3, 4)),
        *(scattered(ranks) for ranks in (2, 4)),
    ],
    ids=lambda p: f"{p.body[1].keyword()} by {p.body[1].by} {p.ranks}",
)
@pytest.mark.parametrize("executors", [1, 2])
def test_calls_that_follow_each_other_at_once_are_right_in_every_order(
    text: Program, seed: int, executors: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(text, gpus, seed, monkeypatch, calls=4, executors=executors)
