"""A block of Llama-3, forward and backward, by torch's DTensor, async TP and operators, and by hostir.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.llama_block --out benchmarks/results/llama_block
    torchrun --standalone --nproc-per-node 2 -m benchmarks.llama_block --models 70B --tokens 8192 --out /tmp/block

By default each rank has the same widths as one of 8 ranks: heads, kv heads and the hidden size of the FFN are divided
by 8, for any number of ranks. Only the tokens are divided by the number of ranks. `--of 0` divides all of them by the
number of ranks.

A step is one forward and one backward pass, issued by Python or replayed from one CUDA graph. Times are the maximum
over ranks. A *way* is one implementation of the block. Each way is compiled, timed and profiled before the next one is
compiled, so that its configuration and its compiled code stay in place. A step that compiles again while it is timed
fails. A profile of a step shows the fused operators that it runs. A way fails if it does not run the operators in its
name, or if it runs others. A way of hostir also fails if it runs fewer than 4 gathers or 4 scatters. A block has 2
gathers and 2 scatters forward, and as many backward.

`alone` is the same way on a mesh of one rank, without communication. It has this rank's part of the parameters, and all
tokens. It is timed in turn with the way. `exposed` is the time of the way minus `alone`: the communication that the way
does not hide. Host time is the time in which the host issues a step while the device is idle. Memory is the peak memory
of a step, without the parameters. The error of gradients is relative to DTensor in f32, and is printed as a multiple of
the error of DTensor in bf16. A way whose error is too large fails. Errors in fp8 are about ten times as large.

The speed of a host changes within seconds. So if the host bounds the steps, only times in turn can be compared. With
`--in-turn` all ways are kept, and at the end the steps that Python issues are timed once more, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile

import hostir.torch
from benchmarks.harness import Clock, graphed, synchronize, table, write
from examples.llama import Block, plan
from hostir.job.session import Session, session

SIZES = {"8B": (4096, 32, 8, 14336), "70B": (8192, 64, 8, 28672)}  # features, heads, kv heads, hidden
HEAD = 128
TOKENS = Shard(1)
STEPS = {"cuda": 40, "cpu": 3}  # steps before a way is timed, so that everything is compiled, and trials have ended
PATIENCE = 300.0  # seconds that a rank waits for another rank, which may be compiling
LONGEST = 300  # the most characters of the reason why a way failed
ISSUED, REPLAYED = "issued", "replayed"
IN_TURN, HOST_IN_TURN = "issued_in_turn", "host_in_turn"
FUSED = ("hostir::", "symm_mem::fused_")  # prefixes of the names of fused operators
# The collectives of a block, forward and backward together, by a part of the names of the fused operators. Forward, the
# block gathers before wq, wk, wv and before w1, w3, and scatters after wo and after w2. Backward, each gather becomes a
# scatter, and each scatter becomes a gather.
COLLECTIVES = {"all_gather": 4, "reduce_scatter": 4}
MOST_OF_BF16, MOST_OF_FP8 = 1.5, 30.0  # the largest errors, as multiples of the error of DTensor in bf16
T = TypeVar("T")
Options = Callable[[], dict[str, Any] | None]  # returns options of Inductor
OVERLAPS: Options = hostir.torch.overlap_pass.options
ASYNC_TP: Options = lambda: {"_micro_pipeline_tp": True}  # noqa: E731
HOSTIR, FLOAT8 = (
    {name.removeprefix("layers.*."): style for name, style in plan(fp8).items() if name.startswith("layers.*.")}
    for fp8 in (False, True)
)
DTENSOR = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=Replicate()),
    **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    "attention.wo": RowwiseParallel(output_layouts=TOKENS, use_local_output=False),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=Replicate()),
    **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
    "feed_forward.w2": RowwiseParallel(output_layouts=TOKENS, use_local_output=False),
}

# torch's operators have no gradients; these functions give them, as torchtitan's do. ---------------------------------


class Gathered(torch.autograd.Function):
    """Linear layers after an all-gather of their input, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        full, outputs = gathered(x, [w.t() for w in weights], group)
        ctx.save_for_backward(full, *weights)
        ctx.group = group
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        full, *weights = ctx.saved_tensors
        dy = torch.cat(dys, -1)
        dx = scattered(dy, torch.cat(weights), ctx.group)
        return dx, None, *(each.flatten(0, -2).t() @ full.flatten(0, -2) for each in dys)


