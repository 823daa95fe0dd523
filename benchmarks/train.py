"""Training of a Llama-3 stack: tokens a second, peak memory and loss, tensor-parallel in different ways.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.train --out benchmarks/results/2xH100/train
    torchrun --standalone --nproc-per-node 2 -m benchmarks.train --models 70B --tokens 8192 --layers 2
    torchrun --standalone --nproc-per-node 2 -m benchmarks.train --device cpu --shrink 64 --layers 1 --tokens 64

A step is forward, loss, backward and AdamW, of a stack whose layers have the widths of a rank of 8 (`--of`). The ways
are those of benchmarks/llama_block.py that train a complete model. All ways have the same weights, the same tokens
(drawn anew for each step from one seed), the same attention, loss and optimizer. A way runs until everything is
compiled and its candidates have been tried. Then its weights are set back, and STEPS steps are timed as Python issues
them. On GPUs, the same steps are then timed once more, each replayed from one CUDA graph. Losses must follow those of
compiled DTensor within LOSS_MARGIN. The peak of the memory is that of the steps that Python issues.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import hostir.torch
from benchmarks.generate import HEAD, VOCABULARY, Stack
from benchmarks.harness import Clock, graphed, synchronize, table, write
from benchmarks.llama_block import DTENSOR, ISSUED, REPLAYED, SIZES, WAYS, Case, forget
from benchmarks.llama_block import STEPS as WARM
from examples.llama import loss_of, plan, sequences
from hostir.job.session import Session, session

STEPS = 50
LOSS_MARGIN = 0.02  # the largest relative difference of a loss from that of the first way; fp8 has five times as much
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


@dataclass
class Run:
    """A model that is trained in one way.

    Fields:
        options: the command line.
        mesh: the ranks.
        model: the parallelized model.
        tokens: `[1, M + 1]`, the tokens of a step.
        loss: the loss of the latest step.
    """

    options: argparse.Namespace
    mesh: DeviceMesh
    model: Stack
    tokens: Tensor
    loss: Tensor

    def __post_init__(self) -> None:
        fused = self.options.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, capturable=fused)
        self.weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.begin()

    def begin(self) -> None:
        """Set weights and optimizer back, in place, and begin with the first tokens."""
        self.model.load_state_dict(self.weights)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.generator = torch.Generator().manual_seed(1)

    def draw(self) -> None:
        """Draw the tokens of the next step."""
        self.tokens.copy_(sequences(1, self.tokens.shape[1] - 1, VOCABULARY, self.generator))

    def step(self) -> None:
        """Train one step on the tokens."""
        self.optimizer.zero_grad()
        self.loss.copy_(loss_of(self.model, self.tokens))
        self.optimizer.step()

    def timed(self, step: Callable[[], None], clock: Clock) -> dict[str, Any]:
        """Train from the beginning; return the time of a step, tokens a second, and the loss of the last step."""
        self.begin()
        times = []
        for _ in range(self.options.steps):
            self.draw()
            times.append(clock.run(step))
        synchronize(clock.device)
        us = clock.slowest({"": [time_of() for time_of in times]})[""]
        return {"us": us, "tokens/s": (self.tokens.shape[1] - 1) / us * 1e6, "loss": float(self.loss)}


def run_of(options: argparse.Namespace, mesh: DeviceMesh, model: str, tokens: int, way: str) -> Run:
    """Return a model that is parallelized and compiled as a way says."""
    features, heads, kv_heads, hidden = SIZES[model]
    shares, ranks = options.of or mesh.size(), mesh.size()
    sizes = features // options.shrink, hidden // shares // options.shrink * ranks
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    counts = heads // shares * ranks, kv_heads // shares * ranks
    stack = Stack(options.layers, *sizes, *counts, HEAD // options.shrink or 1)
    stack = stack.to(options.device, dtype)
    style = DTENSOR_PLAN if WAYS[way].dtensors else plan(fp8="fp8" in way)
    parallelize_module(stack, mesh, style)
    for layer in stack.layers if "compiled" in way else ():
        layer.compile(backend=options.backend, dynamic=False)
    if "compiled" in way:  # torch 2.13 loses the gradient of a compiled layer's input while its collective runs
        stack.embedding.register_forward_hook(lambda module, inputs, x: x * 1)
    inputs = torch.empty(1, tokens + 1, dtype=torch.int64, device=options.device)
    return Run(options, mesh, stack, inputs, torch.empty((), device=options.device))


def measure(run: Run, clock: Clock) -> dict[str, Any]:
    """Warm a run up, and return the figures of its steps."""
    hostir.torch.report(clear=True)
    begun = time.perf_counter()
    for _ in range(WARM[run.options.device]):
        run.draw()
        run.step()
        synchronize(clock.device)
    warm, on_gpu = time.perf_counter() - begun, clock.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    figures = {ISSUED: run.timed(run.step, clock), "warm s": warm}
    figures["bytes"] = torch.cuda.max_memory_allocated() if on_gpu else 0
    if on_gpu:
        figures[REPLAYED] = run.timed(graphed(run.step), clock)
    return figures


def attempt(job: Session, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a way, or the reason of the first rank on which it fails."""
    figures, problem = {}, ""
    try:
        figures = work()
    except Exception as raised:
        problem = f"{type(raised).__name__}: {next(iter(str(raised).strip().splitlines()), '')}"[:300]
    failed = next(filter(None, job.exchange("train", problem, 600.0)), "")
    return {"failed": failed} if failed else figures


