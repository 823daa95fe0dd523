"""Prefill and decoding with a key-value cache: tokens a second of a Llama-3 stack, tensor-parallel in different ways.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.generate --out benchmarks/results/2xH100/generate
    torchrun --standalone --nproc-per-node 2 -m benchmarks.generate --models 70B --batches 1,64 --layers 16
    torchrun --standalone --nproc-per-node 2 -m benchmarks.generate --device cpu --shrink 32 --layers 1 --context 32

A case is a model and a batch size. Its layers have the widths of Llama 3 8B or 70B that one of 8 ranks has, on each
rank. A step decodes one token for each sequence of the batch. All ways have the same weights and the same cache, and
run the model of examples/generate.py. On GPUs a step is one CUDA graph; it is also timed as Python issues it. The
ways differ only in the all-reduce behind `wo` and `w2`:

    NCCL        torch's ColwiseParallel and RowwiseParallel
    two-shot    torch.matmul into symmetric memory, and torch's two-shot all-reduce
    hostir      ColwiseParallel and RowwiseParallel of hostir.torch, after the trial of their candidates

Before it is timed, each way prefills a prompt of random tokens and decodes a few steps. Then its logits are compared
with those of the unsharded model in float32. A way with an error of more than MARGIN times NCCL's error is left out.

Prefill is timed on the same prompt, as Python issues it. It also computes the first new token. Peak memory is measured
during one prefill and one step, and is the largest of all ranks. It includes weights, cache and activations. It does
not include the memory of CUDA graphs, or symmetric memory. The table also has the symmetric memory that hostir holds in
this case, which may come from earlier cases.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

import hostir.torch
from benchmarks.harness import Clock, graphed, synchronize, table, write
from examples.generate import Generator
from examples.llama import Block, Llama, RMSNorm
from hostir.job.session import Session, session
from hostir.torch import ColwiseParallel, RowwiseParallel

# Widths of a rank of 8: features, and for each rank the hidden columns, the heads and the key-value heads.
MODELS = {"8B": (4096, 1792, 4, 1), "70B": (8192, 3584, 8, 1)}
HEAD, VOCABULARY = 128, 1024
BATCHES = (1, 8, 64)
STEPS = 4  # steps whose logits are compared
PREFILLS = 5  # prefills whose times are taken: they take much longer than steps
TRIALS = 40  # calls of a layer's operators after which the trial of their candidates has ended
MARGIN = 1.2  # the largest error of a way, as a multiple of NCCL's
Plan = dict[str, ParallelStyle]


class Stack(Llama):
    """A Llama-3 stack whose heads have the size `head`, whatever the number of heads is."""

    def __init__(self, layers: int, features: int, hidden: int, heads: int, kv_heads: int, head: int = HEAD) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(VOCABULARY, features)
        self.layers = nn.ModuleList(Block(features, heads, kv_heads, hidden, head) for _ in range(layers))
        self.norm, self.output = RMSNorm(features), nn.Linear(features, VOCABULARY, bias=False)


def plan_of(colwise: Callable[..., ParallelStyle], rowwise: Callable[..., ParallelStyle]) -> Plan:
    """Return a plan with these styles for the layers. All ranks have all activations."""
    together = colwise is ColwiseParallel  # a style of hostir's is for several linear layers with one input
    return {
        **({"layers.*.attention": colwise("wq", "wk", "wv")} if together else {}),
        **({} if together else {f"layers.*.attention.{name}": colwise() for name in ("wq", "wk", "wv")}),
        "layers.*.attention.wo": rowwise(),
        **({"layers.*.feed_forward": colwise("w1", "w3")} if together else {}),
        **({} if together else {f"layers.*.feed_forward.{name}": colwise() for name in ("w1", "w3")}),
        "layers.*.feed_forward.w2": rowwise(),
        "output": TorchColwise(output_layouts=Replicate()),
    }


class TwoShotLinear(nn.Module):
    """A row-parallel linear layer: a matmul into symmetric memory, then torch's two-shot all-reduce in place."""

    spaces: ClassVar[dict[tuple[int, ...], Tensor]] = {}  # by shape; layers use a space one after another

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:-1].numel(), self.weight.shape[0]
        if shape not in self.spaces:
            space = symm_mem.empty(*shape, dtype=x.dtype, device=x.device)
            symm_mem.rendezvous(space, dist.group.WORLD)
            self.spaces[shape] = space
        part = torch.matmul(x.flatten(0, -2), self.weight.t(), out=self.spaces[shape])
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", dist.group.WORLD.group_name)
        return part.view(*x.shape[:-1], -1)


