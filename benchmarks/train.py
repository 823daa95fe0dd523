"""Training of a Llama-3 stack: tokens a second, peak memory and loss, tensor-parallel in different ways.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.train --out benchmarks/results/2xH100/train
    torchrun --standalone --nproc-per-node 2 -m benchmarks.train --models 70B --tokens 8192 --layers 2
    torchrun --standalone --nproc-per-node 4 -m benchmarks.train --dp 2
    torchrun --standalone --nproc-per-node 2 -m benchmarks.train --device cpu --shrink 64 --layers 1 --tokens 64

A step is forward, loss, backward and AdamW, of a stack whose layers have the widths of a rank of 8 (`--of`). The ways
are those of benchmarks/llama_block.py that train a complete model. All ways have the same weights, the same tokens
(drawn anew for each step from one seed), the same attention, loss and optimizer. With `--dp N` there are N replicas of
the model with different tokens, and fully_shard divides each parameter among the replicas.

A way runs until everything is compiled and its candidates have been tried. The time of its first step includes most of
the compilation. Then its weights are set back, and the gradients of the first tokens are compared with those of DTensor
eager in f32, as in benchmarks/llama_block.py. A profile of a step shows the fused operators that it runs. A way fails,
and is not timed, if its gradients are too far off, or if its operators are not those in its name.

Then STEPS steps are timed as Python issues them. On GPUs, the same steps are then timed once more, each replayed from
one CUDA graph, whose gradients are compared first. After the last step, the loss and the norm of the change of all
weights are compared with the first way's. A way is WRONG if one of them differs too much, or if its weights have not
changed. The exit code is 1 if a way is wrong or has failed. Async TP needs CUDA; without CUDA it is left out.

The peak of the memory is that of the steps that Python issues, on the rank where it is largest, without symmetric
memory. The symmetric memory is hostir's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import hostir.torch
from benchmarks.generate import HEAD, VOCABULARY, Stack
from benchmarks.harness import Clock, graphed, synchronize, table, write
from benchmarks.llama_block import (
    DTENSOR,
    HOSTIRS,
    ISSUED,
    REPLAYED,
    SIZES,
    WAYS,
    Case,
    compile_in_place,
    forget,
    listed,
    operators_of,
)
from benchmarks.llama_block import STEPS as WARM
from examples.llama import average, loss_of, plan, sequences
from hostir.job.session import Session, session

STEPS = 50
# The largest relative difference from the first way: of the last loss, and of the norm of the change of all weights. It
# may be twice as large in fp8. Losses of ways with correct gradients differ by 2 % after 50 steps in bf16.
LOSS_MARGIN, CHANGE_MARGIN = 0.05, 0.2
EXACT = 1e-5  # the error of gradients that is always accepted
EACH = 3.0  # the error of one parameter's gradient may exceed its bound for all gradients together by this factor
ALL = "all parameters"
NEEDS_CUDA = "needs CUDA"
TRAINED = (
    "DTensor compiled",
    "DTensor compiled, async TP",
    "DTensor compiled, hostir's pass",
    "hostir eager",
    "hostir compiled",
    "hostir compiled, fp8",
)
DTENSOR_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
    **{f"layers.*.{name}": style for name, style in DTENSOR.items()},
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


# The model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What all ways of a case have in common.

    Fields:
        options: the command line.
        mesh: the ranks that share a layer.
        replicas: the ranks that have the same part of each layer, in different replicas of the model; None without
            replicas.
        model: the name of the model's sizes.
        tokens: the number of tokens of each replica in a step.
    """

    options: argparse.Namespace
    mesh: DeviceMesh
    replicas: DeviceMesh | None
    model: str
    tokens: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that is trained."""
        return torch.bfloat16 if self.options.device == "cuda" else torch.float32

    def stack(self, dtype: torch.dtype, style: dict[str, Any]) -> Stack:
        """Return the model in a dtype, parallelized by a plan. Its weights are numbers of bf16."""
        options, ranks = self.options, self.mesh.size()
        features, heads, kv_heads, hidden = SIZES[self.model]
        shares = options.of or ranks
        sizes = features // options.shrink, hidden // shares // options.shrink * ranks
        counts = heads // shares * ranks, kv_heads // shares * ranks
        torch.manual_seed(0)
        with torch.device(options.device):
            stack = Stack(options.layers, *sizes, *counts, HEAD // options.shrink or 1)
        parallelize_module(stack.to(torch.bfloat16).to(dtype), self.mesh, style)
        return stack

    def draw(self, fresh: torch.Generator) -> Tensor:
        """Draw the tokens of a step, `[1, M + 1]`, for this rank's replica."""
        count, replica = (self.replicas.size(), self.replicas.get_local_rank()) if self.replicas else (1, 0)
        return sequences(count, self.tokens, VOCABULARY, fresh)[replica : replica + 1]

    def gradients(self, dtype: torch.dtype) -> nn.Module:
        """Return a model with the gradients of the first step, by DTensor eager.

        It computes each layer again in backward, as f32 needs much memory. It averages gradients without fully_shard.
        """
        stack = self.stack(dtype, DTENSOR_PLAN)
        for layer in stack.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        loss_of(stack, self.draw(torch.Generator().manual_seed(1)).to(self.options.device))
        if self.replicas:
            average(stack, self.replicas)
        return stack