def measured(job: Session, options: argparse.Namespace, mesh: DeviceMesh, clock: Clock, way: str, case: Any) -> Any:
    """Return the figures of a way for a case: a model and a number of tokens."""

    def work() -> dict[str, Any]:
        with ExitStack() as configuration:
            model, tokens = case
            nothing = torch.empty(0, device=options.device)
            block = Case(None, (0,) * 5, mesh, options.backend, nothing, nothing)  # type: ignore[arg-type]
            configuration.enter_context(WAYS[way].configuration(block))
            return measure(run_of(options, mesh, model, tokens, way), clock)

    figures = attempt(job, work)
    forget()
    return figures


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line for each case and way."""
    lines = []
    for row in rows:
        base = row["ways"].get(TRAINED[0], {})
        for way, figures in row["ways"].items():
            line = [f"{row['model']}, {row['tokens']} tokens, {row['layers']} layers", way]
            if "failed" in figures:
                lines.append([*line, *["-"] * 8, figures["failed"]])
                continue
            wrong, losses = False, []
            for mode in (REPLAYED, ISSUED):
                of_base, of_way = base.get(mode, {}), figures.get(mode)
                if of_way is None:
                    line += ["-"] * 3
                    continue
                ratio = f"{of_base['us'] / of_way['us']:.2f}" if of_base else "-"
                line += [f"{of_way['us']:.0f}", f"{of_way['tokens/s']:.0f}", ratio]
                losses.append(f"{of_way['loss']:.4f}")
                margin = LOSS_MARGIN * (5 if "fp8" in way else 1)
                wrong |= bool(of_base) and not abs(of_way["loss"] / of_base["loss"] - 1) <= margin
            peak, note = f"{figures['bytes'] / 2**30:.2f}", "WRONG: its loss differs" if wrong else ""
            lines.append([*line, peak, " ".join(losses), note])
    headers = [f"{column}, {mode}" for mode in (REPLAYED, ISSUED) for column in ("step us", "tokens/s", "x DTensor")]
    return table(["case", "way", *headers, "peak GiB", "loss", "note"], lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases; print the table, and write it on rank 0 after each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["70B", "8B"])
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[8192])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--of", type=int, default=8, help="ranks that share the layers; 0: the ranks of the job")
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=[*TRAINED], help="; ".join(TRAINED))
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the benchmark")
    parser.add_argument("--shrink", type=int, default=1, help="divide the widths by this number")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with session(options.device) as job:  # without hostir.torch.install(), which would give async TP our kernels
        assert job is not None, "start it with torchrun"
        mesh = init_device_mesh(options.device, (job.size,), mesh_dim_names=("tp",))
        clock = Clock(job.device, options.steps)
        for case in ((model, tokens) for model in options.models for tokens in options.tokens):
            rows.append({"model": case[0], "tokens": case[1], "layers": options.layers, "ways": {}})
            for way in options.ways:
                rows[-1]["ways"][way] = measured(job, options, mesh, clock, way, case)
                if job.rank == 0 and options.out is not None:
                    write(options.out, "Training steps", report(rows), {"rows": rows})
        if job.rank == 0:
            print(report(rows), flush=True)


if __name__ == "__main__":
    main()
