"""CUDA graphs of an executor: a call with the same addresses as before is one graph launch.

A call with `out=` gets all its addresses from the caller. After two such calls at the same addresses, the plan is
captured. The capture executes nothing. From then on, the captured graph is launched on the caller's stream. The graph
does not keep the caller's tensors alive: it reads and writes the memory at their addresses.

Copies with peers are an exception. A copy to or from a peer is a memcpy node, and CUDA resolves the addresses of a
memcpy node to allocations when the graph is instantiated. The caller's tensor may be freed, its memory returned to CUDA
(`empty_cache`), and its address given to another allocation. Then a launch of the graph fails: "invalid argument",
"unspecified launch failure", or a segmentation fault in the driver. So before each launch, hostir compares the
allocations that now contain these addresses with the allocations at the time of the capture. If an allocation has
changed, hostir drops the graph.

Workspaces come from a pool that all graphs of the executor share, and kernels may share per-stream library state with
eager calls. So calls of one executor run in order, even if they are made on different streams.

Programs that communicate through NCCL are not captured here. All ranks must capture the same call together, and they
must replay the graphs of this common capture [NCCL 2025]. But addresses differ between ranks: a call at known addresses
on one rank may be a call at new addresses on another rank. So the ranks would not capture the same call. But the caller
can capture a call on all ranks at once. One-sided copies, signals and barriers need no such agreement, and neither do
collectives of torch's symmetric memory: a peer sees no difference between captured operations and eager operations.

- [NCCL 2025] NVIDIA Collective Communication Library user guide, *Using NCCL with CUDA Graphs*.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from hostir.ir.machine import uncollected
from hostir.ir.source import Diagnostic, HostIRError, error, logger, warn_user
from hostir.job.links import headline
from hostir.machines.binding import Part
from hostir.machines.cuda.driver import Allocations
from hostir.machines.cuda.streams import own_stream
from hostir.machines.cuda.uses import capturing
from hostir.plan.operations import CollectiveOp
from hostir.plan.unrolled import UnrolledProgram

LOG = logger(__name__)
EAGER_CALLS = 2  # calls at the same addresses before a capture: the first may compile, tune and connect
MAX_GRAPHS = 16  # the number of graphs that an executor keeps


class Capturable(Protocol):
    """The part of a plan that `Graphs` uses."""

    @property
    def copied_with_peers(self) -> Sequence[int]:
        """The positions of the tensors that copy engines copy to or from a peer."""

    @property
    def eager_only(self) -> str:
        """The reason why runs of the plan are not captured; empty if they are."""

    def run(self, inputs: Sequence[Part], outs: Sequence[Part] | None, capturing: bool) -> tuple[Part, ...]:
        """Issue one run that writes the outputs to the tensors `outs`.

        `capturing` is True if the current stream is part of a capture.
        """


class GraphedCall(Protocol):
    """The part of a bound call that `Graphs` uses."""

    graph: torch.cuda.CUDAGraph | None
    allocations: Allocations | None
    eager: int
    captures: int

    @property
    def plan(self) -> Any:
        """The plan, which is a `Capturable`."""


def uniform_only(unrolled: UnrolledProgram) -> str:
    """Return the reason why a rank must not capture a program unless all other ranks do so too; empty if it may."""
    if not any(op.in_graph for op in unrolled.ops):
        return "nothing runs with these sizes, and torch warns of an empty graph"
    op = next((op for op in unrolled.ops if op.by_group and not (isinstance(op, CollectiveOp) and op.by)), None)
    if op is None:
        return ""
    return f"{unrolled.describe(op)} goes through NCCL, which all ranks must capture and replay together"


class Graphs:
    """The CUDA graphs of one executor. The class is not thread-safe.

    Args:
        device: this rank's device.
        name: the name of the program.
        calls: the executor's bound calls, the least recently bound first.
        first: a function that returns True if this rank is the first rank of the job to lose its graphs. Only the first
            rank warns.

    Fields:
        refusal: the reason why there will be no more graphs: a capture failed, or the session has ended. None if there
            may be more graphs.
    """

    def __init__(
        self,
        device: torch.device,
        name: str,
        calls: Mapping[Any, GraphedCall],
        first: Callable[[], bool] = lambda: True,
    ) -> None:
        self.device = device
        self.name = name
        self.calls = calls
        self.first = first
        self.refusal: str | None = None
        self.pool: Any = None  # the memory pool that all live graphs share

    @cached_property
    def side(self) -> torch.cuda.Stream:
        """The stream on which captures are made."""
        return own_stream(self, self.device, priority=0)

    @property
    def kept(self) -> list[GraphedCall]:
        """The calls that have a graph, the least recently bound first."""
        return [call for call in self.calls.values() if call.graph is not None]

    def replay(self, call: GraphedCall) -> bool:
        """Launch the graph of a call and return True.

        If a tensor that the graph copies to or from a peer was freed, drop the graph and return False.
        """
        assert call.graph is not None
        if call.allocations is not None and not call.allocations.still_there():
            call.graph = call.allocations = None
            LOG.info("@%s: dropped a CUDA graph: a tensor that it copies to a peer was freed", self.name)
            return False
        self.launch(call.graph)
        return True

    def launch(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.replay()
        except RuntimeError as problem:
            raise error(f"the CUDA graph of @{self.name} could not be launched: {problem}") from problem

    def capture_when_due(self, call: GraphedCall, inputs: Sequence[Part], outs: Sequence[Part]) -> bool:
        """Capture a call and launch its graph, if the call has been issued often enough. Return True if this was done.

        Each capture of a call quadruples the number of eager calls before the next capture of this call. So captures
        become rare if more calls take turns than an executor can keep graphs for.
        """
        if self.refusal or call.plan.eager_only:
            return False
        if call.eager < EAGER_CALLS * 4**call.captures:
            call.eager += 1
            return False
        call.eager, call.captures = 0, call.captures + 1
        call.graph = self.capture(call.plan, inputs, outs)
        if call.graph is None:
            return False
        tensors = (*inputs, *outs)
        copied = [x for i in call.plan.copied_with_peers if (x := tensors[i]) is not None]
        call.allocations = Allocations([x.data_ptr() for x in copied]) if copied else None
        if len(kept := self.kept) > MAX_GRAPHS:  # if the graph is running, CUDA frees it once it has ended
            kept[0].graph = None
            LOG.info("@%s: dropped a CUDA graph, as more than %d sets of tensors take turns", self.name, MAX_GRAPHS)
        self.launch(call.graph)
        return True

    def capture(self, plan: Capturable, inputs: Sequence[Part], outs: Sequence[Part]) -> torch.cuda.CUDAGraph | None:
        """Capture a run and return its graph. The capture executes nothing.

        If the capture fails, it warns and returns None, and this object makes no more graphs.
        """
        began = time.perf_counter()
        try:
            graph = self.record(plan, inputs, outs)
        except Exception as problem:
            what = headline(problem) if isinstance(problem, HostIRError) else f"{type(problem).__name__}: {problem}"
            self.release(f"a capture failed: {what}")
            LOG.info("@%s runs without CUDA graphs from now on: %s", self.name, self.refusal)
            if self.first():
                hint = "graphs=False makes no captures; calls without out= are never captured"
                warning = Diagnostic(
                    f"@{self.name} runs without CUDA graphs: {self.refusal}.", hint=hint, level="warning"
                )
                warn_user(warning, RuntimeWarning)
            return None
        took = (time.perf_counter() - began) * 1e3
        LOG.info("@%s: captured a CUDA graph in %.1f ms, which this call is the first to replay", self.name, took)
        return graph

    def record(self, plan: Capturable, inputs: Sequence[Part], outs: Sequence[Part]) -> torch.cuda.CUDAGraph:
        if not self.kept:  # torch refuses a pool whose graphs have all been destroyed
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Destroying another graph would break the capture.
        with torch.cuda.stream(self.side), uncollected(), capturing(graph):
            try:  # thread_local: other threads may call functions that a capture forbids
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                plan.run(inputs, outs, True)
                graph.capture_end()
            except BaseException:
                self.abort_capture(graph)
                raise
        return graph

    def abort_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture. Also make torch's allocator and its random generator leave the capture."""
        with contextlib.suppress(Exception):  # it may have ended
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # capture_end skips the allocator if CUDA refuses
            torch._C._cuda_endAllocateToPool(self.side.device_index, self.pool)
            torch._C._cuda_releasePool(self.side.device_index, self.pool)
        with contextlib.suppress(RuntimeError, IndexError):  # a clone of the state belongs to no capture
            generator = torch.cuda.default_generators[self.side.device_index]
            generator.graphsafe_set_state(generator.clone_state())

    def release(self, reason: str) -> None:
        """Drop all graphs, and make no more graphs. `reason` becomes the `refusal`."""
        self.refusal = reason
        if kept := self.kept:
            LOG.info("@%s: dropped %d CUDA graphs: %s", self.name, len(kept), reason)
        for call in kept:
            call.graph = None