@dataclass
class Run:
    """A model that is trained in one way.

    Fields:
        setting: the case.
        model: the parallelized model.
        tokens: `[1, M + 1]`, the tokens of a step.
        loss: the loss of the latest step.
    """

    setting: Setting
    model: Stack
    tokens: Tensor
    loss: Tensor

    def __post_init__(self) -> None:
        fused = self.setting.options.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, capturable=fused)
        self.weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.begin()

    def begin(self) -> None:
        """Set weights and optimizer back, in place, and draw the first tokens."""
        self.model.load_state_dict(self.weights)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.generator = torch.Generator().manual_seed(1)
        self.draw()

    def draw(self) -> None:
        """Draw the tokens of the next step."""
        self.tokens.copy_(self.setting.draw(self.generator))

    def gradients(self) -> None:
        """Compute the loss and the gradients of the tokens."""
        self.optimizer.zero_grad()
        self.loss.copy_(loss_of(self.model, self.tokens))

    def step(self) -> None:
        """Train one step on the tokens."""
        self.gradients()
        self.optimizer.step()

    def timed(self, step: Callable[[], None], clock: Clock) -> dict[str, Any]:
        """Train from the beginning. Return the time of a step, tokens a second, the last loss, and the change.

        The change is the norm of the change of all weights.
        """
        self.begin()
        times = []
        for number in range(self.setting.options.steps):
            if number:
                self.draw()
            times.append(clock.run(step))
        synchronize(clock.device)
        us, loss, replicas = clock.slowest({"": [time_of() for time_of in times]})[""], self.loss.clone(), 1
        if mesh := self.setting.replicas:
            replicas = mesh.size()
            dist.all_reduce(loss, group=mesh.get_group())
        rate = replicas * self.setting.tokens / us * 1e6
        return {"us": us, "tokens/s": rate, "loss": float(loss) / replicas, "change": self.change()}

    def change(self) -> float:
        """Return the norm of the change of all weights since the beginning."""
        parts = ((part(value) - part(self.weights[name])).norm() for name, value in self.model.state_dict().items())
        return float(added((x.square() for x in parts), self.setting.options.device).sum().sqrt())


