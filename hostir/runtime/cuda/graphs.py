"""CUDA graphs of an executor: a call whose tensors lie where they lay before is one launch."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from hostir.ir.source import Diagnostic, HostIRError, error, logger
from hostir.runtime.cuda.streams import current, own_stream
from hostir.runtime.kernels.table import Again, Kernel
from hostir.runtime.unroll import AllocateOp, CollectiveOp, FreeOp, MessagesOp, SynchronizeOp, UnrolledProgram, ViewOp
from hostir.runtime.watchdog import headline

# Workspaces of cuBLAS -------------------------------------------------------------------------------------------------
# cuBLAS in CUDA graphs: no two executors' graphs share a workspace.
#
# Where the tiles of a product are few, cuBLAS divides K and adds up the parts in a workspace. torch has one workspace
# for each stream that it calls cuBLAS on, in a capture too, and a graph keeps its address. Graphs captured on one
# stream, as all are for which none is named, and replayed at once on two, would add up each other's parts [PyTorch
# 2026]. Work that is issued eagerly to the stream of a capture shares it as well.
#
# So in a capture the products of an executor go to streams that nobody else has, one for each stream of its program.
# They fork from the stream that they belong to and join it: edges, which a graph has anyway, and no nodes.
#
# - [PyTorch 2026] pytorch/pytorch issue 193402, *Multiple separate CUDA graphs recorded on the same stream implicitly
#   share memory*.


class Apart:
    """What becomes of the products that one stream of an executor gives cuBLAS.

    Args:
        device: this rank's.
        priority: of the stream, as far as is known now.
    """

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device = device
        self.fork, self.join = torch.cuda.Event(), torch.cuda.Event()
        # By priority, as a node of a graph has its stream's.
        self.streams = {priority: own_stream(self, device, priority, products=True)}

    def wrapped(self, kernel: Kernel) -> Kernel:
        """A kernel of cuBLAS that does as is said above."""

        def call(*tensors: torch.Tensor | None, **options: object) -> Again | None:
            if not torch.cuda.is_current_stream_capturing():
                return kernel(*tensors, **options)
            outside = current(self.device)
            if (inside := self.streams.get(outside.priority)) is None:
                inside = own_stream(self, self.device, outside.priority, products=True)
                self.streams[outside.priority] = inside
            self.fork.record(outside)
            self.fork.wait(inside)
            try:
                with torch.cuda.stream(inside):
                    again = kernel(*tensors, **options)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what came first is the reason
                    self.rejoin(inside, outside)
                raise
            self.rejoin(inside, outside)
            return again

        return call

    def rejoin(self, inside: torch.cuda.Stream, outside: torch.cuda.Stream) -> None:
        self.join.record(inside)
        self.join.wait(outside)


# Graphs ---------------------------------------------------------------------------------------------------------------
# CUDA graphs of an executor: a call whose tensors lie where they lay before is one launch.
#
# A call with `out=` has all its addresses from the caller. After two such calls at the same addresses the plan is
# captured, which executes nothing, and from then on its graph is launched on the caller's stream. The graph keeps none
# of the caller's tensors; whatever lies at its addresses when it is launched is what it reads and writes. Its
# workspaces come from a pool that all graphs of the executor share, and its kernels may share with eager calls what
# libraries keep for each stream; hence calls of one executor stay in order, on whatever streams they are made.
#
# Programs that communicate through NCCL are left to the caller, who can capture a call on all ranks at once. Whether a
# launch is captured must be uniform over all of its ranks, and they must replay the graphs of one common capture [NCCL
# 2025]; but where tensors lie is a rank's own affair, so ranks do not find repeated addresses in the same call.
# One-sided copies, signals and barriers are the same to a peer, captured or not.
#
# - [NCCL 2025] NVIDIA Collective Communication Library user guide, *Using NCCL with CUDA Graphs*.

LOG = logger(__name__)
EAGER = 2  # calls at the same addresses before they are captured: the first may compile, tune and connect
KEPT = 16  # graphs of an executor
SEEN = 256  # sets of addresses that it remembers
Part = torch.Tensor | None
Where = tuple[object, ...]  # a plan, and the address of each input and output


class Capturable(Protocol):
    """What graphs need of a plan."""

    @property
    def eager_only(self) -> str:
        """Why no graph may be captured of its runs; empty where one may."""

    def run(self, inputs: Sequence[Part], given: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """Issues one run, into the tensors `given`."""


def is_stale(plan: Any) -> bool:
    """Whether its symmetric memory went to other sizes."""
    return plan.memory is not None and plan.memory.gone


HOST_ONLY = (AllocateOp, FreeOp, ViewOp, SynchronizeOp)  # nothing of these is in a graph


def uniform_only(unrolled: UnrolledProgram) -> str:
    """Why a rank may not capture this by itself; empty where it may."""
    if all(isinstance(op, HOST_ONLY) for op in unrolled.ops):
        return "nothing runs with these sizes, and torch warns of an empty graph"
    op = next((op for op in unrolled.ops if isinstance(op, CollectiveOp | MessagesOp)), None)
    if op is None:
        return ""
    return f"{unrolled.describe(op)} goes through NCCL, which all ranks must capture and replay together"


class Graphs:
    """The graphs of one executor on a CUDA device; calls come from one thread at a time.

    Fields:
        first: whether this rank is the first of the job to have lost its graphs, so that one says it for all.
        refusal: why there are none any more: a capture has failed, or the session has ended; else None.
    """

    def __init__(self, device: torch.device, name: str, first: Callable[[], bool] = lambda: True) -> None:
        self.device = device
        self.name = name
        self.first = first
        self.refusal: str | None = None
        self.kept: OrderedDict[Where, torch.cuda.CUDAGraph] = OrderedDict()  # the latest used last
        self.seen: OrderedDict[Where, tuple[int, int]] = OrderedDict()  # eager calls since the last capture; captures
        self.stream: torch.cuda.Stream | None = None  # of the latest call

    @cached_property
    def side(self) -> torch.cuda.Stream:
        """The stream on which captures are made."""
        return own_stream(self, self.device, priority=0)

    @cached_property
    def pool(self) -> Any:
        """Where the workspaces of all graphs come from."""
        return torch.cuda.graph_pool_handle()

    def replay(self, where: Where) -> bool:
        """Launches the graph for these addresses; False where there is none."""
        graph = self.kept.get(where)
        if graph is None:
            return False
        self.kept.move_to_end(where)
        self.launch(graph)
        return True

    def run(self, plan: Capturable, where: Where, inputs: Sequence[Part], given: Sequence[Part]) -> None:
        """One run into `given` for which there is no graph yet: eagerly, or captured and launched."""
        graph = self.capture_when_due(plan, where, inputs, given)
        if graph is None:
            plan.run(inputs, given)
        else:
            self.launch(graph)

    def launch(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.replay()
        except RuntimeError as problem:
            raise error(f"the CUDA graph of @{self.name} could not be launched: {problem}") from problem

    def follow(self) -> None:
        """Puts the current stream behind the executor's latest call, which may have been on another."""
        now, last = current(self.device), self.stream
        if now is last:
            return
        if last is not None and now != last:
            now.wait_stream(last)
        self.stream = now

    def capture_when_due(
        self, plan: Capturable, where: Where, inputs: Sequence[Part], given: Sequence[Part]
    ) -> torch.cuda.CUDAGraph | None:
        """The new graph of a call that is eager no longer.

        A set of addresses that lost its graph must first come back four times as often: where more sets take turns than
        are kept, captures get rare instead of frequent.
        """
        if self.refusal or plan.eager_only:
            return None
        calls, captures = self.seen.pop(where, (0, 0))
        due = calls >= EAGER * 4**captures
        self.seen[where] = (0, captures + 1) if due else (calls + 1, captures)
        if len(self.seen) > SEEN:
            self.seen.popitem(last=False)
        return self.capture(plan, where, inputs, given) if due else None

    def capture(
        self, plan: Capturable, where: Where, inputs: Sequence[Part], given: Sequence[Part]
    ) -> torch.cuda.CUDAGraph | None:
        """The graph of a run that is recorded, not executed. None after a warning where that fails, once for all."""
        began = time.perf_counter()
        try:
            graph = self.record(plan, inputs, given)
        except Exception as problem:
            what = headline(problem) if isinstance(problem, HostIRError) else f"{type(problem).__name__}: {problem}"
            self.release(f"a capture failed: {what}")
            LOG.info("@%s runs without CUDA graphs from now on: %s", self.name, self.refusal)
            if self.first():
                hint = "graphs=False makes no captures; calls without out= are never captured"
                warning = Diagnostic(
                    f"@{self.name} runs without CUDA graphs: {self.refusal}.", hint=hint, level="warning"
                )
                warnings.warn(str(warning), RuntimeWarning, stacklevel=6)
            return None
        self.kept[where] = graph
        took = (time.perf_counter() - began) * 1e3
        LOG.info("@%s: captured a CUDA graph in %.1f ms, which this call is the first to replay", self.name, took)
        if len(self.kept) > KEPT:  # what is being executed goes when it has ended
            self.kept.popitem(last=False)
            LOG.info("@%s: dropped a CUDA graph, as more than %d sets of tensors take turns", self.name, KEPT)
        return graph

    def record(self, plan: Capturable, inputs: Sequence[Part], given: Sequence[Part]) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.side), _no_garbage():
            graph = torch.cuda.CUDAGraph()
            try:  # of all threads only this one is kept from what a capture forbids
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                plan.run(inputs, given)
                graph.capture_end()
            except BaseException:
                self.give_up(graph)
                raise
        return graph

    def give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a failed capture, for its streams and for what of torch else believes that it goes on."""
        with contextlib.suppress(Exception):  # it may be over
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # a capture_end that CUDA refuses does not tell the allocator
            torch._C._cuda_endAllocateToPool(self.side.device_index, self.pool)
            torch._C._cuda_releasePool(self.side.device_index, self.pool)
        with contextlib.suppress(RuntimeError, IndexError):  # a clone of the generator's state is in no capture
            generator = torch.cuda.default_generators[self.side.device_index]
            generator.graphsafe_set_state(generator.clone_state())

    def forget(self, stale: Callable[[Any], bool]) -> None:
        """Drops what there is of plans that will not run again."""
        before = len(self.kept)
        for known in (self.kept, self.seen):
            for where in [where for where in known if stale(where[0])]:
                del known[where]
        if len(self.kept) < before:
            dropped = before - len(self.kept)
            LOG.info("@%s: dropped %d CUDA graphs, whose symmetric memory made room", self.name, dropped)
        if not self.kept:
            self.__dict__.pop("pool", None)  # torch gives up a pool with its last graph

    def release(self, reason: str) -> None:
        """Drops all graphs, and makes no more."""
        self.refusal = reason
        if self.kept:
            LOG.info("@%s: dropped %d CUDA graphs: %s", self.name, len(self.kept), reason)
        self.kept.clear()
        self.seen.clear()


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Collects no garbage meanwhile: another graph among it would spoil a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
