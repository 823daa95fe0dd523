"""Generate tokens with a small Llama-3 stack: prefill, then decode with a key-value cache, tensor-parallel.

    python examples/generate.py                                   one rank
    torchrun --nproc-per-node 2 examples/generate.py              2 ranks share each layer; GPUs if available
    torchrun --nproc-per-node 2 examples/generate.py --graph      a decode step is one CUDA graph
    torchrun --nproc-per-node 2 examples/generate.py --compare    logits are compared with one rank's

All ranks hold all activations, and the heads and columns of a layer are divided. So a layer has two all-reduces, each
behind a matmul that hostir runs together with it. The model is not trained: its weights are random. It takes the most
likely token each time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1]))  # the examples are no installed package

from examples.llama import Attention, Llama
from hostir.torch import ColwiseParallel, RowwiseParallel, install, report

BOUNDS = {
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
}  # relative error of logits: sums in another order round differently


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary positions to heads, `[batch, tokens, heads, size]`; `positions` has one number for each token."""
    half = x.shape[3] // 2
    angles = positions[:, None, None] * 500_000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)


class CachedAttention(Attention):
    """Attention that keeps keys and values of earlier tokens.

    Fields:
        keys, values: `[batch, heads of this rank, longest sequence, size]`.
        positions: the positions of the tokens of the current call, on the device, so that a CUDA graph can read them.
    """

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.view(*each.shape[:-1], -1, self.head_dim) for each in (q, k, v))
        q, k = rotated(q, self.positions).transpose(1, 2), rotated(k, self.positions).transpose(1, 2)
        self.keys.index_copy_(2, self.positions, k)
        self.values.index_copy_(2, self.positions, v.transpose(1, 2))
        seen = torch.arange(self.keys.shape[2], device=q.device) <= self.positions[:, None]
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def plan() -> dict[str, ParallelStyle]:
    """Return the plan: all ranks have all activations; `wo` and `w2` end with an all-reduce."""
    return {
        "layers.*.attention": ColwiseParallel("wq", "wk", "wv"),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward": ColwiseParallel("w1", "w3"),
        "layers.*.feed_forward.w2": RowwiseParallel(),
        "output": TorchColwiseParallel(output_layouts=Replicate()),
    }


class Generator:
    """A model with its cache. `tokens` are the latest tokens, `[batch, 1]`; `decode` replaces them by the next ones."""

    def __init__(self, model: Llama, batch: int, longest: int, ranks: int) -> None:
        self.model = model
        weight = model.embedding.weight
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.logits = torch.zeros(batch, model.output.out_features, dtype=weight.dtype, device=weight.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        for layer in model.layers:
            layer.attention.__class__ = CachedAttention
            heads = layer.attention.wk.out_features // layer.attention.head_dim // ranks
            shape = batch, heads, longest, layer.attention.head_dim
            layer.attention.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            layer.attention.values = torch.zeros_like(layer.attention.keys)

    def run(self, tokens: Tensor, positions: Tensor) -> None:
        """Run the model, and store the logits of the last tokens and the most likely next tokens."""
        for layer in self.model.layers:
            layer.attention.positions = positions
        self.logits.copy_(self.model(tokens)[:, -1])
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))

    def prefill(self, prompt: Tensor) -> None:
        """Process a prompt, `[batch, tokens]`."""
        self.run(prompt, torch.arange(prompt.shape[1], device=prompt.device))
        self.position.fill_(prompt.shape[1])

    def step(self) -> None:
        self.run(self.tokens, self.position)
        self.position.add_(1)

    def decode(self, graph: bool) -> None:
        """Replace `tokens` by the next tokens. With `graph`, replay a CUDA graph, which the first call captures."""
        if not graph:
            return self.step()
        if self.graph is None:
            kept = self.tokens.clone(), self.position.clone()
            for _ in range(3):  # strategies are chosen, and memory is allocated
                self.step()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
            self.tokens.copy_(kept[0])
            self.position.copy_(kept[1])
        self.graph.replay()


def generated(options: argparse.Namespace, device: torch.device) -> str:
    """Generate tokens, and return a line about them. With --compare, raise SystemExit if logits are too far off."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    dtype = torch.float32 if options.dtype == "f32" else torch.bfloat16
    sizes = options.vocabulary, options.layers, options.features, 8, 4, 3 * options.features
    torch.manual_seed(0)
    model = Llama(*sizes).to(device, dtype)
    alone = Llama(*sizes).to(device, dtype) if options.compare else None
    if alone is not None:
        alone.load_state_dict(model.state_dict())
    if ranks > 1:
        parallelize_module(model, init_device_mesh(device.type, (ranks,)), plan())
    longest = options.prompt + options.tokens
    generator = Generator(model, options.batch, longest, ranks)
    fresh = torch.Generator().manual_seed(options.seed)
    sequence = torch.randint(options.vocabulary, (options.batch, options.prompt), generator=fresh).to(device)
    worst, begin = 0.0, time.perf_counter()
    generator.prefill(sequence)
    for number in range(options.tokens):
        if alone is not None:
            expected = alone(sequence)[:, -1].float()
            worst = max(worst, float((generator.logits.float() - expected).norm() / expected.norm()))
        sequence = torch.cat([sequence, generator.tokens], 1)
        if number + 1 < options.tokens:
            generator.decode(options.graph)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    if not worst <= BOUNDS[dtype]:  # also true for NaN
        raise SystemExit(f"logits are off one rank's by {worst:.0e}; the bound is {BOUNDS[dtype]}")
    off = f", logits off one rank's by up to {worst:.0e}" if alone is not None else ""
    return f"{options.batch * options.tokens} tokens in {seconds:.2f} s{off}: {sequence[0].tolist()}"


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, and generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"vocabulary": 256, "layers": 2, "features": 64, "batch": 2, "prompt": 8, "tokens": 16, "seed": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--strategy", default="auto", help="of hostir: auto, push, ...")
    for name in ("graph", "compare", "report"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(argv)
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.device_count() > local else torch.device("cpu")
    if options.graph and device.type == "cpu":
        parser.error("--graph is for GPUs")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with install(strategy=options.strategy), torch.inference_mode():
        text = generated(options, device)
        if int(os.environ.get("RANK", 0)) == 0:
            print(text)
            if options.report:
                print(report())


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