def run_of(setting: Setting, way: str) -> Run:
    """Return a model that is parallelized and compiled as a way says."""
    options, compiled = setting.options, "compiled" in way
    stack = setting.stack(setting.dtype, DTENSOR_PLAN if WAYS[way].dtensors else plan(fp8="fp8" in way))
    if setting.replicas:
        for layer in stack.layers:
            fully_shard(layer, mesh=setting.replicas)
        fully_shard(stack, mesh=setting.replicas)
    for layer in stack.layers if compiled else ():
        compile_in_place(layer, options.backend, WAYS[way].options)
    if compiled:  # torch 2.13 loses the gradient of a compiled layer's input while its collective runs
        stack.embedding.register_forward_hook(lambda module, inputs, x: x * 1)
    inputs = torch.empty(1, setting.tokens + 1, dtype=torch.int64, device=options.device)
    return Run(setting, stack, inputs, torch.empty((), device=options.device))


# The gradients --------------------------------------------------------------------------------------------------------


def part(x: Tensor) -> Tensor:
    """Return this rank's part of the elements of a full tensor, in f32 on the host. Parts are equal for all layouts."""
    full = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().flatten().tensor_split(dist.get_world_size())[dist.get_rank()].float().cpu()


def added(numbers: Iterable[Tensor], device: str) -> Tensor:
    """Return the sum over all ranks of each of some numbers, in f64. It is computed on a device."""
    sums = torch.stack([*numbers]).double().to(device)
    dist.all_reduce(sums)
    return sums.cpu()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parts of the gradients, by the names of the parameters."""
    lacking = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if lacking:
        raise RuntimeError(f"WRONG: {', '.join(lacking)} has no gradient")
    return {name: part(parameter.grad) for name, parameter in model.named_parameters()}


class Reference:
    """The gradients of the first step of a case, by DTensor eager in f32, and the errors of DTensor in bf16.

    Fields:
        true: this rank's parts of the gradients, by the names of the parameters.
        of_bf16: the errors of DTensor in bf16, by the names of the parameters.
    """

    def __init__(self, setting: Setting) -> None:
        self.half, self.device = setting.dtype == torch.bfloat16, setting.options.device
        self.true = gradients_of(setting.gradients(torch.float32))
        self.of_bf16 = self.errors(setting.gradients(torch.bfloat16))

    def errors(self, model: nn.Module) -> dict[str, float]:
        """Return the relative error of each gradient of a model, and of all gradients together."""
        gradients = gradients_of(model)
        if gradients.keys() != self.true.keys():
            raise RuntimeError(f"WRONG: the parameters are {', '.join(gradients)}")
        squares = [
            torch.stack([(gradients[name] - true).norm(), true.norm()]).square() for name, true in self.true.items()
        ]
        sums = added(squares, self.device)
        pairs = zip([*self.true, ALL], [*sums, sums.sum(0)], strict=True)
        return {name: float((off / size).sqrt()) for name, (off, size) in pairs}

    def check(self, model: nn.Module, way: str) -> float:
        """Return the error of all gradients of a model. Raise if it, or the error of one gradient, is too large."""
        errors = self.errors(model)
        for name in sorted(errors, key=lambda name: name != ALL):
            of_bf16 = WAYS[way].most * self.of_bf16[name] if self.half or "fp8" in way else 0.0
            most = max(of_bf16, EXACT) * (1 if name == ALL else EACH)
            if not errors[name] <= most:  # also true for NaN
                raise RuntimeError(
                    f"WRONG: the gradients of {name} are off by {errors[name]:.2e}, and may be by {most:.2e}"
                )
        return errors[ALL]


# Measuring ------------------------------------------------------------------------------------------------------------


def issued(run: Run, clock: Clock, way: str, reference: Reference) -> dict[str, Any]:
    """Warm a run up and check it. Return the figures of the steps that Python issues."""
    hostir.torch.report(clear=True)
    spans = []
    for number in range(WARM[run.setting.options.device]):
        begun = time.perf_counter()
        if number:
            run.draw()
        run.step()
        synchronize(clock.device)
        spans.append(time.perf_counter() - begun)
    figures: dict[str, Any] = {"first step s": spans[0], "warm s": sum(spans)}
    run.begin()
    run.gradients()
    figures["error"] = reference.check(run.model, way)
    figures["operators"] = dict(operators := operators_of(run.step, clock.device))
    WAYS[way].check(operators, blocks=run.setting.options.layers)
    on_gpu = clock.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with torch.compiler.set_stance("fail_on_recompile"):
        figures[ISSUED] = run.timed(run.step, clock)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else 0, device=clock.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    figures["bytes"] = int(peak)
    if WAYS[way].runs == HOSTIRS:
        figures["symmetric bytes"] = sum(hostir.torch.report().symmetric_bytes.values())
    return figures


def replayed(run: Run, clock: Clock, way: str, reference: Reference) -> dict[str, Any]:
    """Capture a step in a CUDA graph and check it. Return the figures of the steps that the graph replays."""
    with torch.compiler.set_stance("fail_on_recompile"):
        replay = graphed(run.step)
    run.begin()
    replay()
    error = reference.check(
        run.model, way
    )  # the graph writes the gradients that its capture has left in the parameters
    return {**run.timed(replay, clock), "error": error}


def attempt(job: Session, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of some work, or the reason of the first rank on which it fails."""
    figures, problem = {}, ""
    try:
        figures = work()
    except Exception as raised:
        problem = f"{type(raised).__name__}: {next(iter(str(raised).strip().splitlines()), '')}"[:300]
    failed = next(filter(None, job.exchange("train", problem, 600.0)), "")
    return {"failed": failed} if failed else figures


