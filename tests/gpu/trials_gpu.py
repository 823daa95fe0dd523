"""Trials of candidates on real ranks: who wins, what captures run, and what is left of the losers.

    torchrun --standalone --nproc-per-node 2 tests/gpu/trials_gpu.py [CASE ...]

Inputs are fresh in each call, and every result is compared with an unsharded float32 reference. Without CUDA the cases
that need no graphs run on CPU processes. Each case prints a line; the exit code is 1 if a rank failed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are no installed package

import hostir as hi
import hostir.torch
from hostir.call.bounds import relative_error
from hostir.call.executor import Executor
from hostir.choice import Candidate, Timing
from hostir.choice.ranged import RangedExecutor
from hostir.choice.ranges import key
from hostir.job.session import session
from hostir.machines.cuda.machine import CudaPlan

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
DTYPE, NAME = (torch.bfloat16, "bf16") if ON_GPU else (torch.float32, "f32")
SCALE = 1 if ON_GPU else 16
K, N = 4096 // SCALE, 1792 // SCALE
ALLOWED = 0.01 if ON_GPU else 1e-4  # relative error of a matmul in `DTYPE`
CASES: dict[str, Callable[[], str]] = {}
FOR_GPUS: set[str] = set()


def case(function: Callable[[], str]) -> Callable[[], str]:
    CASES[function.__name__] = function
    return function


def for_gpus(function: Callable[[], str]) -> Callable[[], str]:
    FOR_GPUS.add(function.__name__)
    return case(function)


def gathered(m: int | str = "M", name: str = "gathered") -> hi.Fusion:
    with hi.Fusion(name) as fusion:
        a, b = hi.tensor("a", [m, K], NAME), hi.tensor("b", [K, N], NAME)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(SIZE))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


def scattered(m: int | str = "M", name: str = "scattered") -> hi.Fusion:
    with hi.Fusion(name) as fusion:
        a, b = hi.tensor("a", [m, K * SIZE], NAME), hi.tensor("b", [K * SIZE, N], NAME)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(SIZE))
    a.shard(1, mesh)
    b.shard(0, mesh)
    c.shard(0, mesh)
    return fusion


class Layer:
    """A fusion with its operands. Every call has new values, in tensors at the same addresses."""

    def __init__(self, fusion: hi.Fusion, m: int) -> None:
        self.gathers = fusion.program().name.startswith("gathered")
        rows, k = (m // SIZE, K) if self.gathers else (m, K)
        self.a = torch.empty(rows, k, dtype=DTYPE, device=DEVICE)
        self.b = torch.empty(K, N, dtype=DTYPE, device=DEVICE)
        self.c = torch.empty(m if self.gathers else m // SIZE, N, dtype=DTYPE, device=DEVICE)

    def renew(self) -> None:
        self.a.normal_()
        self.b.normal_().div_(K**0.5)
        if self.gathers:
            dist.broadcast(self.b, 0)
        self.c.fill_(float("nan"))

    def expected(self) -> torch.Tensor:
        if self.gathers:
            full = torch.empty(self.a.shape[0] * SIZE, K, dtype=DTYPE, device=DEVICE)
            dist.all_gather_into_tensor(full, self.a)
            return full.float() @ self.b.float()
        total = self.a.float() @ self.b.float()
        dist.all_reduce(total)
        return total.chunk(SIZE)[RANK]

    def check(self, c: torch.Tensor) -> None:
        error = relative_error(c.float(), self.expected())
        assert error <= ALLOWED, f"rank {RANK}: error {error}"

    def call(self, executor: Executor, *, out: bool) -> None:
        self.renew()
        (c,) = executor(self.a, self.b, out=self.c) if out else executor(self.a, self.b)
        self.check(c)


def settled(executor: Executor, layer: Layer, *, out: bool) -> str:
    """Make calls, the first of which tries the candidates; check that all ranks have the same winner. Describe it."""
    assert isinstance(executor, RangedExecutor)
    assert executor.session is not None
    begun = time.perf_counter()
    layer.call(executor, out=out)
    first = time.perf_counter() - begun
    for _ in range(6):
        layer.call(executor, out=out)
    choice = executor.choice
    texts = executor.session.exchange("winner", json.dumps([str(executor.current.program.digest), str(choice)]))
    assert len(set(texts)) == 1, texts
    executor.synchronize()
    held = executor.session.symmetric_bytes
    mine = executor.current.symmetric_bytes or 0
    assert held <= 1.01 * mine + 65536, (held, mine)
    times = "; ".join(f"{t.candidate} {t.us} us, replayed {t.graph} us" for t in choice.timings)  # type: ignore[union-attr]
    if ON_GPU:
        assert all(timing.graph for timing in choice.timings), times  # type: ignore[union-attr]
    return f"{first:.1f} s, {times}; {held} bytes held"


def tried(make: Callable[[int], hi.Fusion], m: int, *, out: bool) -> str:
    layer = Layer(make(m), m)
    executor = hi.compile(make(m), calls="out" if out else "eager", tune=2)
    return settled(executor, layer, out=out)


@case
def gathered_eager() -> str:
    return tried(gathered, 2048 // SCALE, out=False)


@case
def gathered_out() -> str:
    return tried(gathered, 8192 // SCALE, out=True)


@case
def scattered_eager() -> str:
    return tried(scattered, 2048 // SCALE, out=False)


@case
def scattered_out() -> str:
    return tried(scattered, 8192 // SCALE, out=True)


@case
def sizes_in_turn() -> str:
    """30 sizes in turn, eager: every range is tried, and every result is right."""
    executor = hi.compile(gathered(), calls="eager", tune=2)
    layers = [Layer(gathered(), SIZE * 16 * n) for n in range(1, 31)]
    for _ in range(3):
        for layer in layers:
            layer.call(executor, out=False)
    assert isinstance(executor, RangedExecutor)
    return str(executor.choice).replace("\n", ";")


def captured_call(executor: Executor, layer: Layer) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture a call on all ranks; return its graph and its result, which each replay overwrites."""
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (c,) = executor(layer.a, layer.b)
    return graph, c


