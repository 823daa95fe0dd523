"""Tensor-parallel experts of a mixture of experts: each rank has tokens, and a slice of the matrices of every expert.

The router is not part of it: the experts of each token and their weights are inputs. How many tokens an expert gets is
known on the device only, and the host does not wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from hostir.ir.source import described, error, user_span
from hostir.torch.functional import Ranks, name_of, ready
from hostir.torch.modules import local_weight, mesh_of
from hostir.torch.ops import collectives, grouped
from hostir.torch.ops.gradients import wants_gradients

GROUPS = "[experts, features, hidden], [experts, features, hidden] and [experts, hidden, features]"


def expert_mlp(
    x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, group: Ranks
) -> Tensor:
    """Compute a mixture of experts, whose matrices are sharded over the ranks.

    Expert e computes `(silu(x @ gate[e]) * (x @ up[e])) @ down[e]`. A token's result is the sum over its k experts,
    multiplied by their weights. The ranks gather the tokens, multiply them with their slices of the matrices, and
    reduce-scatter one row for each token. The gather overlaps the first two products, and the reduce-scatter overlaps
    the last one. Without gradients, all of this is one program.

    The function is differentiable in `x`, `weights` and the matrices. An expert may get any number of tokens, also
    none. A number in `experts` that is negative, or not less than the number of experts, stands for no expert: it adds
    nothing to the token's result.

    Args:
        x: this rank's tokens, `[M, features]`. All ranks have equally many.
        experts: the experts of each token, `[M, k]` in int32 or int64.
        weights: the weights of these experts, `[M, k]`.
        gate, up: this rank's columns of the matrices, `[experts, features, hidden/ranks]`.
        down: this rank's rows of the matrices, `[experts, hidden/ranks, features]`.
        group: the ranks: a process group of torch, its name, or a DeviceMesh of one dimension.

    Returns:
        This rank's tokens, `[M, features]`.
    """
    _check(x, experts, weights, gate, up, down)
    name, count = name_of(group), gate.shape[0]
    x, weights, gate, up, down = ready(x, weights, gate, up, down)
    order, offsets, places = grouped.route.packet(experts, count, name)
    by_token = collectives.all_gather.call(weights, 0, name).view(places.shape)
    if not wants_gradients((x, weights, gate, up, down)):
        operands = [x, gate, up, down, order, offsets, places, by_token]
        return grouped.expert_mlp.call(*operands, name)
    by_row = by_token.flatten(1).gather(1, _inverse(places).long())  # the weight of each row
    _, (g, u) = grouped.all_gather_grouped_matmul.call(x, [gate, up], order, offsets, places, name)
    h = F.silu(g) * u * by_row[..., None].to(x.dtype)
    return grouped.grouped_matmul_reduce_scatter.call(h, down, order, offsets, places, name)


def _inverse(places: Tensor) -> Tensor:
    """Return, for each row, the number of its token and expert: the inverse of `places` on each rank."""
    flat = places.flatten(1).long()
    numbers = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    return torch.empty_like(flat).scatter_(1, flat, numbers)


def _check(x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> None:
    """Raise HostIRError unless the shapes, dtypes and devices of the arguments fit each other."""
    if x.dim() != 2 or experts.dim() != 2 or experts.shape != weights.shape or len(experts) != len(x):
        what = f"tokens {described(x)}, experts {described(experts)} and weights {described(weights)}"
        raise error(what, user_span(), expected="[M, features], [M, k] and [M, k], for M tokens")
    if experts.dtype not in grouped.INTEGERS:
        raise error(f"experts of {experts.dtype}", user_span(), expected="int32 or int64")
    first = (gate.shape[0], x.shape[1]) if gate.dim() == 3 else None
    fits = first is not None and gate.shape == up.shape and gate.shape[:2] == first
    if not fits or down.shape != (gate.shape[0], gate.shape[2], x.shape[1]):
        what = f"matrices of shape {list(gate.shape)}, {list(up.shape)} and {list(down.shape)}, {x.shape[1]} features"
        raise error(what, user_span(), expected=GROUPS)
    devices = {str(t.device) for t in (x, experts, weights, gate, up, down)}
    if len(devices) > 1:
        raise error(f"tensors on {', '.join(sorted(devices))}", user_span(), expected="all on one device")


class GroupedExperts(nn.Module):
    """The experts of a mixture of experts, sharded over the ranks of a mesh. `forward` is `expert_mlp`.

    The parameters are DTensors: `gate` and `up` `[experts, features, hidden]`, sharded on the last axis, and `down`
    `[experts, hidden, features]`, sharded on the axis before it.

    Args:
        experts: the number of experts.
        features: the features of input and output.
        hidden: the hidden features of one expert, over all ranks. The number of ranks must divide it.
        mesh: a DeviceMesh of one dimension.
        device, dtype: the device and dtype of the parameters. All ranks get their parts of rank 0's parameters.
    """

    def __init__(
        self,
        experts: int,
        features: int,
        hidden: int,
        mesh: DeviceMesh,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mesh, self.group = mesh_of(mesh, "experts")
        if hidden % mesh.size():
            raise error(f"its {mesh.size()} ranks do not divide the hidden features, which are {hidden}", user_span())
        for name, shape, axis in (
            ("gate", (experts, features, hidden), 2),
            ("up", (experts, features, hidden), 2),
            ("down", (experts, hidden, features), 1),
        ):
            matrices = torch.empty(shape, device=device, dtype=dtype)
            nn.init.uniform_(matrices, -(shape[1] ** -0.5), shape[1] ** -0.5)
            self.register_parameter(name, nn.Parameter(distribute_tensor(matrices, mesh, [Shard(axis)])))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's tokens, computed by their experts. The arguments are as for `expert_mlp`."""
        gate, up, down = (local_weight(w) for w in self.matrices())
        return expert_mlp(x, experts, weights, gate, up, down, self.group)

    def matrices(self) -> list[Any]:
        """Return the parameters `gate`, `up` and `down`, which are DTensors."""
        return [*self.parameters()]

    def extra_repr(self) -> str:
        experts, features, hidden = self.matrices()[0].shape
        return f"{experts} experts, {features} features, {hidden} hidden, {self.mesh.size()} ranks"