def measured(job: Session, setting: Setting, clock: Clock, way: str, reference: Reference) -> dict[str, Any]:
    """Return the figures of a way for a case."""
    if WAYS[way].cuda and setting.options.device != "cuda":
        return {"failed": NEEDS_CUDA}
    runs: list[Run] = []
    with ExitStack() as configuration:

        def first() -> dict[str, Any]:
            nothing = torch.empty(0, device=setting.options.device)
            block = Case(None, (0,) * 5, setting.mesh, setting.options.backend, nothing, nothing)  # type: ignore[arg-type]
            configuration.enter_context(WAYS[way].configuration(block))
            runs.append(run_of(setting, way))
            return issued(runs[0], clock, way, reference)

        figures = attempt(job, first)
        if "failed" not in figures and clock.device.type == "cuda":
            more = attempt(job, partial(replayed, runs[0], clock, way, reference))
            figures |= {"lacking": f"{REPLAYED}: {more['failed']}"} if "failed" in more else {REPLAYED: more}
    runs.clear()
    forget()
    return figures


def measured_case(job: Session, setting: Setting, clock: Clock, row: dict[str, Any], save: Callable[[], None]) -> None:
    """Measure all ways of a case, and add them to its row."""
    references: list[Reference] = []
    failed = attempt(job, lambda: references.append(Reference(setting)) or {})
    forget()
    for way in setting.options.ways:
        if failed:
            row["ways"][way] = {"failed": f"no gradients to compare with: {failed['failed']}"}
        else:
            row["ways"][way] = measured(job, setting, clock, way, references[0])
        save()


# Results --------------------------------------------------------------------------------------------------------------


