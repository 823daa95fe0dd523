"""Cases that train a Llama by the pass over graphs and by layers; test_operators.py starts the ranks.

Every step compares the loss and the gradients with one rank. They may differ by BOUND, relative to the loss and to the
norm of each gradient: in f32, sums in another order are off by about 1e-6.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
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
OF_DTENSORS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
    **{f"layers.*.{name}": style for name, style in PLAN.items()},
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


def tokens_of(sequences: int, length: int) -> Tensor:
    """Draw sequences that are the same on all ranks."""
    return broadcast(llama.sequences(sequences, length, VOCABULARY, torch.default_generator).to(DEVICE))


def with_hidden_start(model: llama.Llama) -> None:
    """Put an operation before the layers: torch 2.13 loses the gradient of the input of the first compiled layer."""
    model.embedding.register_forward_hook(lambda module, inputs, x: x * 1)


def saves_matmuls(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of matmuls, also of fused ones, and compute all others again."""
    saved = str(operator).startswith("hostir.") or operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


WHOLE: dict[str, Any] = {}
SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, saves_matmuls)}


def train_like_one_rank(
    overlap: OverlapPass | None,
    checkpoint: dict[str, Any] | None = None,
    micro_batches: int = 1,
    lengths: Sequence[int] = (4, 4),
    tp: int = RANKS,
    dynamic: bool | None = None,
) -> dict[str, int]:
    """Train a step for each length, and return the numbers of calls of hostir's operators.

    Arguments:
        overlap: the pass, with which each layer of DTensors is compiled; without a pass, hostir's layers run.
        checkpoint: options of a checkpoint around each layer; None keeps all activations.
        micro_batches: how many batches add to the gradients of a step.
        lengths: for each step, how many tokens of a sequence a rank has.
        tp: how many ranks share a layer; if they are not all, `fully_shard` shards parameters over the others.
    """
    torch._dynamo.reset()
    mesh = init_device_mesh(DEVICE, (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    alone = with_parameters_of_rank_0(llama.Llama(VOCABULARY, 2, 32, 8, 4, 48))
    model = copy.deepcopy(alone)
    parallelize_module(model, mesh["tp"], OF_DTENSORS if overlap else llama.plan())
    if overlap:
        with_hidden_start(model)
    for i, layer in enumerate(model.layers):
        if overlap:
            layer.compile(backend=backend_with(overlap), dynamic=dynamic)
        if checkpoint is not None:
            model.layers[i] = checkpoint_wrapper(layer, **checkpoint)
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


def assert_all_fused(overlap: OverlapPass) -> None:
    assert {*fused(overlap)} == {AG, RS}, overlap.report
    assert str(overlap.report).splitlines()[-1].endswith(" collectives fused, 0 left alone")


FORWARD, BOTH = 2 * 2, 2 * 2 * 2  # gathers, or scatters, of 2 layers in forward; in forward and backward


def of_each(calls: int) -> dict[str, int]:
    return {AG: calls, RS: calls}


@case
def the_pass_trains_beside_fully_shard() -> None:
    if RANKS != 4:
        return
    for checkpoint in (None, WHOLE):
        overlap = OverlapPass()
        ran = train_like_one_rank(overlap, checkpoint, micro_batches=2, tp=2)
        assert_all_fused(overlap)
        assert ran == of_each(2 * 2 * (BOTH + FORWARD * (checkpoint is WHOLE)))


@case
def the_pass_trains_inside_checkpoints() -> None:
    """The checkpoint is around the compiled layer. Inside it, torch 2.13 cannot trace checkpoints of DTensors."""
    for checkpoint in (WHOLE, SELECTIVE):
        overlap = OverlapPass()
        ran = train_like_one_rank(overlap, checkpoint)
        assert_all_fused(overlap)
        assert ran == of_each(2 * (BOTH + FORWARD * (checkpoint is WHOLE)))


@case
def the_pass_adds_gradients_of_micro_batches() -> None:
    overlap = OverlapPass()
    ran = train_like_one_rank(overlap, micro_batches=3)
    assert_all_fused(overlap)
    assert ran == of_each(2 * 3 * BOTH)


@case
def the_pass_trains_with_four_numbers_of_tokens() -> None:
    overlap = OverlapPass()
    ran = train_like_one_rank(overlap, lengths=(8, 4, 6, 3), dynamic=True)
    assert_all_fused(overlap)
    assert ran == of_each(4 * BOTH)


@case
def layers_train_inside_checkpoints() -> None:
    for checkpoint in (WHOLE, SELECTIVE):
        ran = train_like_one_rank(None, checkpoint)
        assert ran == of_each(2 * (BOTH + 1 + FORWARD * (checkpoint is WHOLE)))  # the last layer gathers once


if __name__ == "__main__":
    main()
