"""A block of Llama-3, forward and backward, by torch's DTensor, async TP and operators, and by hostir.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.llama_block --out benchmarks/results/llama_block

By default each rank has the widths of a rank of 8: heads, kv heads and the FFN are divided by 8 whatever the number of
ranks, the tokens by the ranks there are. `--of 0` divides all by the ranks there are. Times are of one step on all
ranks; `alone` is the same work of a rank without any communication, and what a way takes longer is its exposed
communication. The host's time is that of a step with nothing else to do; memory is the peak of a step above what
parameters take. Every way must give the gradients of DTensor in f32, as exactly as DTensor does in bf16; those in fp8
are off by some ten times as much, as the last column shows, and `alone` is in bf16 for them, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hostir.torch
from benchmarks.harness import Clock, synchronize, table, write
from examples.llama import Block, plan
from hostir.torch import OverlapPass

SIZES = {"8B": (4096, 32, 8, 14336), "70B": (8192, 64, 8, 28672)}  # features, heads, kv heads, hidden
HEAD = 128
TOKENS = Shard(1)
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

# torch's operators, which have no gradients of their own: as torchtitan's functions give them. ------------------------


class Gathered(torch.autograd.Function):
    """Linear layers of a gathered input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, *weights: Tensor) -> tuple[Tensor, ...]:
        full, outputs = GATHER[x.device.type](x, [w.t() for w in weights], 1, group)
        ctx.save_for_backward(full, *weights)
        ctx.group = group
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        full, *weights = ctx.saved_tensors
        dy = torch.cat(dys, -1)
        dx = SCATTER[dy.device.type](dy, torch.cat(weights), "sum", 1, ctx.group)
        return dx, None, *(each.flatten(0, -2).t() @ full.flatten(0, -2) for each in dys)


class Scattered(torch.autograd.Function):
    """A linear layer whose output is summed up and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return SCATTER[x.device.type](x, weight.t(), "sum", 1, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        full, (dx,) = GATHER[dy.device.type](dy, [weight], 1, ctx.group)
        return dx, None, full.flatten(0, -2).t() @ x.flatten(0, -2)


ops = torch.ops.symm_mem
GATHER = {"cuda": ops.fused_all_gather_matmul, "cpu": symm_mem._fused_all_gather_matmul_fallback}
SCATTER = {"cuda": ops.fused_matmul_reduce_scatter, "cpu": symm_mem._fused_matmul_reduce_scatter_fallback}


class Operators(nn.Module):
    """A block on torch's operators, with this rank's parts of the parameters."""

    def __init__(self, block: Block, group: str) -> None:
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
    """A block: the parameters of all ranks, the sizes of one rank's part, the tokens of all, and random inputs."""

    whole: Block
    part: tuple[int, int, int, int, int]
    mesh: DeviceMesh
    backend: str
    x: Tensor
    dy: Tensor

    def mine(self, x: Tensor) -> Tensor:
        """This rank's tokens."""
        return x.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()].contiguous()

    def parallel(self, plan: Any, compiled: bool = False, dtype: torch.dtype | None = None) -> nn.Module:
        """The block under a plan."""
        module = parallelize_module(copy.deepcopy(self.whole).to(dtype), self.mesh, plan)
        if compiled:
            module.compile(backend=self.backend, dynamic=False)
        return module

    def plain(self) -> Block:
        """A block of plain parameters, those of this rank."""
        parts = {name: as_local(value) for name, value in self.parallel(DTENSOR).state_dict().items()}
        block = Block(*self.part).to(self.x.device, self.x.dtype)
        block.load_state_dict(parts)
        return block


def as_local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@contextlib.contextmanager
def async_tp(case: Case) -> Iterator[None]:
    """What torch needs to fuse anything: the flag, and a call that it says is needed no more."""
    if case.x.device.type != "cuda":
        raise RuntimeError("async TP is for CUDA")
    with warnings.catch_warnings(), inductor.patch(_micro_pipeline_tp=True):
        warnings.simplefilter("ignore", FutureWarning)
        symm_mem.enable_symm_mem_for_group(case.mesh.get_group().group_name)
        yield


@dataclass(frozen=True)
class Way:
    """How a block is made, what holds while it is first run, and whether its activations are DTensors."""

    make: Callable[[Case], nn.Module]
    around: Callable[[Case], contextlib.AbstractContextManager[Any]] = lambda case: contextlib.nullcontext()
    dtensors: bool = False


WAYS = {
    "DTensor eager": Way(lambda case: case.parallel(DTENSOR), dtensors=True),
    "DTensor compiled": Way(lambda case: case.parallel(DTENSOR, compiled=True), dtensors=True),
    "DTensor compiled, async TP": Way(lambda case: case.parallel(DTENSOR, compiled=True), async_tp, dtensors=True),
    "DTensor compiled, hostir's pass": Way(
        lambda case: case.parallel(DTENSOR, compiled=True),
        lambda case: inductor.patch(post_grad_custom_post_pass=OverlapPass()),
        dtensors=True,
    ),
    "torch's operators": Way(lambda case: Operators(case.plain(), case.mesh.get_group().group_name)),
    "hostir eager": Way(lambda case: case.parallel(HOSTIR)),
    "hostir compiled": Way(lambda case: case.parallel(HOSTIR, compiled=True)),
    "hostir eager, fp8": Way(lambda case: case.parallel(FLOAT8)),
    "hostir compiled, fp8": Way(lambda case: case.parallel(FLOAT8, compiled=True)),
}


