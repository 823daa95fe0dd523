"""Train a small Llama-3 stack of plain torch modules; one plan makes it tensor- and sequence-parallel.

    python examples/llama.py                                             one rank
    torchrun --nproc-per-node 4 examples/llama.py                        4 ranks share each layer; GPUs if available
    torchrun --nproc-per-node 4 examples/llama.py --tp 2 --fsdp          2 ranks share a layer, 2 share parameters
    torchrun --nproc-per-node 4 examples/llama.py --compare --dtype bf16 --steps 3

    torchrun --nproc-per-node 2 examples/llama.py --fp8 --compare        linear layers multiply in fp8

`--compare` compares the loss and the gradients of each step with one rank that has the same parameters. `--varying`
draws a new length of sequences for each step; memory must not grow after step 30. `--save DIR` and `--load DIR` write
and read checkpoints, on any number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812  # as everywhere
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel

from hostir.torch import ColwiseParallel, RowwiseParallel, install, report

# The model ------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotated(x: Tensor) -> Tensor:
    """Apply rotary positions to heads, `[batch, tokens, heads, size]`."""
    tokens, half = x.shape[1], x.shape[3] // 2
    frequencies = 500_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(tokens, device=x.device)[:, None, None] * frequencies
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, features: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(features, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(features, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(features, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.attended(self.wq(x), self.wk(x), self.wv(x)))

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.view(*each.shape[:-1], -1, self.head_dim) for each in (q, k, v))
        q, k, v = rotated(q).transpose(1, 2), rotated(k).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, features: int, heads: int, kv_heads: int, hidden: int, size: int | None = None) -> None:
        super().__init__()
        self.attention = Attention(features, heads, kv_heads, size or features // heads)
        self.attention_norm = RMSNorm(features)
        self.feed_forward, self.ffn_norm = FeedForward(features, hidden), RMSNorm(features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, vocabulary: int, layers: int, features: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.layers = nn.ModuleList(Block(features, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.output = RMSNorm(features), nn.Linear(features, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


# The fp8 products of hostir, on one rank, for --compare: operands are rounded to e4m3. --------------------------------


def rounded(x: Tensor, axis: int) -> Tensor:
    """Round numbers to e4m3 as the fp8 layers do. Each slice along `axis` has a scale that is a power of two."""
    wide = x.double()
    scale = (wide.abs().amax(axis, keepdim=True).clamp(min=1e-30) / 448).log2().ceil().exp2()
    return (wide / scale).to(torch.float8_e4m3fn).double() * scale


class Float8Product(torch.autograd.Function):
    """`x @ weight^T`, and its gradients, with rounded operands. Both products of dy have its rounded rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (rounded(x, -1) @ rounded(weight, 1).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = rounded(dy, -1)
        d_weight = rows.flatten(0, -2).t() @ rounded(x, -1).flatten(0, -2)
        return (rows @ rounded(weight, 0)).to(x.dtype), d_weight.to(weight.dtype)


class Float8Linear(nn.Linear):
    rounds = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.rounds:
            return super().forward(x)
        y = Float8Product.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


def in_float8(model: nn.Module) -> nn.Module:
    """Make all linear layers of an unsharded model, except the last one, multiply in fp8."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "output":
            module.__class__ = Float8Linear
    return model


# The plan: between layers, ranks have parts of each sequence; inside layers, heads and columns. -----------------------

SEQUENCE = Shard(1)


def plan(fp8: bool = False) -> dict[str, ParallelStyle]:
    return {
        "embedding": TorchRowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "layers.*.attention_norm": SequenceParallel(use_local_output=True),
        "layers.*.attention": ColwiseParallel("wq", "wk", "wv", input_layouts=SEQUENCE, fp8=fp8),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=SEQUENCE, fp8=fp8),
        "layers.*.ffn_norm": SequenceParallel(use_local_output=True),
        "layers.*.feed_forward": ColwiseParallel("w1", "w3", input_layouts=SEQUENCE, fp8=fp8),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=SEQUENCE, fp8=fp8),
        "norm": SequenceParallel(use_local_output=True),
        "output": ColwiseParallel(input_layouts=SEQUENCE, use_local_output=False),
    }


def parallelized(model: Llama, mesh: DeviceMesh, fsdp: bool, fp8: bool = False) -> Llama:
    parallelize_module(model, mesh["tp"], plan(fp8))
    if fsdp:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


# Training -------------------------------------------------------------------------------------------------------------

# Relative error of a loss, and of each gradient in norm. Sums in another order are rounded differently.
BOUNDS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 1e-1)}
# fp8 allows more: this share of what rounding to e4m3 changes. An element halfway between two numbers of e4m3 may be
# rounded to either, if it is a sum in another order. The difference is one spacing, 6 to 12 % of the element. It moves
# the elements that are computed from it, and some of those are rounded to another number, too.
SHARE_OF_ROUNDING = 0.5


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    with loss_parallel() if isinstance(logits, DTensor) else contextlib.nullcontext():
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
    return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()


def average(model: nn.Module, replicas: DeviceMesh) -> None:
    """Average the gradients over the replicas, which have different sequences. fully_shard does this by itself."""
    for parameter in model.parameters():
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(local, group=replicas.get_group())
        local.div_(replicas.size())


def sequences(count: int, tokens: int, vocabulary: int, fresh: torch.Generator) -> Tensor:
    """Draw sequences that a model can learn: each counts up from a random token, in steps of 1, 2 or 3."""
    first = torch.randint(vocabulary, (count, 1), generator=fresh)
    return (first + torch.randint(1, 4, (count, 1), generator=fresh) * torch.arange(tokens + 1)) % vocabulary


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def change_by_rounding(alone: nn.Module, tokens: Tensor) -> tuple[float, list[float]]:
    """Return how much rounding to e4m3 changes the loss and the gradients of one rank, relative to both.

    For the loss, this is the mean over tokens of the absolute change; for each gradient, the norm of the change. All
    are 0 for a model without fp8. The gradients of `alone` are left as they were.
    """
    layers = [module for module in alone.modules() if isinstance(module, Float8Linear)]
    if not layers:
        return 0.0, [0.0 for _ in alone.parameters()]
    losses, gradients = [], []
    rounded_gradients = [parameter.grad for parameter in alone.parameters()]
    for rounds in (False, True):
        for layer in layers:
            layer.rounds = rounds
        alone.zero_grad()
        logits = alone(tokens[:, :-1]).flatten(0, 1).float()
        losses.append(F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none"))
        losses[-1].mean().backward()
        gradients.append([parameter.grad for parameter in alone.parameters()])
    changes = [((g - r).norm() / r.norm()).item() for g, r in zip(*gradients, strict=True)]
    for parameter, gradient in zip(alone.parameters(), rounded_gradients, strict=True):
        parameter.grad = gradient
    return ((losses[0] - losses[1]).abs().mean() / losses[1].mean()).item(), changes


def compare(model: nn.Module, alone: nn.Module, loss: Tensor, tokens: Tensor, states: dict[str, Tensor]) -> str:
    """Compare with the loss and the gradients of one rank with the same parameters."""
    alone.load_state_dict(states)
    alone.zero_grad()
    true = loss_of(alone, tokens)
    change, changes = change_by_rounding(alone, tokens)
    of_loss, of_gradient = BOUNDS[next(alone.parameters()).dtype]
    off, bound = abs(loss - true).item() / true.item(), of_loss + SHARE_OF_ROUNDING * change
    errors, bounds = {}, {}
    for (name, mine), theirs, change in zip(model.named_parameters(), alone.parameters(), changes, strict=True):
        errors[name] = ((full(mine.grad) - theirs.grad).norm() / theirs.grad.norm()).item()
        bounds[name] = of_gradient + SHARE_OF_ROUNDING * change
    largest = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    text = f", off one rank's by {off:.0e}, gradients by up to {errors[largest]:.0e}"
    wrong = [name for name in errors if not errors[name] <= bounds[name]]  # also true for NaN
    if wrong or not off <= bound:
        worst = max(wrong or errors, key=lambda name: (math.isnan(errors[name]), errors[name] / bounds[name]))
        reason = f"the bound of the loss is {bound:.0e}, {worst} is off by {errors[worst]:.0e} of {bounds[worst]:.0e}"
        raise SystemExit(f"loss {loss:.6f}{text} ({largest}); {reason}")
    return text


def held_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of tensors that are alive, for example between two steps, and the bytes of symmetric memory."""
    symmetric = sum(report().symmetric_bytes.values())
    if device.type == "cuda":
        return torch.cuda.memory_allocated(), symmetric
    gc.collect()
    kept = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    return sum(storages.values()), symmetric


class Trainer:
    """A model, its data and its optimizer. `mesh` has axes `dp` (replicas) and `tp`. It is None for one rank."""

    def __init__(self, options: argparse.Namespace, device: torch.device, mesh: DeviceMesh | None) -> None:
        self.options, self.device, self.mesh = options, device, mesh
        self.replicas, self.replica = (mesh["dp"].size(), mesh["dp"].get_local_rank()) if mesh else (1, 0)
        dtype = torch.float32 if options.dtype == "f32" else torch.bfloat16
        sizes = (options.vocabulary, options.layers, options.features, 8, 4, 3 * options.features)
        torch.manual_seed(0)
        one = in_float8 if options.fp8 else lambda model: model
        model = Llama(*sizes).to(device, dtype)
        self.model = parallelized(model, mesh, options.fsdp, options.fp8) if mesh else one(model)
        self.alone = one(Llama(*sizes).to(device, dtype)) if options.compare else None
        for layer in self.model.layers if options.compile else ():
            layer.compile(backend=options.compile, dynamic=options.varying or None)
        if options.compile:  # torch 2.13 loses the gradient of a compiled layer's input while its collective runs
            self.model.embedding.register_forward_hook(lambda module, inputs, x: x * 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.fresh = torch.Generator().manual_seed(1)
        self.graph, self.given, self.loss = None, None, None

    def tokens(self, longest: bool) -> Tensor:
        """Draw sequences, the same on all ranks. With --varying their length is random, at most --tokens."""
        tp = self.mesh["tp"].size() if self.mesh else 1
        drawn = tp * int(torch.randint(2, self.options.tokens // tp + 1, (), generator=self.fresh))
        length = drawn if self.options.varying and not longest else self.options.tokens
        return sequences(self.options.batch, length, self.options.vocabulary, self.fresh).to(self.device)

    def gradients(self, tokens: Tensor) -> Tensor:
        """Run forward and backward. Return the loss, averaged over the replicas."""
        if not self.options.graph:
            return self.computed(tokens)
        if self.graph is None:
            self.capture(tokens)
        self.given.copy_(tokens)
        self.graph.replay()
        return self.loss

    def computed(self, tokens: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, tokens[self.replica :: self.replicas])
        if self.replicas > 1:
            dist.all_reduce(loss, group=self.mesh["dp"].get_group())
            loss /= self.replicas
            if not self.options.fsdp:
                average(self.model, self.mesh["dp"])
        return loss

    def capture(self, tokens: Tensor) -> None:
        """Capture forward and backward in a CUDA graph. Earlier runs allocate memory and choose strategies."""
        self.given, self.graph, side = tokens.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.computed(self.given)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.loss = self.computed(self.given)

    def step(self, number: int) -> str:
        """Train one step and return a line about it. Steps count from 1; the first step has the longest sequences."""
        tokens = self.tokens(longest=number == 1)
        states = {name: full(value).clone() for name, value in self.model.state_dict().items()} if self.alone else {}
        loss = self.gradients(tokens)
        said = f"{tokens.shape[1] - 1} tokens, loss {loss:.4f}"
        said += compare(self.model, self.alone, loss, tokens, states) if self.alone else ""
        self.optimizer.step()
        return said

    def checkpoint(self, action: str, folder: str) -> None:
        """Save or load parameters. The numbers of ranks that save and load may differ."""
        state = self.model.state_dict()
        (dcp.save if action == "save" else dcp.load)(state, checkpoint_id=folder, no_dist=self.mesh is None)
        self.model.load_state_dict(state)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "vocabulary": 256,
        "layers": 2,
        "features": 64,
        "batch": 4,
        "tokens": 32,
        "steps": 20,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tp", type=int, help="ranks that share a layer; all, unless given")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile: inductor, aot_eager")
    parser.add_argument("--strategy", default="auto", help="of hostir: auto, ring, ...")
    parser.add_argument("--graph", action="store_true", help="replay forward and backward from a CUDA graph")
    for name in ("fsdp", "fp8", "compare", "varying", "report"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("save", "load"):
        parser.add_argument(f"--{name}", metavar="DIR")
    options = parser.parse_args(argv)
    if options.graph and options.varying:
        parser.error("--graph replays steps of one length, and --varying draws another for each")
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.device_count() > local else torch.device("cpu")
    if options.graph and device.type == "cpu":
        parser.error("--graph is for GPUs")
    tune = 0 if options.varying else None  # while candidates are tried, the memory that they hold changes
    with install(strategy=options.strategy, tune=tune):
        train(options, device)


def train(options: argparse.Namespace, device: torch.device) -> None:
    ranks, mesh = int(os.environ.get("WORLD_SIZE", 1)), None
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        tp = options.tp or ranks
        mesh = init_device_mesh(device.type, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    first = mesh is None or dist.get_rank() == 0
    trainer = Trainer(options, device, mesh)
    if options.load:
        trainer.checkpoint("load", options.load)
    terminal = Console(stderr=True)
    steps, held = range(1, options.steps + 1), (0, 0)
    for number in track(steps, "steps", console=terminal, disable=not (first and terminal.is_terminal)):
        said = trainer.step(number)
        if number not in {1, 2, 3, 30, options.steps}:
            continue
        before, held = held, held_bytes(device) if number >= 30 else held
        memory = f", {held[0]} bytes, of symmetric memory {held[1]}" if number >= 30 else ""
        if first:
            print(f"step {number}: {said}{memory}", flush=True)
        if options.varying and number > 30 and before != held:
            raise SystemExit(f"bytes and symmetric bytes were {before} after step 30, and are {held} now")
    if options.save:
        trainer.checkpoint("save", options.save)
    if options.report and first:
        print(report())


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