class Scattered(torch.autograd.Function):
    """A linear layer before a reduce-scatter of its output, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return scattered(x, weight.t(), group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        full, (dx,) = gathered(dy, [weight], ctx.group)
        return dx, None, full.flatten(0, -2).t() @ x.flatten(0, -2)


ops = torch.ops.symm_mem
GATHER = {"cuda": ops.fused_all_gather_matmul, "cpu": symm_mem._fused_all_gather_matmul_fallback}
SCATTER = {"cuda": ops.fused_matmul_reduce_scatter, "cpu": symm_mem._fused_matmul_reduce_scatter_fallback}


def gathered(x: Tensor, bs: list[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, Sequence[Tensor]]:
    """All-gather the tokens; return them, and their products with each of `bs`. On one rank nothing is gathered."""
    if group.size() == 1:
        return x, [x @ b for b in bs]
    full, products = GATHER[x.device.type](x, bs, 1, group.group_name)
    return full, products


def scattered(x: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of the sum of `x @ b` over the ranks."""
    if group.size() == 1:
        return x @ b
    y: Tensor = SCATTER[x.device.type](x, b, "sum", 1, group.group_name)
    return y


class Operators(nn.Module):
    """A block that runs torch's fused operators on this rank's shards of the parameters."""

    def __init__(self, block: Block, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.block, self.group = block, group

    def forward(self, x: Tensor) -> Tensor:
        a, f, group = self.block.attention, self.block.feed_forward, self.group
        q, k, v = Gathered.apply(self.block.attention_norm(x), group, a.wq.weight, a.wk.weight, a.wv.weight)
        x = x + Scattered.apply(a.attended(q, k, v), group, a.wo.weight)
        gate, up = Gathered.apply(self.block.ffn_norm(x), group, f.w1.weight, f.w3.weight)
        return x + Scattered.apply(F.silu(gate) * up, group, f.w2.weight)


# Ways -----------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A block to measure.

    Fields:
        unsharded: the block with the parameters of all ranks.
        part: the sizes of one rank's part, the arguments of `Block`.
        mesh: the ranks.
        backend: the backend of torch.compile.
        x, dy: random inputs and gradients, for the tokens of all ranks.
    """

    unsharded: Block
    part: tuple[int, int, int, int, int]
    mesh: DeviceMesh
    backend: str
    x: Tensor
    dy: Tensor

    def mine(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor of all tokens."""
        return x.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()].contiguous()

    def parallel(self, plan: Any, dtype: torch.dtype | None = None) -> nn.Module:
        """Return a copy of the block, parallelized by a plan."""
        return parallelize_module(copy.deepcopy(self.unsharded).to(dtype), self.mesh, plan)

    def compiled(self, plan: Any, options: Options = lambda: None) -> nn.Module:
        """Return a copy of the block, parallelized by a plan, and compiled with options of Inductor."""
        module = self.parallel(plan)
        compile_in_place(module, self.backend, options)
        return module

    def plain(self) -> Block:
        """Return a block with this rank's shards as plain parameters."""
        parts = {name: as_local(value) for name, value in self.parallel(DTENSOR).state_dict().items()}
        block = Block(*self.part).to(self.x.device, self.x.dtype)
        block.load_state_dict(parts)
        return block


def compile_in_place(module: nn.Module, backend: str, options: Options) -> None:
    """Compile a module for the shapes of its calls. `options` are for Inductor; other backends get no options.

    Options also reach the backward graph. On torch 2.13 `inductor.patch` does not, as another thread compiles it.
    """
    module.compile(backend=backend, dynamic=False, options=options() if backend == "inductor" else None)


def overlap_pass(case: Case) -> contextlib.AbstractContextManager[Any]:
    """Configure hostir's pass for a backend that takes no options, but reads the configuration of Inductor.

    Tests have such a backend. Inductor itself gets the pass in the options of `torch.compile`.
    """
    if case.backend == "inductor":
        return contextlib.nullcontext()
    return inductor.patch(post_grad_custom_post_pass=hostir.torch.overlap_pass)


