"""A small mixture of experts that trains: each rank has tokens, and a slice of every expert.

    python examples/moe.py                               one rank
    torchrun --nproc-per-node 4 examples/moe.py          4 ranks: on GPUs if available, otherwise on CPU

A router chooses 2 experts for each token, as in Mixtral. A shared expert computes all tokens, as in DeepSeek-V3: it is
one more expert, which every token has. The number of tokens changes every step. Each step is compared with the same
model on one rank, which has all tokens and all matrices.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hostir.torch

WORDS, FEATURES, HIDDEN, EXPERTS, EACH, LAYERS, STEPS = 64, 32, 48, 8, 2, 2, 3
SHARED = EXPERTS  # the number of the shared expert


class Layer(nn.Module):
    """A residual layer: norm, router and experts. `experts` computes rows with the experts that the router chose."""

    def __init__(self, experts: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(FEATURES, device=device)
        self.router = nn.Linear(FEATURES, EXPERTS, bias=False, device=device)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        scores, chosen = self.router(rows).softmax(-1).topk(EACH)
        weights = scores / scores.sum(-1, keepdim=True)
        chosen, weights = F.pad(chosen, (0, 1), value=SHARED), F.pad(weights, (0, 1), value=1.0)
        return x + self.experts(rows, chosen, weights)


class OneRank(nn.Module):
    """The same experts on one rank."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(p.full_tensor().detach().clone()) for p in experts.parameters())

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            rows = (F.silu(x @ gate) * (x @ up)) @ down
            y = y + rows * (weights * (chosen == expert)).sum(-1, keepdim=True)
        return y


def model(device: torch.device, experts: list[nn.Module]) -> nn.Sequential:
    torch.manual_seed(1)  # the replicated parameters are the same on all ranks
    layers = [Layer(each, device) for each in experts]
    embedding, head = nn.Embedding(WORDS, FEATURES, device=device), nn.Linear(FEATURES, WORDS, device=device)
    return nn.Sequential(embedding, *layers, head)


def main() -> None:
    mesh = start()
    rank, ranks = mesh.get_rank(), mesh.size()
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    sharded = [hostir.torch.GroupedExperts(EXPERTS + 1, FEATURES, HIDDEN, mesh, device=device) for _ in range(LAYERS)]
    ours, single = model(device, sharded), model(device, [OneRank(each) for each in sharded])
    # The experts are DTensors and the other parameters are not. torch's loops over parameters (`foreach`) take no mix.
    # Adam would divide gradients by their size: where one is 0, as for an expert that was not chosen, it would amplify
    # rounding, and the models could not be compared.
    steps = [torch.optim.SGD(m.parameters(), 1e-1, foreach=False) for m in (ours, single)]
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        tokens = ranks * (5 + 3 * step)
        words, following = torch.randint(WORDS, (2, tokens)).to(device)
        mine = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
        loss = F.cross_entropy(ours(words[mine]), following[mine], reduction="sum") / tokens
        exact = F.cross_entropy(single(words), following)
        for each in steps:
            each.zero_grad()
        loss.backward()
        exact.backward()
        for name, parameter in ours.named_parameters():
            if ".experts." not in name:  # replicated: each rank has the gradient of its tokens
                dist.all_reduce(parameter.grad)
        for each in steps:
            each.step()
        total = loss.detach()
        dist.all_reduce(total)
        torch.testing.assert_close(total, exact.detach(), rtol=1e-5, atol=1e-5)
        if rank == 0:
            off = f"loss {total:.3f}, off one rank's by {total - exact:.0e}"
            print(f"step {step}: {tokens} tokens on {ranks} ranks, {off}")
    dist.destroy_process_group()


def start() -> DeviceMesh:
    """Join the job of torchrun, or start one with a single rank."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=0, world_size=1)
    return init_device_mesh(kind, (int(os.environ.get("WORLD_SIZE", "1")),))


if __name__ == "__main__":
    main()
