"""Profiles of steps: what is exposed, and to which layer, statement and direction a kernel belongs."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hostir.torch
from hostir.ir.source import HostIRError
from hostir.torch.step_profile import LAYER, NODE, OUTSIDE, StepProfile, _in_ranges, layers_of

numbers = count(1)
Event = dict[str, Any]


def host(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op", **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def work(name: str, ts: float, dur: float, stream: int = 7, by: Event | None = None, cat: str = "kernel") -> Event:
    args: Event = {"stream": stream}
    if by is not None:
        args["External id"] = by["args"].setdefault("External id", next(numbers))
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": stream, "args": args}


def test_communication_is_exposed_while_nothing_computes_and_no_earlier_one_communicates() -> None:
    events = [
        work("nvjet_gemm", 100, 10),
        work("ncclDevKernel_AllGather", 105, 15, stream=20),  # exposed from 110 to 115, and from 117 to 120
        work("triton_poi_fused_add", 115, 2),
        work(
            "Memcpy PtoP (Device -> Device)", 112, 13, stream=21, cat="gpu_memcpy"
        ),  # exposed after the other: 120-125
        work("Memset (Device)", 130, 1, cat="gpu_memset"),
        work("push_kernel", 130.5, 0.5, stream=20),  # hidden
    ]
    profiled = StepProfile.of_trace(events)
    assert [(w.name.split("(")[0].strip(), w.exposed) for w in profiled.works if w.activity == "communication"] == [
        ("ncclDevKernel_AllGather", ((10, 15), (17, 20))),
        ("Memcpy PtoP", ((20, 25),)),
        ("push_kernel", ()),
    ]
    assert profiled.exposed == {(OUTSIDE, ""): 13}
    assert profiled.us == 31
    assert "13 us of it exposed communication" in str(profiled)


def test_a_kernel_belongs_to_the_layer_whose_range_or_whose_gradient_issued_it() -> None:
    forward = host("aten::mm", 12, 2, **{"Sequence number": 5, "Fwd thread id": 0})
    view = host("aten::view", 5, 1, **{"Sequence number": 5, "Fwd thread id": 0})  # makes no node
    gradient = host("aten::mm", 52, 1, tid=2)
    events = [
        host(LAYER + "layers.0", 0, 10, cat="user_annotation"),
        host(LAYER + "layers.1", 10, 10, cat="user_annotation"),
        *(view, forward, gradient),
        host(NODE + ": MmBackward0", 50, 5, tid=2, **{"Sequence number": 5, "Fwd thread id": 1}),
        host("Redistribute", 60, 1, tid=2, **{"Sequence number": 5, "Fwd thread id": 0}),  # another thread's numbers
        work("ncclDevKernel_AllGather", 100, 4, by=forward),
        work("ncclDevKernel_ReduceScatter", 110, 6, by=gradient),
        work("ncclDevKernel_AllReduce", 120, 1, by=host("aten::other", 30, 1)),
    ]
    profiled = StepProfile.of_trace(events)
    assert profiled.exposed == {("layers.1", "forward"): 4, ("layers.1", "backward"): 6, (OUTSIDE, ""): 1}
    assert "layers.1          backward        6 us communication,      6 us exposed" in str(profiled)


def test_the_innermost_statement_around_a_kernel_on_its_stream_is_its_statement() -> None:
    def on_gpu(name: str, ts: float, dur: float, stream: int) -> Event:
        return host(name, ts, dur, stream, "gpu_user_annotation")

    events = [
        on_gpu("@ag: for %i", 0, 30, 7),
        on_gpu("@ag: copy %a -> %b", 9, 4, 7),
        on_gpu("@ag: put %x -> %y at %r over didx", 9, 4, 8),
        on_gpu("another range", 9, 3, 7),
        work("Memcpy DtoD (Device -> Device)", 10, 2, 7, cat="gpu_memcpy"),
        work("Memcpy DtoD (Device -> Device)", 10, 2, 8, cat="gpu_memcpy"),
    ]
    copied, put = StepProfile.of_trace(events).works
    assert (copied.statement, copied.activity) == ("@ag: copy %a -> %b", "other")
    assert (put.statement, put.activity) == ("@ag: put %x -> %y at %r over didx", "communication")


def test_a_picture_has_a_lane_for_each_stream_and_one_for_exposed_communication(tmp_path: Path) -> None:
    events = [work("nvjet", 0, 5), work("ncclDevKernel_AllGather", 4, 3, stream=20)]
    StepProfile.of_trace(events).to_svg(tmp_path / "step.svg", "a block")
    text = (tmp_path / "step.svg").read_text()
    assert [lane in text for lane in ("stream 0<", "stream 1<", "communication, exposed<")] == [True] * 3
    assert "a block, 0.01 ms" in text
    assert text.count("ncclDevKernel_AllGather") == 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.layers[1].compile(backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_run_in_ranges_only_while_they_are_profiled() -> None:
    model, x = Model(), torch.tensor([1, 2])
    assert [name for name, _ in layers_of(model)] == ["embedding", "layers.0", "layers.1"]
    before = [dict(layer.__dict__) for _, layer in layers_of(model)]
    model(x)
    with (
        _in_ranges(model),
        profile(activities=[ProfilerActivity.CPU]) as recorded,
        torch.compiler.set_stance("fail_on_recompile"),
    ):
        result = model(x)
    ranges = [e.name for e in recorded.events() if e.name.startswith(LAYER)]
    assert ranges == [LAYER + name for name, _ in layers_of(model)]
    assert [dict(layer.__dict__).keys() for _, layer in layers_of(model)] == [names.keys() for names in before]
    torch.testing.assert_close(model(x), result)


def test_a_step_without_work_on_a_gpu_is_refused() -> None:
    with pytest.raises(HostIRError, match="the step ran nothing on a GPU"):
        hostir.torch.profile_step(lambda: torch.ones(2) + 1)