def as_local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@contextlib.contextmanager
def async_tp(case: Case) -> Iterator[None]:
    """Enable torch's async TP: set its flag, and make the deprecated call that it still needs."""
    if case.x.device.type != "cuda":
        raise RuntimeError("async TP is for CUDA")
    with warnings.catch_warnings(), inductor.patch(_micro_pipeline_tp=True):
        warnings.simplefilter("ignore", FutureWarning)
        symm_mem.enable_symm_mem_for_group(case.mesh.get_group().group_name)
        yield


@dataclass(frozen=True)
class Way:
    """One implementation of a block.

    Fields:
        make: makes the block.
        configuration: returns the configuration under which it is compiled and run.
        dtensors: True if its activations are DTensors.
        runs: the prefix of the names of the fused operators that it runs; empty if it runs none.
        most: the largest error that is accepted, as a multiple of the error of DTensor in bf16.
        options: returns the options of Inductor with which it is compiled.
        cuda: True if it cannot run on CPUs.
    """

    make: Callable[[Case], nn.Module]
    configuration: Callable[[Case], contextlib.AbstractContextManager[Any]] = lambda case: contextlib.nullcontext()
    dtensors: bool = False
    runs: str = ""
    most: float = MOST_OF_BF16
    options: Options = lambda: None
    cuda: bool = False

    def check(self, operators: Counter[str], blocks: int = 0) -> None:
        """Raise unless the operators that a step has run are the operators of this way.

        Args:
            blocks: the number of blocks. A way of hostir must run at least COLLECTIVES for each block, so that a step
                is refused if only its forward pass is fused. torch's async TP may leave collectives unfused.
        """
        others = [name for name in operators if not (self.runs and name.startswith(self.runs))]
        if others:
            raise RuntimeError(f"the step that was timed ran {', '.join(others)}, which is not of this way")
        if self.runs and not operators:
            raise RuntimeError(f"the step that was timed ran no operator '{self.runs}...'")
        for kind, of_a_block in COLLECTIVES.items() if self.runs == HOSTIRS else ():
            ran = sum(n for name, n in operators.items() if kind in name)
            if ran < blocks * of_a_block:
                raise RuntimeError(f"the step that was timed ran {ran} fused {kind}, not {blocks * of_a_block}")


HOSTIRS, TORCHS = FUSED
WAYS = {
    "DTensor eager": Way(lambda case: case.parallel(DTENSOR), dtensors=True),
    "DTensor compiled": Way(lambda case: case.compiled(DTENSOR), dtensors=True),
    "DTensor compiled, async TP": Way(
        lambda case: case.compiled(DTENSOR, ASYNC_TP), async_tp, True, runs=TORCHS, options=ASYNC_TP, cuda=True
    ),
    "DTensor compiled, hostir's pass": Way(
        lambda case: case.compiled(DTENSOR, OVERLAPS), overlap_pass, True, runs=HOSTIRS, options=OVERLAPS
    ),
    "torch's operators": Way(lambda case: Operators(case.plain(), case.mesh.get_group()), runs=TORCHS),
    "hostir eager": Way(lambda case: case.parallel(HOSTIR), runs=HOSTIRS),
    "hostir compiled": Way(lambda case: case.compiled(HOSTIR), runs=HOSTIRS),
    "hostir eager, fp8": Way(lambda case: case.parallel(FLOAT8), runs=HOSTIRS, most=MOST_OF_FP8),
    "hostir compiled, fp8": Way(lambda case: case.compiled(FLOAT8), runs=HOSTIRS, most=MOST_OF_FP8),
}