def by_nccl(model: Stack, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, plan_of(TorchColwise, TorchRowwise))


def by_two_shot(model: Stack, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, plan_of(TorchColwise, TorchRowwise))
    for layer in model.layers:
        layer.attention.wo = TwoShotLinear(layer.attention.wo.weight.to_local())
        layer.feed_forward.w2 = TwoShotLinear(layer.feed_forward.w2.weight.to_local())


def by_hostir(model: Stack, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, plan_of(ColwiseParallel, RowwiseParallel))


WAYS = {"NCCL": by_nccl, "two-shot": by_two_shot, "hostir": by_hostir}


class Case:
    """A model and a batch size on all ranks. Every way gets a model with the same weights."""

    def __init__(self, job: Session, options: argparse.Namespace, model: str, batch: int) -> None:
        self.job, self.options, self.model, self.batch = job, options, model, batch
        features, *of_rank = (max(n // options.shrink, 1) for n in MODELS[model])
        hidden, heads, kv_heads = (n * job.size for n in of_rank)
        self.sizes = options.layers, features, hidden, heads, kv_heads
        self.mesh = init_device_mesh(job.device.type, (job.size,))
        self.longest = options.context + 512
        self.dtype = torch.bfloat16 if job.device.type == "cuda" else torch.float32
        draw = torch.Generator().manual_seed(batch)
        self.prompt = torch.randint(VOCABULARY, (batch, options.context), generator=draw).to(job.device)

    def stack(self) -> Stack:
        """Return the unsharded model."""
        torch.manual_seed(0)
        return Stack(*self.sizes).to(self.job.device, self.dtype)

    def generator(self, way: str) -> Generator:
        """Return a generator whose model is parallelized in a way."""
        model = self.stack()
        WAYS[way](model, self.mesh)
        return Generator(model, self.batch, self.longest, self.job.size)

    def reference(self) -> list[Tensor]:
        """Return the logits of STEPS steps by the unsharded model in float32."""
        return self.logits(Generator(self.stack().float(), self.batch, self.longest, 1), None)

    def logits(self, generator: Generator, tokens: list[Tensor] | None) -> list[Tensor]:
        """Return the logits of STEPS steps. `tokens` are the tokens to decode; by default the most likely ones."""
        generator.prefill(self.prompt)
        logits = []
        for number in range(STEPS):
            logits.append(generator.logits.float().clone())
            if tokens is not None:
                generator.tokens.copy_(tokens[number].argmax(-1, keepdim=True))
            generator.step()
        return logits

    def error(self, generator: Generator, exact: list[Tensor]) -> float:
        """Return the relative error of a generator's logits, the largest of the ranks'."""
        pairs = zip(self.logits(generator, exact), exact, strict=True)
        worst = torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)


def measure(case: Case, clock: Clock) -> dict[str, Any]:
    """Return the figures of a case: microseconds of a step by way and mode, and errors."""
    exact = case.reference()
    row: dict[str, Any] = {"model": case.model, "batch": case.batch, "context": case.options.context, "ways": {}}
    works: dict[tuple[str, str], Callable[[], None]] = {}
    prefills: dict[str, Callable[[], None]] = {}
    tokens, device = case.batch * case.options.context, case.job.device
    with kept() as generators:
        for way in case.options.ways:
            before = allocated(device)
            generators[way] = generator = case.generator(way)
            error = case.error(generator, exact)
            row["ways"][way] = {"error": error}
            if error > MARGIN * row["ways"].get("NCCL", {"error": error})["error"] + 1e-6:
                row["ways"][way]["left out"] = "its logits are wrong"
                continue
            prefills[way] = partial(generator.prefill, case.prompt)
            for _ in range(-(-TRIALS // case.options.layers) if device.type == "cuda" else 1):
                prefills[way]()
            row["ways"][way]["bytes"] = peak(generator, prefills[way], device, before)
            works[way, "eager"] = partial(again, generator, case.options.context, generator.step)
            if device.type == "cuda":
                replay = graphed(generator.step)
                works[way, "graph"] = partial(again, generator, case.options.context, replay)
            synchronize(device)
        if "hostir" in prefills:
            row["ways"]["hostir"]["symmetric bytes"] = sum(hostir.torch.report().symmetric_bytes.values())
        few = copy.copy(clock)
        few.runs = min(clock.runs, PREFILLS)
        for way, us in few.race(prefills).items():
            row["ways"][way] |= {"prefill us": us, "prefill tokens/s": tokens / us * 1e6}
        for (way, mode), us in clock.race(works).items():
            row["ways"][way] |= {f"{mode} us": us, f"{mode} tokens/s": case.batch / us * 1e6}
        for (way, mode), us in clock.host(works).items():
            row["ways"][way][f"host {mode} us"] = us
        synchronize(device)
        dist.barrier()
    TwoShotLinear.spaces.clear()
    return row


def allocated(device: torch.device) -> int:
    """Return the bytes of the tensors on a device; 0 for a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(generator: Generator, prefill: Callable[[], None], device: torch.device, before: int) -> int:
    """Return the peak memory of a prefill and a step, in bytes, the largest of the ranks'; 0 for CPUs.

    Args:
        before: the bytes of the tensors that do not belong to this way.
    """
    if device.type == "cpu":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    prefill()
    generator.step()
    synchronize(device)
    largest = torch.tensor(torch.cuda.max_memory_allocated(device) - before, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def again(generator: Generator, position: int, step: Callable[[], None]) -> None:
    """Decode the token at a position, whatever was decoded before."""
    generator.position.fill_(position)
    step()


@contextlib.contextmanager
def kept() -> Iterator[dict[str, Generator]]:
    """Keep generators until all ranks have finished with them: their graphs use memory of peers."""
    generators: dict[str, Generator] = {}
    yield generators
    generators.clear()


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line for each case and way."""
    lines = []
    for row in rows:
        peers = [figures for way, figures in row["ways"].items() if way != "hostir"]
        for way, figures in row["ways"].items():
            cells = []
            for mode in ("graph", "eager"):
                us, best = (
                    figures.get(f"{mode} us"),
                    min((p[f"{mode} us"] for p in peers if f"{mode} us" in p), default=0),
                )
                cells += [f"{us:.0f}" if us else "-", f"{best / us:.2f}" if us and best else "-"]
            rate = figures.get("graph tokens/s") or figures.get("eager tokens/s")
            cells.append(f"{rate:.0f}" if rate else figures.get("left out", "-"))
            cells += [f"{figures[name]:.0f}" if name in figures else "-" for name in ("prefill us", "prefill tokens/s")]
            cells += [
                f"{figures[name] / 2**20:.0f}" if name in figures else "-" for name in ("bytes", "symmetric bytes")
            ]
            lines.append([f"{row['model']}, batch {row['batch']}", way, *cells, f"{figures['error']:.1e}"])
    headers = ["case", "way", "graph us", "x best peer", "eager us", "x best peer", "tokens/s"]
    headers += ["prefill us", "prefill tokens/s", "peak MiB", "symmetric MiB", "error"]
    return table(headers, lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases; print the table, and write it on rank 0 after each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*MODELS])
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[*BATCHES])
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*WAYS])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the benchmark")
    parser.add_argument("--shrink", type=int, default=1, help="divide the widths by this number")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    # Without hostir.torch.install(), which would give the two-shot way our kernel. DTensor is slow in inference mode.
    with session(options.device) as job, torch.no_grad():
        assert job is not None, "start it with torchrun"
        if options.device == "cpu":
            options.ways = [way for way in options.ways if way != "two-shot"]  # torch has it on GPUs only
        clock = Clock(job.device, options.repeats)
        for model in options.models:
            for batch in options.batches:
                rows.append(measure(Case(job, options, model, batch), clock))
                if job.rank == 0 and options.out is not None:
                    write(options.out, "Prefill and decoding", report(rows), {"rows": rows})
        if job.rank == 0:
            print(report(rows), flush=True)


if __name__ == "__main__":
    main()