def capture_and_replay(executor: Executor, layer: Layer, replays: int = 20) -> None:
    """Capture a call, and check the result of each replay, and of plain calls between them."""
    graph, c = captured_call(executor, layer)
    for number in range(replays):
        layer.renew()
        c.fill_(float("nan"))
        graph.replay()
        layer.check(c)
        if number % 2:
            layer.call(executor, out=False)


@for_gpus
def a_capture_at_the_second_call() -> str:
    """The caller captures after one call. The results of the graph, and of later calls, stay right."""
    m = 2048
    executor, layer = hi.compile(gathered(name="gathered_captured"), calls="eager", tune=2), Layer(gathered(), m)
    layer.call(executor, out=False)
    captured = executor.current.program.name  # type: ignore[attr-defined]
    capture_and_replay(executor, layer, 80)
    text = str(executor.choice).replace("\n", ";")
    torch.cuda.synchronize()
    dist.barrier()
    return f"captured @{captured}; {text}"


@for_gpus
def calls_in_graphs() -> str:
    """The caller says that it captures the calls: only replays are timed, and the one that replays fastest runs."""
    executor, layer = hi.compile(gathered(name="gathered_in_graphs"), calls="graph", tune=2), Layer(gathered(), 64)
    layer.call(executor, out=False)
    capture_and_replay(executor, layer)
    assert isinstance(executor, RangedExecutor)
    choice = executor.ranges.choice({"M": 64})
    assert choice.source == "measured"
    assert all(timing.graph is not None and abs(timing.us - timing.graph) < 0.1 for timing in choice.timings)
    torch.cuda.synchronize()
    dist.barrier()
    return str(choice)


@for_gpus
def a_capture_after_a_trial() -> str:
    """One executor tries the candidates, and one knows their times. Each is called once before the capture."""
    choices = []
    for m in (64, 64, 512, 512):
        executor, layer = hi.compile(gathered(name="replays_tried"), calls="eager", tune=2), Layer(gathered(), m)
        layer.call(executor, out=False)
        assert isinstance(executor, RangedExecutor)
        capture_and_replay(executor, layer)
        (choice,) = executor.called
        (plan,) = executor.executors[choice.taken].plans.values()
        assert (plan.for_captures is not None) == (choice.captured != choice.taken)
        choices.append(f"'{choice.taken}', in captures '{choice.captured}'")
    assert choices[:2] == choices[1::-1], choices
    torch.cuda.synchronize()
    dist.barrier()
    return "; ".join(choices[::2])


