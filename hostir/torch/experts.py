"""Tensor-parallel experts of a mixture of experts: each rank has tokens, and a slice of the matrices of every expert.

The router is not part of it: the experts of each token and their weights are inputs. How many tokens an expert gets is
known on the device only, and the host does not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from hostir.ir.source import described, error, user_span
from hostir.torch.functional import Ranks, name_of, ready
from hostir.torch.modules import local_weight, mesh_of
from hostir.torch.ops import collectives, gating, grouped

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
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, gate, up, down))):
        operands = [x, gate, up, down, order, offsets, places, by_token]
        return grouped.expert_mlp.call(*operands, name)
    by_row = by_token.flatten(1).gather(1, _inverse(places).long())  # the weight of each row
    _, (g, u) = grouped.all_gather_grouped_matmul.call(x, [gate, up], order, offsets, places, name)
    h = gating.gate.call(g, u, by_row)
    return grouped.grouped_matmul_reduce_scatter.call([h], [down], order, offsets, places, name)


def _inverse(places: Tensor) -> Tensor:
    """Return, for each row, the number of its token and expert: the inverse of `places` on each rank."""
    flat = places.flatten(1).long()
    numbers = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    return torch.empty_like(flat).scatter_(1, flat, numbers)


def _check(x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> None:
    """Raise HostIRError unless the types, shapes, dtypes and devices of the arguments fit each other."""
    names = {"x": x, "experts": experts, "weights": weights, "gate": gate, "up": up, "down": down}
    for name, t in names.items():
        if not isinstance(t, Tensor) or isinstance(t, DTensor):
            hint = "hostir.torch.GroupedExperts takes DTensors" if isinstance(t, DTensor) else ""
            raise error(f"{name}={described(t)}", user_span(), expected="a plain tensor: this rank's part", hint=hint)
    if x.dim() != 2 or experts.dim() != 2 or experts.shape != weights.shape or len(experts) != len(x):
        what = f"tokens {described(x)}, experts {described(experts)} and weights {described(weights)}"
        raise error(what, user_span(), expected="[M, features], [M, k] and [M, k], for M tokens")
    if not experts.shape[1] or not gate.numel():
        what = f"experts of shape {list(experts.shape)}, and matrices of shape {list(gate.shape)}"
        raise error(what, user_span(), expected="at least one expert for each token, and matrices with elements")
    if experts.dtype not in grouped.INTEGERS:
        raise error(f"experts of {experts.dtype}", user_span(), expected="int32 or int64")
    first = (gate.shape[0], x.shape[1]) if gate.dim() == 3 else None
    fits = first is not None and gate.shape == up.shape and gate.shape[:2] == first
    if not fits or down.shape != (gate.shape[0], gate.shape[2], x.shape[1]):
        what = f"matrices of shape {list(gate.shape)}, {list(up.shape)} and {list(down.shape)}, {x.shape[1]} features"
        raise error(what, user_span(), expected=GROUPS)
    floats = {name: t.dtype for name, t in names.items() if name != "experts"}
    others = {dtype for name, dtype in floats.items() if name != "weights"}
    if (len(others) > 1 and not torch.is_autocast_enabled(x.device.type)) or not weights.is_floating_point():
        what = ", ".join(f"{name} of {dtype}" for name, dtype in floats.items())
        raise error(what, user_span(), expected="one dtype, except for the weights, which may be of another float")
    devices = {str(t.device) for t in names.values()}
    if len(devices) > 1:
        raise error(f"tensors on {', '.join(sorted(devices))}", user_span(), expected="all on one device")


@dataclass(frozen=True)
class Stored:
    """The parameters in which a module stores the matrices of its experts.

    Fields:
        gate, up, down: the names of the parameters.
        transposed: True if the matrices are `[outputs, inputs]`, as in an `nn.Linear`.
    """

    gate: str = "gate"
    up: str = "up"
    down: str = "down"
    transposed: bool = False

    @property
    def placements(self) -> dict[str, Shard]:
        """The placement of each parameter: the hidden features are sharded."""
        columns, rows = (1, 2) if self.transposed else (2, 1)
        return {self.gate: Shard(columns), self.up: Shard(columns), self.down: Shard(rows)}

    def parameters(self, module: nn.Module) -> list[Any]:
        """Return the three parameters of a module."""
        return [getattr(module, name) for name in self.placements]

    def matrices(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return parameters as matrices `[experts, inputs, outputs]`."""
        return [p.transpose(1, 2) for p in parameters] if self.transposed else parameters


