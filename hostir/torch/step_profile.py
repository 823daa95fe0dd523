"""Profile a step of a model on a GPU: a picture of its kernels, and the communication that nothing hides, by layer.

torch.profiler records the step. Its trace says which kernel and copy ran when on which stream, and which operator
issued it. The forward pass of each layer is in a range of the profiler. The backward pass has no such range: autograd
gives an operator and its gradient the same number, so work of the backward pass belongs to the layer of that operator.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from hostir.ir.source import error, user_span
from hostir.machines.trace import COMMUNICATION, MATMUL, OTHER, Trace, TraceEvent

LAYER = "layer "  # the beginning of the names of the ranges of layers
OUTSIDE = "outside of layers"
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # the trace's categories of what runs on a GPU
NODE = "autograd::engine::evaluate_function"  # the range of an operator's backward pass

# Words in the names of kernels and copies.
COMMUNICATING = ("nccl", "PtoP", "push_kernel", "low_latency", "one_shot", "two_shot", "barrier", "signal", "_end_call")
MULTIPLYING = ("gemm", "nvjet", "matmul", "cutlass", "xmma")

COLLECTIVES = {"AllGather": "allgather", "ReduceScatter": "reduce_scatter", "AllReduce": "allreduce"}

Interval = tuple[float, float]  # its start and its end, in microseconds
TraceLine = Mapping[str, Any]  # of a trace in Chrome's format


@dataclass(frozen=True)
class StepWork:
    """A kernel or a copy of a step.

    Fields:
        name: its name in the profile.
        statement: the statement of hostir's program that issued it; empty if there is none.
        layer: the name of the layer, or `outside of layers`.
        direction: `forward` or `backward`, the pass that issued it; empty if nothing says so.
        stream: its stream. Streams are numbered in the order in which they are first used.
        start, end: when it ran, in microseconds from the beginning of the step.
        activity: `communication`, `matmul` or `other`.
        exposed: the intervals in which it communicated, while neither a computation nor an earlier communication ran.
    """

    name: str
    statement: str
    layer: str
    direction: str
    stream: int
    start: float
    end: float
    activity: str
    exposed: tuple[Interval, ...] = ()

    @property
    def us(self) -> float:
        """The time that it ran, in microseconds."""
        return self.end - self.start

    @property
    def exposed_us(self) -> float:
        """The length of the intervals in which it is exposed, in microseconds."""
        return sum(end - start for start, end in self.exposed)

    @property
    def words(self) -> str:
        """The text of a picture. The first word is that of a statement of this kind, which decides the colour."""
        collective = next((word for part, word in COLLECTIVES.items() if part in self.name), "put")
        kind = {COMMUNICATION: collective, MATMUL: "matmul"}.get(self.activity, "kernel")
        return f"{kind} {self.statement or self.name}\n{self.layer} {self.direction}"


@dataclass(frozen=True)
class StepProfile:
    """A step on this rank, as `profile_step` has measured it. `str` shows a line for each layer and pass.

    Fields:
        works: the kernels and copies, in the order of their starts.
    """

    works: tuple[StepWork, ...]

    @staticmethod
    def of_trace(events: Sequence[TraceLine]) -> StepProfile:
        """Return the profile of a step from the events of a trace that torch.profiler has exported."""
        host, on_gpu = _Host(events), sorted((e for e in events if e.get("cat") in WORK), key=lambda e: float(e["ts"]))
        ranges = [e for e in events if e.get("cat") == "gpu_user_annotation" and str(e["name"]).startswith("@")]
        first = float(on_gpu[0]["ts"]) if on_gpu else 0.0
        works, streams = [], dict[Any, int]()
        for e in on_gpu:
            name, start, statement = str(e["name"]), float(e["ts"]) - first, _statement(ranges, e)
            stream = streams.setdefault(e["args"].get("stream"), len(streams))
            end, place = start + float(e["dur"]), host.layer(e["args"].get("External id"))
            works.append(StepWork(name, statement, *place, stream, start, end, _activity(name, statement)))
        return StepProfile(tuple(_with_exposed(works)))

    @property
    def us(self) -> float:
        """The time from the first kernel's start to the last one's end, in microseconds."""
        return max((work.end for work in self.works), default=0.0)

    @property
    def exposed(self) -> dict[tuple[str, str], float]:
        """The microseconds of communication that nothing hides, by layer and direction."""
        times: dict[tuple[str, str], float] = defaultdict(float)
        for work in self.works:
            times[work.layer, work.direction] += work.exposed_us
        return dict(times)

    def __str__(self) -> str:
        communicating: dict[tuple[str, str], float] = defaultdict(float)
        for work in self.works:
            communicating[work.layer, work.direction] += work.us * (work.activity == COMMUNICATION)
        exposed = self.exposed
        wide = max((len(layer) for layer, _ in exposed), default=0)
        lines = [f"a step of {self.us / 1000:.2f} ms, {sum(exposed.values()):.0f} us of it exposed communication"]
        for (layer, direction), us in exposed.items():
            moved = f"{communicating[layer, direction]:8.0f} us communication, {us:6.0f} us exposed"
            lines.append(f"  {layer:{wide}} {direction:8} {moved}")
        return "\n".join(lines)

    def to_svg(self, path: str | Path, title: str = "a step") -> None:
        """Draw the step: a lane for each stream, and a lane with the communication that nothing hides."""
        trace = Trace(f"{title}, {self.us / 1000:.2f} ms")
        for work in self.works:
            trace.add(0, f"stream {work.stream}", work.words, work.start / 1e6, work.end / 1e6)
            for start, end in work.exposed:
                trace.add(0, f"{COMMUNICATION}, exposed", work.words, start / 1e6, end / 1e6)
        trace.to_svg(path)


def profile_step(step: Callable[[], object], model: nn.Module | None = None, warm: int = 3) -> StepProfile:
    """Run a step of a model on a GPU several times, and return a profile of the last run.

    All ranks call this together, and each gets its own profile. While a profiler records a step, Python issues each
    statement in a range of its own. That takes the host longer. So profile a step that the host bounds in a CUDA graph.

    Args:
        step: issues the step, such as forward, backward and optimizer. It may replay a CUDA graph. Then the profile has
            no layers and no statements.
        model: the model, whose layers get ranges. These are its children, and the elements of its lists of modules. If
            several layers are compiled together, their work is outside of layers.
        warm: the number of runs before the one that is recorded.

    Raises HostIRError if nothing ran on a GPU.
    """
    nothing = error("the step ran nothing on a GPU", user_span(), expected="a step of a model on a GPU")
    if not torch.cuda.is_available():
        raise nothing
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with _in_ranges(model), profile(activities=activities, acc_events=True) as recorded:  # without it, torch 2.11 warns
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        result = StepProfile.of_trace(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])
    if not result.works:
        raise nothing
    return result


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model with their names: its children, and the elements of its lists of modules."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{number}", each) for number, each in child.named_children())
        else:
            yield name, child


@contextlib.contextmanager
def _in_ranges(model: nn.Module | None) -> Iterator[None]:
    """Within this context, the forward pass of each layer is in a range of the profiler.

    Hooks would become a part of compiled layers, which would then be compiled again. So the function that the call of a
    layer runs is replaced.
    """
    replaced = []
    for name, layer in () if model is None else layers_of(model):
        compiled = layer.__dict__.get("_compiled_call_impl") is not None
        attribute = "_compiled_call_impl" if compiled else "_call_impl"
        replaced.append((layer, attribute, layer.__dict__.get(attribute)))
        layer.__dict__[attribute] = _ranged(LAYER + name, getattr(layer, attribute))
    try:
        yield
    finally:
        for layer, attribute, before in replaced:
            if before is None:
                del layer.__dict__[attribute]
            else:
                layer.__dict__[attribute] = before


def _ranged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(*args: Any, **options: Any) -> Any:
        with record_function(name):
            return call(*args, **options)

    return ranged


class _Host:
    """Finds the layers of operators that the host has run."""

    def __init__(self, events: Sequence[TraceLine]) -> None:
        spans = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation") and e.get("ph") == "X"]
        self.by_id = {e["args"]["External id"]: e for e in spans if "External id" in e.get("args", {})}
        self.layers = _by_thread(e for e in spans if str(e["name"]).startswith(LAYER))
        self.nodes = _by_thread(e for e in spans if str(e["name"]).startswith(NODE))
        # Operators that make no node of the graph have the number of the next one that does. So the last one counts.
        forward = (e for e in spans if e["tid"] in self.layers and "Sequence number" in e.get("args", {}))
        self.forward = {e["args"]["Sequence number"]: e for e in sorted(forward, key=lambda e: float(e["ts"]))}

    def layer(self, operator: Any) -> tuple[str, str]:
        """Return the layer and the direction of the operator with a number of the profiler."""
        e = self.by_id.get(operator)
        if e is None:
            return OUTSIDE, ""
        if (layer := _around(self.layers, e)) is not None:
            return _name(layer), "forward"
        node = _around(self.nodes, e)
        if node is None:
            return OUTSIDE, ""
        origin = self.forward.get(node["args"].get("Sequence number"))
        return _name(None if origin is None else _around(self.layers, origin)), "backward"


def _name(layer: TraceLine | None) -> str:
    return OUTSIDE if layer is None else str(layer["name"]).removeprefix(LAYER)


def _by_thread(events: Iterator[TraceLine]) -> dict[Any, list[TraceLine]]:
    """Return events by thread, in the order of their starts."""
    threads: dict[Any, list[TraceLine]] = defaultdict(list)
    for e in sorted(events, key=lambda e: float(e["ts"])):
        threads[e["tid"]].append(e)
    return threads


def _around(spans: Mapping[Any, Sequence[TraceLine]], e: TraceLine) -> TraceLine | None:
    """Return the span of the same thread that contains an event; the innermost if there are several."""
    on_thread, at = spans.get(e["tid"], ()), float(e["ts"])
    for span in reversed(on_thread[: bisect_right(on_thread, at, key=lambda span: float(span["ts"]))]):
        if at < float(span["ts"]) + float(span["dur"]):
            return span
    return None


def _statement(ranges: Sequence[TraceLine], work: TraceLine) -> str:
    """Return the text of the innermost statement's range on the GPU that contains a kernel; empty if there is none."""
    begin, end = float(work["ts"]), float(work["ts"]) + float(work["dur"])
    around = [
        r
        for r in ranges
        if r["tid"] == work["tid"] and float(r["ts"]) <= begin and end <= float(r["ts"]) + float(r["dur"])
    ]
    return str(min(around, key=lambda r: float(r["dur"]))["name"]) if around else ""


def _activity(name: str, statement: str) -> str:
    if any(word in name for word in COMMUNICATING):
        return COMMUNICATION
    if any(word in name for word in MULTIPLYING):
        return MATMUL
    of_statement = TraceEvent(0, "", statement.partition(": ")[2], 0.0, 0.0).activity if statement else OTHER
    return COMMUNICATION if of_statement == COMMUNICATION else OTHER


def _with_exposed(works: Sequence[StepWork]) -> Iterator[StepWork]:
    """Yield the works with the intervals in which each is exposed. They are in the order of their starts."""
    busy = sorted((work.start, work.end) for work in works if work.activity != COMMUNICATION)
    until = 0.0  # the end of the communications so far
    for work in works:
        if work.activity != COMMUNICATION:
            yield work
            continue
        yield replace(work, exposed=tuple(_outside(busy, max(work.start, until), work.end)))
        until = max(until, work.end)


def _outside(busy: Sequence[Interval], start: float, end: float) -> Iterator[Interval]:
    """Yield the parts of an interval outside some intervals, which are in the order of their starts."""
    for begin, until in busy:
        if start < min(begin, end):
            yield start, min(begin, end)
        start = max(start, until)
        if start >= end:
            return
    if start < end:
        yield start, end