class Step:
    """Forward and backward of a module on this rank's tokens."""

    def __init__(self, case: Case, module: nn.Module, dtensors: bool, alone: bool = False) -> None:
        self.module, self.dtensors, self.mesh = module, dtensors, case.mesh
        x, self.dy = (case.x, case.dy) if alone else (case.mine(case.x), case.mine(case.dy))
        self.x = x.clone().to(next(module.parameters()).dtype).requires_grad_()

    def __call__(self) -> None:
        self.x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None
        x = DTensor.from_local(self.x, self.mesh, [TOKENS], run_check=False) if self.dtensors else self.x
        y = as_local(self.module(x))
        y.backward(self.dy.to(y.dtype))

    def gradients(self) -> Tensor:
        """Those of the input and of the matrices, which each rank has to itself."""
        matrices = [as_local(p.grad) for p in self.module.parameters() if p.ndim == 2]
        return torch.cat([self.x.grad.flatten(), *(each.flatten() for each in matrices)]).float()

    def peak(self) -> int:
        """The bytes that a step takes at most."""
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


# Measuring ------------------------------------------------------------------------------------------------------------


def cases(options: argparse.Namespace, mesh: DeviceMesh) -> Iterator[tuple[str, int, Case]]:
    """Models and numbers of tokens."""
    ranks, device = mesh.size(), options.device
    for model, tokens in ((model, int(n)) for model in options.models.split(",") for n in options.tokens.split(",")):
        features, heads, kv_heads, hidden = SIZES[model]
        size, of = HEAD // options.shrink or 1, options.of or ranks
        part = (features // options.shrink, heads // of, kv_heads // of, hidden // of // options.shrink)
        torch.manual_seed(0)
        whole = Block(part[0], *(n * ranks for n in part[1:]), size).to(device, torch.bfloat16)
        x, dy = (torch.randn(1, tokens, part[0], device=device).bfloat16() for _ in range(2))
        yield model, tokens, Case(whole, (*part, size), mesh, options.backend, x, dy)


def measured(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Times, memory and errors of each way; the reasons of those that failed."""
    exact = Step(case, case.parallel(DTENSOR, dtype=torch.float32), True)
    exact()
    true, steps, failed, errors = exact.gradients(), {}, {}, {}
    del exact
    for name in options.ways.split(";") if options.ways else WAYS:
        torch._dynamo.reset()
        way = WAYS[name]
        try:
            with way.around(case):
                step = Step(case, way.make(case), way.dtensors)
                step()
                synchronize(case.x.device)
        except RuntimeError as refused:
            failed[name] = str(refused).strip().split("\n")[0]
            continue
        steps[name], errors[name] = step, ((step.gradients() - true).norm() / true.norm()).item()
    del true
    peaks = {name: step.peak() for name, step in steps.items()}
    works: dict[str, Callable[[], Any]] = {**steps, "alone": Step(case, case.plain(), False, alone=True)}
    clock = Clock(case.x.device, options.repeats)
    times = clock.race(works)
    hosts = clock.host(works)
    alone = times.pop("alone")
    ways = {
        name: {"us": t, "exposed_us": round(t - alone, 1), "host_us": hosts[name], "bytes": peaks[name]}
        | {"error": errors[name]}
        for name, t in times.items()
    }
    return {"alone_us": alone, "ways": ways, "failed": failed}


def report(rows: list[dict[str, Any]]) -> str:
    """A table for each model and number of tokens."""
    texts = []
    for row in rows:
        base = row["ways"].get("DTensor eager", {"error": float("inf")})
        lines = [
            [
                name,
                f"{w['us']:.0f}",
                f"{w['exposed_us']:.0f}",
                f"{w['host_us']:.0f}",
                f"{w['bytes'] / 2**20:.0f}",
                f"{w['error'] / base['error']:.2f}",
            ]
            for name, w in row["ways"].items()
        ]
        head = f"## {row['model']}, {row['tokens']} tokens, {row['widths']}: {row['alone_us']:.0f} us alone"
        headers = ["way", "step us", "exposed us", "host us", "peak MiB", "error against DTensor eager's"]
        texts += [head, table(headers, lines), *(f"{name}: {why}" for name, why in row["failed"].items())]
    return "\n\n".join(texts)


def main() -> None:
    """Measures all cases."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="without ending; .json and .md are written")
    options.add_argument("--models", default="8B,70B")
    options.add_argument("--tokens", default="2048,8192,16384", help="of all ranks together")
    options.add_argument("--of", type=int, default=8, help="ranks that share the layers; 0: those that there are")
    options.add_argument("--ways", default="", help=f"of these, separated by semicolons: {'; '.join(WAYS)}")
    options.add_argument("--backend", default="inductor", help="of torch.compile")
    options.add_argument("--repeats", type=int, default=30)
    options.add_argument("--shrink", type=int, default=1, help="divides the widths, to try it out on a CPU")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = options.parse_args()
    mesh = init_device_mesh(given.device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rows: list[dict[str, Any]] = []
    for model, tokens, case in cases(given, mesh):
        widths = f"widths of a rank of {given.of}" if given.of else "full widths"
        rows.append({"model": model, "tokens": tokens, "widths": widths, **measured(case, given)})
        if dist.get_rank() == 0:
            print(report(rows[-1:]), flush=True)
            write(given.out, "A block of Llama-3, forward and backward", report(rows), {"rows": rows})
    if dist.get_rank() == 0:
        print(hostir.torch.report())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