class Step:
    """Forward and backward of a module on this rank's tokens."""

    def __init__(self, case: Case, module: nn.Module, dtensors: bool) -> None:
        self.module, self.dtensors, self.mesh = module, dtensors, case.mesh
        x, self.dy = case.mine(case.x), case.mine(case.dy)
        self.x = x.clone().to(next(module.parameters()).dtype).requires_grad_()

    def __call__(self) -> None:
        self.x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None
        x = DTensor.from_local(self.x, self.mesh, [TOKENS], run_check=False) if self.dtensors else self.x
        y = as_local(self.module(x))
        y.backward(self.dy.to(y.dtype))

    def gradients(self) -> Tensor:
        """Return the gradients of the input and of the sharded matrices, flattened and concatenated."""
        matrices = [as_local(p.grad) for p in self.module.parameters() if p.ndim == 2]
        return torch.cat([self.x.grad.flatten(), *(each.flatten() for each in matrices)]).float()

    def peak(self) -> int:
        """Return the peak memory of a step in bytes."""
        for each in (self.x, *self.module.parameters()):
            each.grad = None
        if self.x.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def operators_of(step: Callable[[], Any], device: torch.device) -> Counter[str]:
    """Profile a step; return its fused operators with their counts."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as watched:
        step()
        synchronize(device)
    return Counter(event.name for event in watched.events() if event.name.startswith(FUSED))


def listed(operators: dict[str, int]) -> str:
    """Return fused operators with their counts as a text."""
    ran = (f"{n} {operator.partition('::')[2]}" for operator, n in sorted(operators.items()))
    return ", ".join(ran) or "none"


# Measuring ------------------------------------------------------------------------------------------------------------


class FailedError(Exception):
    """Raised on all ranks if a way failed, with the first failing rank and its reason."""


@dataclass
class Bench:
    """Measures cases on all ranks in step, and saves the results after each way.

    Fields:
        joined: the job.
        options: the command line.
        clock: times the steps.
        rows: the results, one for each case.
    """

    joined: Session
    options: argparse.Namespace
    clock: Clock
    rows: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def alone(self) -> DeviceMesh:
        """Mesh of this rank only."""
        shape = (self.joined.size, 1)
        return init_device_mesh(self.options.device, shape, mesh_dim_names=("others", "alone"))["alone"]

    def attempt(self, step: str, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raise FailedError on every rank if it raises on any rank."""
        result, problem = None, ""
        try:
            result = work()
            synchronize(self.joined.device)
        except Exception as raised:
            problem = f"{type(raised).__name__}: {next(iter(str(raised).strip().splitlines()), '')}"[:LONGEST]
        problems = self.joined.exchange(f"block, {step}", problem, PATIENCE)
        for rank, text in enumerate(problems):
            if text:
                raise FailedError(f"{step}: rank {rank}: {text}")
        return result  # type: ignore[return-value]  # it is None only after a problem

    def save(self) -> None:
        """Write the results so far."""
        if self.joined.rank == 0:
            write(self.options.out, "A block of Llama-3, forward and backward", report(self.rows), {"rows": self.rows})

    def measure(self, model: str, tokens: int, make: Callable[[], Case]) -> None:
        """Measure a case, one way after another."""
        ranks = self.options.of
        widths = f"widths of a rank of {ranks}" if ranks else "full widths"
        row: dict[str, Any] = {"model": model, "tokens": tokens, "widths": widths, "ways": {}, "failed": {}}
        self.rows.append(row)
        try:
            case = self.attempt(f"{model}, {tokens} tokens", make)
            true = self.attempt("gradients in f32", partial(gradients, case, torch.float32))
            base = self.attempt("gradients in bf16", lambda: off(gradients(case), true))
        except FailedError as failed:
            row["failed"]["the case"] = str(failed)
            return self.save()
        row["error_of_bf16"] = base
        kept: dict[str, Step] = {}
        for name in self.options.ways:
            way = WAYS[name]
            try:
                with contextlib.ExitStack() as configuration:  # in place while the way is timed
                    self.attempt("configuration", partial(configuration.enter_context, way.configuration(case)))
                    step = self.attempt("first steps", partial(warmed, case, way))
                    row["ways"][name] = self.figures(case, way, step, true, base)
                    kept |= {name: step} if self.options.in_turn else {}
            except FailedError as failed:
                row["failed"][name] = str(failed)
            step = None
            if not self.options.in_turn:
                forget()
            self.save()
        try:
            row[IN_TURN], row[HOST_IN_TURN] = self.attempt("in turn", partial(self.in_turn, kept)) if kept else ({}, {})
        except FailedError as failed:
            row["failed"]["in turn"] = str(failed)
        return self.save()

    def in_turn(self, steps: dict[str, Step]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the times of steps that Python issues in turn, and the host's times, in microseconds.

        Raises if a step is not of its way.
        """
        with torch.compiler.set_stance("fail_on_recompile"):
            times, host = self.clock.race(steps), self.clock.host(steps)
            for name, step in steps.items():
                WAYS[name].check(operators_of(step, self.joined.device), blocks=1)
        return times, host

    def figures(self, case: Case, way: Way, step: Step, true: Tensor, base: float) -> dict[str, Any]:
        """Return times, memory, error and operators of a way. Raise FailedError if result or operators are wrong."""
        self.attempt("gradients", lambda: exact_enough(off(step.gradients(), true), way.most * base))
        error, peak = off(step.gradients(), true), step.peak()
        works: dict[tuple[str, str], Callable[[], Any]] = {("step", ISSUED): step}
        lacking = {}
        if self.options.alone:
            try:
                alone = self.attempt("a case alone", lambda: replace(case, unsharded=case.plain(), mesh=self.alone))
                works["alone", ISSUED] = self.attempt("alone", partial(warmed, alone, way))
            except FailedError as failed:
                lacking["alone"] = str(failed)
        for (name, _), work in [*works.items()] if self.joined.device.type == "cuda" else []:
            try:
                works[name, REPLAYED] = self.attempt(f"graph of {name}", partial(graphed, work))
            except FailedError as failed:
                lacking[f"{name}, {REPLAYED}"] = str(failed)
        with torch.compiler.set_stance("fail_on_recompile"):
            times = self.attempt("timed", partial(self.clock.race, works))
            host = self.attempt("timed on the host", partial(self.clock.host, {"": step}))[""]
            operators = self.attempt("profiled", partial(operators_of, step, self.joined.device))
        self.attempt("operators", partial(way.check, operators, blocks=1))
        figures: dict[str, Any] = {"host_us": host, "bytes": peak, "error": error, "operators": dict(operators)}
        for mode in (ISSUED, REPLAYED):
            figures[mode] = {name: times[name, mode] for name in ("step", "alone") if (name, mode) in times}
        return figures | {"lacking": lacking}


def cases(options: argparse.Namespace, mesh: DeviceMesh) -> Iterator[tuple[str, int, Callable[[], Case]]]:
    """Yield each model and number of tokens, with a function that returns the case."""
    for model, tokens in ((model, int(n)) for model in options.models.split(",") for n in options.tokens.split(",")):
        yield model, tokens, partial(case_of, options, mesh, model, tokens)


def case_of(options: argparse.Namespace, mesh: DeviceMesh, model: str, tokens: int) -> Case:
    """Return the case of a model and a number of tokens."""
    ranks, device = mesh.size(), options.device
    features, heads, kv_heads, hidden = SIZES[model]
    head, shares = HEAD // options.shrink or 1, options.of or ranks
    part = (features // options.shrink, heads // shares, kv_heads // shares, hidden // shares // options.shrink)
    torch.manual_seed(0)
    unsharded = Block(part[0], *(n * ranks for n in part[1:]), head).to(device, torch.bfloat16)
    x, dy = (torch.randn(1, tokens, part[0], device=device).bfloat16() for _ in range(2))
    return Case(unsharded, (*part, head), mesh, options.backend, x, dy)


def warmed(case: Case, way: Way) -> Step:
    """Run a way until everything is compiled; return its step. Raise if torch.compile broke a block of hostir's."""
    hostir.torch.report(clear=True)
    counters.clear()
    step = Step(case, way.make(case), way.dtensors)
    for _ in range(STEPS[case.x.device.type]):
        step()
        synchronize(case.x.device)
    if (breaks := counters["graph_break"]) and way.runs.startswith("hostir"):
        raise RuntimeError(f"torch.compile broke the graph: {next(iter(breaks))}")
    return step


def gradients(case: Case, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the gradients that DTensor computes in `dtype`."""
    step = Step(case, case.parallel(DTENSOR, dtype=dtype), True)
    step()
    return step.gradients()


def off(result: Tensor, true: Tensor) -> float:
    """Return the error of gradients, relative to the norm of the true gradients."""
    return float((result - true).norm() / true.norm())


def exact_enough(error: float, most: float) -> None:
    """Raise if an error of gradients is too large or NaN."""
    if not error <= most:
        raise RuntimeError(f"WRONG: gradients are off by {error:.2e}, and may be by {most:.2e}")


def forget() -> None:
    """Free the compiled code, graphs and memory of the last way."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def exposed(way: dict[str, Any], mode: str) -> float | None:
    """Return the microseconds of communication that a way does not hide in a mode; None if a time is missing."""
    times = way[mode]
    return times["step"] - times["alone"] if times.keys() >= {"step", "alone"} else None


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table for each model and number of tokens."""
    headers = [
        "way",
        *(f"{column}, {mode}" for mode in (ISSUED, REPLAYED) for column in ("step us", "alone", "exposed")),
    ]
    turned = [each for each in (IN_TURN, HOST_IN_TURN) if any(row.get(each) for row in rows)]
    headers += ["host us", *(each.replace("_", " ") + ", us" for each in turned)]
    headers += ["peak MiB", "error", "fused operators of a step"]
    texts = []
    for row in rows:
        lines = []
        for name, way in row["ways"].items():
            times = [
                time
                for mode in (ISSUED, REPLAYED)
                for time in (way[mode].get("step"), way[mode].get("alone"), exposed(way, mode))
            ]
            line = [name, *("-" if time is None else f"{time:.0f}" for time in times)]
            line += [
                f"{way['host_us']:.0f}",
                *(f"{row[each][name]:.0f}" if name in row.get(each, {}) else "-" for each in turned),
                f"{way['bytes'] / 2**20:.0f}",
                f"{way['error'] / row['error_of_bf16']:.2f}",
            ]
            lines.append([*line, listed(way["operators"])])
        texts.append(f"## {row['model']}, {row['tokens']} tokens, {row['widths']}")
        texts += [table(headers, lines)] if lines else []
        wrong = row["failed"] | {
            f"{name}, {figure}": why for name, way in row["ways"].items() for figure, why in way["lacking"].items()
        }
        texts += ["Failed:\n\n" + "\n".join(f"- {name}: {why}" for name, why in wrong.items())] if wrong else []
    return "\n\n".join(texts)


def _ways(text: str) -> list[str]:
    """Return the names of ways in an argument, separated by semicolons. Raise ArgumentTypeError for an unknown name."""
    names = [name.strip() for name in text.split(";")]
    if unknown := [name for name in names if name not in WAYS]:
        raise argparse.ArgumentTypeError(f"there is no way '{unknown[0]}': expected {'; '.join(WAYS)}")
    return names


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="without ending; .json and .md are written")
    parser.add_argument("--models", default="70B,8B")
    parser.add_argument("--tokens", default="8192,2048,16384", help="tokens of all ranks together")
    parser.add_argument("--of", type=int, default=8, help="ranks that share the layers; 0: the ranks of the job")
    names = f"some of these, separated by semicolons: {'; '.join(WAYS)}"
    parser.add_argument("--ways", type=_ways, default=[*WAYS], help=names)
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True, help="also time each way alone")
    parser.add_argument("--in-turn", action="store_true", help="at the end, time the steps that Python issues in turn")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shrink", type=int, default=1, help="divides the widths, to try it out on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    if options.in_turn:  # all ways compile the code of the same block
        torch._dynamo.config.recompile_limit = 2 * len(WAYS)
    with session(options.device) as joined:
        if joined is None:
            sys.exit("start it with torchrun, one process a GPU")
        mesh = init_device_mesh(options.device, (joined.size,), mesh_dim_names=("tp",))
        bench = Bench(joined, options, Clock(joined.device, options.repeats))
        for model, tokens, make in cases(options, mesh):
            bench.measure(model, tokens, make)
            if joined.rank == 0:
                print(report(bench.rows[-1:]), flush=True)
            forget()
        if joined.rank == 0:
            print(hostir.torch.report())


if __name__ == "__main__":
    main()