class ShardedExperts(nn.Module):
    """The base class of modules whose matrices of experts are sharded over the ranks of a mesh.

    Fields:
        mesh, group: the mesh, which has one dimension, and the name of its process group.
        stored: the parameters, which are DTensors.
    """

    mesh: DeviceMesh
    group: str
    stored: Stored

    def become(self, mesh: DeviceMesh, group: str, stored: Stored, source: int | None = 0) -> None:
        """Shard the parameters. All ranks get their parts of rank `source`'s; None to shard each rank's own."""
        self.mesh, self.group, self.stored = mesh, group, stored
        for name, placement in stored.placements.items():
            old = getattr(self, name)
            sharded = distribute_tensor(old.data, mesh, [placement], src_data_rank=source)
            self.register_parameter(name, nn.Parameter(sharded, requires_grad=old.requires_grad))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's tokens, computed by their experts.

        The arguments are as for `expert_mlp`, with any number of leading axes in the place of M. They may be DTensors
        that are sharded on the same leading axis. The result is a DTensor if `x` is one.
        """
        placement = self.placement(x, experts, weights)
        rows, chosen, shares = (t.to_local() if isinstance(t, DTensor) else t for t in (x, experts, weights))
        if rows.dim() < 2 or chosen.dim() != rows.dim():
            what = f"tokens {described(rows)} and experts {described(chosen)}"
            raise error(what, user_span(), expected="[..., features] and [..., k], with equal leading axes")
        gate, up, down = self.stored.matrices([local_weight(p) for p in self.stored.parameters(self)])
        tokens, chosen, shares = (t.flatten(0, -2) for t in (rows, chosen, shares))
        y = expert_mlp(tokens, chosen, shares, gate, up, down, self.group)
        if rows.dim() > 2:
            y = torch.ops.aten._unsafe_view(y, rows.shape)  # fully_shard warns about modules that return a view
        return y if placement is None else DTensor.from_local(y, self.mesh, [placement], run_check=False)

    def placement(self, x: Tensor, experts: Tensor, weights: Tensor) -> Placement | None:
        """Return the placement of tokens that are a DTensor, or None for plain tensors.

        Raises HostIRError unless all DTensors are sharded on the same axis of tokens.
        """
        placements = {(t.device_mesh, t.placements) for t in (x, experts, weights) if isinstance(t, DTensor)}
        if not placements:
            return None
        (mesh, (placement, *_)), *others = placements
        by_token = isinstance(placement, Shard) and placement.dim % x.dim() < x.dim() - 1
        if others or not by_token or mesh != self.mesh:
            what = ", ".join(str(placements) for _, placements in placements)
            expected = (
                "tokens, experts and weights that are sharded on one axis of tokens, over the mesh of the experts"
            )
            raise error(f"tokens, experts and weights with the placements {what}", user_span(), expected=expected)
        return placement if isinstance(x, DTensor) else None

    def extra_repr(self) -> str:
        experts, features, hidden = self.stored.matrices(self.stored.parameters(self))[0].shape
        return f"{experts} experts, {features} features, {hidden} hidden, {self.mesh.size()} ranks"


class GroupedExperts(ShardedExperts):
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
        mesh, group = mesh_of(mesh, "experts")
        for name, number in (("experts", experts), ("features", features), ("hidden", hidden)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise error(f"{name}={described(number)}", user_span(), expected="a positive integer")
        check_hidden(hidden, mesh)
        for name, inputs, outputs in (
            ("gate", features, hidden),
            ("up", features, hidden),
            ("down", hidden, features),
        ):
            matrices = torch.empty(experts, inputs, outputs, device=device, dtype=dtype)
            nn.init.uniform_(matrices, -(inputs**-0.5), inputs**-0.5)
            self.register_parameter(name, nn.Parameter(matrices))
        self.become(mesh, group, Stored())


def check_hidden(hidden: int, mesh: DeviceMesh) -> None:
    """Raise HostIRError unless the ranks of a mesh divide the hidden features."""
    if hidden % mesh.size():
        raise error(f"its {mesh.size()} ranks do not divide the hidden features, which are {hidden}", user_span())