def first_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the first way of a row that was measured; empty if there is no such way."""
    return next((figures for figures in row["ways"].values() if "failed" not in figures), {})


def problem(row: dict[str, Any], way: str) -> str:
    """Return what is wrong with a way, or an empty text."""
    base, figures = first_of(row), row["ways"][way]
    if "failed" in figures:
        return figures["failed"]
    problems = [figures["lacking"]] if "lacking" in figures else []
    wider = 2 if "fp8" in way else 1
    for mode in (mode for mode in (REPLAYED, ISSUED) if mode in figures):
        result, expected = figures[mode], base.get(mode, figures[mode])
        if not result["change"] > 0:
            problems.append(f"WRONG: {mode}, no weight has changed")
            continue
        for what, margin in (("loss", LOSS_MARGIN), ("change", CHANGE_MARGIN)):
            if not abs(result[what] - expected[what]) <= margin * wider * abs(expected[what]):
                name = "loss" if what == "loss" else "change of the weights"
                problems.append(f"WRONG: {mode}, its {name} is {result[what]:.4f}, not {expected[what]:.4f}")
    return "; ".join(problems)


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line for each case and way."""
    lines = []
    for row in rows:
        base = first_of(row)
        for way, figures in row["ways"].items():
            replicas = f", {row['dp']} replicas" if row["dp"] > 1 else ""
            line = [f"{row['model']}, {row['tokens']} tokens, {row['layers']} layers{replicas}", way]
            if "failed" in figures:
                lines.append([*line, *["-"] * (len(HEADERS) - 3), figures["failed"]])
                continue
            results = [figures.get(mode) for mode in (REPLAYED, ISSUED)]
            for mode, result in zip((REPLAYED, ISSUED), results, strict=True):
                if result is None:
                    line += ["-"] * 3
                    continue
                ratio = f"{base[mode]['us'] / result['us']:.2f}" if mode in base else "-"
                line += [f"{result['us']:.0f}", f"{result['tokens/s']:.0f}", ratio]
            symmetric = figures.get("symmetric bytes")
            line += [
                f"{figures['first step s']:.1f}",
                f"{figures['bytes'] / 2**30:.2f}",
                "-" if symmetric is None else f"{symmetric / 2**20:.0f}",
                f"{figures['error']:.1e}",
                " ".join(f"{result['loss']:.4f}" for result in results if result),
                " ".join(f"{result['change']:.3g}" for result in results if result),
            ]
            lines.append([*line, listed(figures["operators"]), problem(row, way)])
    return table(HEADERS, lines)


HEADERS = [
    *("case", "way"),
    *(f"{column}, {mode}" for mode in (REPLAYED, ISSUED) for column in ("step us", "tokens/s", "x first way")),
    *("first step s", "peak GiB", "symmetric MiB", "error of gradients", "loss", "change of weights"),
    *("fused operators of a step", "note"),
]


def main(arguments: list[str] | None = None) -> int:
    """Measure all cases; print the table, and write it on rank 0 after each way. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["70B", "8B"])
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[8192])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--of", type=int, default=8, help="ranks that share the layers; 0: the ranks of a replica")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the model, whose parameters fully_shard divides")
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=[*TRAINED], help="; ".join(TRAINED))
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the benchmark")
    parser.add_argument("--shrink", type=int, default=1, help="divide the widths by this number")
    options = parser.parse_args(arguments)
    if unknown := [way for way in options.ways if way not in WAYS or way == "torch's operators"]:
        parser.error(f"there is no way '{unknown[0]}': expected {'; '.join(TRAINED)}; DTensor eager; hostir eager, fp8")
    rows: list[dict[str, Any]] = []
    with session(options.device) as job:  # without hostir.torch.install(), which would give async TP our kernels
        assert job is not None, "start it with torchrun"
        if job.size % options.dp:
            parser.error(f"{options.dp} replicas do not divide {job.size} ranks")
        mesh, replicas = meshes(options.device, job.size, options.dp)
        clock = Clock(job.device, options.steps)

        def save() -> None:
            if job.rank == 0 and options.out is not None:
                write(options.out, "Training steps", report(rows), {"rows": rows})

        for model, tokens in ((model, tokens) for model in options.models for tokens in options.tokens):
            rows.append({"model": model, "tokens": tokens, "layers": options.layers, "dp": options.dp, "ways": {}})
            measured_case(job, Setting(options, mesh, replicas, model, tokens), clock, rows[-1], save)
        if job.rank == 0:
            print(report(rows), flush=True)
    problems = (problem(row, way) for row in rows for way in row["ways"])
    return int(any(text not in ("", NEEDS_CUDA) for text in problems))


def meshes(device: str, ranks: int, replicas: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of the ranks that share a layer, and the mesh of the replicas, if there are several."""
    if replicas == 1:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("tp",)), None
    mesh = init_device_mesh(device, (replicas, ranks // replicas), mesh_dim_names=("dp", "tp"))
    return mesh["tp"], mesh["dp"]


if __name__ == "__main__":
    sys.exit(main())
