"""Cases that train a Llama by the pass over graphs and by layers; test_operators.py starts the ranks.

Every step compares the loss and the gradients with one rank. They may differ by BOUND, relative to the loss and to the
norm of each gradient: in f32, sums in another order are off by about 1e-6.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import hostir as hi
import hostir.torch
from examples import llama
from hostir.torch import OverlapPass
from tests.torch.on_ranks import DEVICE, RANKS, broadcast, case, full, main, with_parameters_of_rank_0
from tests.torch.overlap_cases import AG, PLAN, RS, fused
from tests.torch.without_code import backend_with

BOUND = 1e-5
VOCABULARY = 64
OVERLAP = OverlapPass()
BACKEND = backend_with(OVERLAP)  # all cases share it, and so the graphs that are alike
OF_DTENSORS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
    **{f"layers.*.{name}": style for name, style in PLAN.items() if not name.startswith("attention")},
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
OF_LAYERS = {name: style for name, style in llama.plan().items() if ".attention" not in name}


class Layer(nn.Module):
    """The second half of a Llama block, which is compiled in half the time."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.feed_forward, self.ffn_norm = llama.FeedForward(features, hidden), llama.RMSNorm(features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.ffn_norm(x))


def model_of_rank_0() -> llama.Llama:
    model = llama.Llama(VOCABULARY, 0, 32, 8, 4, 48)
    model.layers.extend(Layer(32, 48) for _ in range(2))
    return with_parameters_of_rank_0(model)


def parallelized(
    model: llama.Llama,
    mesh: DeviceMesh,
    compiled: bool,
    checkpoint: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> llama.Llama:
    """Shard a model. If `compiled`, its layers have DTensors and run with the pass; otherwise they are hostir's.

    `checkpoint` has options of a checkpoint around each layer. None keeps all activations. `dynamic` is for
    torch.compile.
    """
    parallelize_module(model, mesh, OF_DTENSORS if compiled else OF_LAYERS)
    if compiled:  # torch 2.13 loses the gradient of a compiled layer's input while its collective runs
        model.embedding.register_forward_hook(lambda module, inputs, x: x * 1)
    for i, layer in enumerate(model.layers):
        if compiled:
            layer.compile(backend=BACKEND, dynamic=dynamic)
        if checkpoint is not None:
            model.layers[i] = checkpoint_wrapper(layer, **checkpoint)
    return model


def tokens_of(sequences: int, length: int) -> Tensor:
    """Draw sequences that are the same on all ranks."""
    return broadcast(llama.sequences(sequences, length, VOCABULARY, torch.default_generator).to(DEVICE))


def saves_matmuls(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of matmuls, also of fused ones, and compute all others again."""
    saved = str(operator).startswith("hostir.") or operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


WHOLE: dict[str, Any] = {}
SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, saves_matmuls)}


def train_like_one_rank(
    compiled: bool,
    checkpoint: dict[str, Any] | None = None,
    micro_batches: int = 1,
    lengths: Sequence[int] = (4, 4),
    tp: int = RANKS,
) -> dict[str, int]:
    """Train a step for each length, and return the numbers of calls of hostir's operators.

    Arguments:
        compiled: as for `parallelized`.
        checkpoint: as for `parallelized`.
        micro_batches: how many batches add to the gradients of a step.
        lengths: for each step, how many tokens of a sequence a rank has.
        tp: how many ranks share a layer; if they are not all, `fully_shard` shards parameters over the others.
    """
    mesh = init_device_mesh(DEVICE, (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    alone = model_of_rank_0()
    dynamic = True if len({*lengths}) > 1 else None
    model = parallelized(copy.deepcopy(alone), mesh["tp"], compiled, checkpoint, dynamic)
    for shards in (*model.layers, model) if replicas > 1 else ():
        fully_shard(shards, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    hi.torch.report(clear=True)
    with hi.torch.install(strict=True):
        for length in lengths:
            for _ in range(micro_batches):
                tokens = tokens_of(2 * replicas, length * tp)
                loss = llama.loss_of(model, tokens[replica::replicas])
                dist.all_reduce(loss)
                true = llama.loss_of(alone, tokens)
                assert abs(loss / RANKS - true) <= BOUND * true
            for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert (full(mine.grad) - theirs.grad).norm() <= BOUND * theirs.grad.norm(), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    rows = hi.torch.report(clear=True)
    return {name: sum(row.calls for row in rows if row.operator == f"hostir::{name}") for name in (AG, RS)}


FORWARD, BOTH = 2, 2 * 2  # gathers, or scatters, of 2 layers: in forward; in forward and backward


def of_each(calls: int) -> dict[str, int]:
    return {AG: calls, RS: calls}


def assert_all_fused() -> None:
    assert {*fused(OVERLAP)} == {AG, RS}, OVERLAP.report
    assert str(OVERLAP.report).splitlines()[-1].endswith(" collectives fused, 0 left alone")


@case
def the_pass_adds_gradients_of_micro_batches_of_four_numbers_of_tokens() -> None:
    ran = train_like_one_rank(True, micro_batches=3, lengths=(8, 4, 6, 3))
    assert_all_fused()
    assert ran == of_each(4 * 3 * BOTH)


@case
def the_pass_trains_inside_checkpoints() -> None:
    """The checkpoint is around the compiled layer. Inside it, torch 2.13 cannot trace checkpoints of DTensors."""
    for checkpoint in (WHOLE, SELECTIVE):
        ran = train_like_one_rank(True, checkpoint)
        assert_all_fused()
        assert ran == of_each(2 * (BOTH + FORWARD * (checkpoint is WHOLE)))


@case
def the_pass_trains_beside_fully_shard() -> None:
    if RANKS != 4:
        return
    for checkpoint in (None, WHOLE):
        ran = train_like_one_rank(True, checkpoint, micro_batches=2, tp=2)
        assert_all_fused()
        assert ran == of_each(2 * 2 * (BOTH + FORWARD * (checkpoint is WHOLE)))


@case
def layers_train_inside_checkpoints() -> None:
    for checkpoint in (WHOLE, SELECTIVE):
        ran = train_like_one_rank(False, checkpoint)
        assert ran == of_each(2 * (BOTH + 1 + FORWARD * (checkpoint is WHOLE)))  # the last layer gathers once


def held_after(pause: float) -> tuple[int, int]:
    """Return the bytes that are held after a pause.

    Threads may hold the tensors of the last call for a moment.
    """
    time.sleep(pause)
    return llama.held_bytes(torch.device(DEVICE))


@case
def memory_is_the_same_after_30_and_300_steps_of_new_numbers_of_tokens() -> None:
    mesh, lengths = (
        init_device_mesh(DEVICE, (RANKS,), mesh_dim_names=("tp",)),
        random.Random(os.environ.get("SEED", "")),
    )
    for compiled in (True, False):
        model = parallelized(model_of_rank_0(), mesh, compiled, dynamic=True)
        optimizer, held = torch.optim.AdamW(model.parameters()), {}
        with hi.torch.install(strict=True, tune=0):  # while candidates are tried, the memory that they hold changes
            for step in range(1, 301):
                tokens = tokens_of(2, RANKS * (8 if step == 1 else lengths.randint(1, 8)))
                llama.loss_of(model, tokens)
                optimizer.step()
                optimizer.zero_grad()
                del tokens
                if step in (30, 300):
                    of_tensors, symmetric = zip(*(held_after(pause) for pause in (0.0, 0.1, 0.3)), strict=True)
                    held[step] = min(of_tensors), min(symmetric)
        assert held[30] == held[300], held
        assert held[300][0] > 0


if __name__ == "__main__":
    main()