@for_gpus
def a_capture_runs_the_candidate_that_replays_faster() -> str:
    """The choice is set: captures run NCCL and cuBLAS, and other calls a kernel that pushes rows."""
    fusion, m = gathered(name="gathered_replays"), {"M": 64}
    executor, layer = hi.compile(fusion, calls="eager", tune=2), Layer(fusion, 64)
    assert isinstance(executor, RangedExecutor)
    executor.ranges.rivals = lambda sizes: ()  # type: ignore[method-assign]  # no trial
    push, plain = Candidate("push", 1, "triton"), Candidate("sequential", 1, "cublas")
    timings = Timing(push, 10.0, graph=50.0, symmetric=1), Timing(plain, 20.0, graph=30.0)
    measured = replace(executor.ranges.choice(m), taken=push, source="measured", timings=timings)
    executor.ranges.choices[key(executor.ranges.representative(m))] = measured
    for each in (layer, Layer(fusion, 80)):  # sizes of one range
        each.call(executor, out=False)  # the only call before the capture
        capture_and_replay(executor, each)
    plans = [*executor.executors[push].plans.values()]
    assert len(plans) == 2
    assert all(plan.memory is not None for plan in plans)
    assert all(isinstance(plan.for_captures, CudaPlan) and plan.for_captures.memory is None for plan in plans)
    assert not any(plan.for_captures.reports for plan in plans), "nobody would read them"
    assert not executor.executors[plain].plans
    (choice,) = executor.called
    assert choice.notes[-1].startswith("in CUDA graphs that you capture, 'sequential, cublas' runs")
    torch.cuda.synchronize()
    dist.barrier()
    return str(executor.choice).replace("\n", ";")


@for_gpus
def reduce_overhead() -> str:
    """torch.compile captures graphs after one warm-up run: 90 steps, each compared."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with hostir.torch.install(tune=2):

        @torch.compile(mode="reduce-overhead")
        def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.relu(hostir.torch.all_gather_matmul(x, w, group))

        layer = Layer(gathered(), 2048)
        with torch.no_grad():
            for _ in range(90):
                layer.renew()
                torch.compiler.cudagraph_mark_step_begin()
                result = step(layer.a, layer.b)
                error = relative_error(result.float(), torch.relu(layer.expected()))
                assert error <= ALLOWED, error
        text = str(hostir.torch.report()).replace("\n", ";")
    torch.cuda.synchronize()
    dist.barrier()
    return text


@case
def a_training_step() -> str:
    """Column- and row-parallel layers with gradients, 20 steps: operators are tried in forward and backward."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with hostir.torch.install(tune=2):
        w1 = torch.empty(K, N, dtype=DTYPE, device=DEVICE)
        w2 = torch.empty(N, K, dtype=DTYPE, device=DEVICE)
        for step in range(20):
            x = torch.randn(1024 // SCALE // SIZE * SIZE, K, dtype=DTYPE, device=DEVICE, requires_grad=True)
            for w in (w1, w2):
                w.normal_().div_(w.shape[0] ** 0.5)
            y = hostir.torch.matmul_reduce_scatter(hostir.torch.all_gather_matmul(x, w1, group), w2, group)
            y.float().square().mean().backward()
            assert x.grad is not None
            assert x.grad.isfinite().all(), step
        rows = [f"{row.operator} {row.strategy} {row.calls}" for row in hostir.torch.report()]
    return "; ".join(rows)


def main() -> None:
    warnings.simplefilter("ignore", hi.FallbackWarning)
    names = [name for name in sys.argv[1:] or CASES if ON_GPU or name not in FOR_GPUS]
    folder: list[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
    with session("cuda" if ON_GPU else "cpu"):
        dist.broadcast_object_list(folder)
        with hi.knobs.scope(cache=Path(folder[0])):
            for name in names:
                torch.manual_seed(int(time.time()) + RANK)
                text = CASES[name]()
                dist.barrier()
                if RANK == 0:
                    print(f"PASS {name}: {text}", flush=True)


if __name__ == "__main__":
    main()
