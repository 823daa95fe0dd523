"""Warn if sharding a layer would break a model: the model would run, but compute or train something else.

Examples are tied weights and attention heads that are split between ranks. `parallelize_module` shows a style only the
layer to shard, not the model. So this module finds the model in the stack frame of `parallelize_module`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from hostir.ir.source import Diagnostic, counted, is_first_rank, warn_user


class ShardingWarning(UserWarning):
    """A warning that sharding a layer may change what the model computes or how it trains."""


@dataclass(frozen=True)
class Place:
    """A module and its position in a model. Its text is the path and the type, such as `layers.3.mlp (MLP)`.

    Fields:
        module: the module.
        root: the model that `parallelize_module` was called with; without such a call, the module itself.
        path: the module's path in the model, such as `layers.3.mlp`; empty for the model itself.
    """

    module: nn.Module
    root: nn.Module
    path: str

    @staticmethod
    def of(module: nn.Module) -> Place:
        """Return the place of `module`. Finds the model in the calls of `parallelize_module` on the Python stack."""
        root = module
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # parallelize_module calls itself for parts; the outermost call has the model
            if frame.f_code is parallelize_module.__code__:
                root = frame.f_locals["module"]
            frame = frame.f_back
        path = next((name for name, each in root.named_modules() if each is module), "")
        return Place(module, root, path)

    def child(self, name: str, module: nn.Module) -> Place:
        """Return the place of `module`, which is the child `name` of this place's module."""
        return Place(module, self.root, f"{self.path}.{name}" if self.path else name)

    @property
    def name(self) -> str:
        """The name of the attribute under which the parent module holds this module. Empty for the model itself."""
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> nn.Module | None:
        """The module that holds this module. None for the model itself."""
        return self.root.get_submodule(self.path.rpartition(".")[0]) if self.path else None

    def __str__(self) -> str:
        name = type(self.module).__name__
        return f"{self.path} ({name})" if self.path else name


def warn_of_traps(place: Place, mesh: DeviceMesh, *, columns: bool, local: bool) -> None:
    """Warn on rank 0 of each trap that sharding a layer runs into. For each model, warn of a trap only once.

    Args:
        place: the place of the layer that a style is about to shard.
        mesh: the mesh that the layer is sharded over.
        columns: True for a column-parallel layer, False for a row-parallel layer.
        local: True if the layer returns this rank's part as a plain tensor, and not a DTensor.
    """
    if not is_first_rank():
        return
    for trap, warning in _traps(place, mesh, columns, local):
        warned = _warned.setdefault(place.root, set())
        if warning is not None and trap not in warned:
            warned.add(trap)
            warn_user(warning, ShardingWarning)


_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # by model: the traps that it was warned of


def _traps(place: Place, mesh: DeviceMesh, columns: bool, local: bool) -> Iterator[tuple[str, Diagnostic | None]]:
    """Check a layer for each trap. Yield the name of the trap, and a warning if the layer runs into it, else None."""
    yield "tied", _tied(place, mesh)
    yield "compiled", _compiled(place)
    if columns and local and isinstance(place.module, nn.Linear):
        yield "heads", _cut_heads(place, place.module.out_features, mesh.size())
        yield "fused", _fused(place, mesh.size())


def _warning(message: str, expected: str, hint: str) -> Diagnostic:
    return Diagnostic(message, expected=expected, hint=hint, level="warning")


def _compiled(place: Place) -> Diagnostic | None:
    """Return a warning if `torch.compile` has wrapped another part of the model, or None.

    A plan for `parallelize_module` does not find the layers in that part.
    """
    wrapped = (name for name, each in place.root.named_modules() if name and isinstance(each, OptimizedModule))
    path = next((name for name in wrapped if not place.path.startswith(f"{name}.")), None)
    if path is None:
        return None
    return _warning(
        f"{path} is compiled already, and a plan does not find the layers in it.",
        "parallelize_module first, then torch.compile",
        "module.compile() compiles a module in place, before or after",
    )


def _tied(place: Place, mesh: DeviceMesh) -> Diagnostic | None:
    """Return a warning if another module of the model has the same weight, or None."""
    weight = place.module.weight
    assert isinstance(weight, Tensor)
    modules = [(name, each) for name, each in place.root.named_modules() if each is not place.module]
    other = next((name for name, each in modules if _has(each, weight, mesh)), None)
    if other is None:
        return None
    return _warning(
        f"{place} and {other} share one weight. Each gets its own when it is sharded, and training moves them apart.",
        "one parameter for both, with one placement",
        f"shard both on their rows, and then tie them again: model.{place.path}.weight = model.{other}.weight",
    )


def _has(module: nn.Module, weight: Tensor, mesh: DeviceMesh) -> bool:
    """Return True if `module` has this weight, or had it before a style sharded `module`."""
    other = module._parameters.get("weight")
    return other is weight or (isinstance(module, nn.Embedding) and _was_tied(other, weight, mesh))


def _was_tied(sharded: Tensor | None, weight: Tensor, mesh: DeviceMesh) -> bool:
    """Return True if `sharded` was probably the same parameter as `weight` before a style sharded it.

    The first rank compares the values of its part of `sharded` with `weight`. The other ranks return False. If the
    values are equal, the two were tied, because separate weights are initialized with different random numbers.
    """
    if not isinstance(sharded, DTensor) or isinstance(weight, DTensor) or sharded.device_mesh != mesh:
        return False
    placement, part = sharded.placements[0], sharded.to_local()
    if not isinstance(placement, Shard) or sharded.shape != weight.shape or weight.is_meta or mesh.get_local_rank():
        return False
    first = weight.narrow(placement.dim, 0, part.shape[placement.dim])
    return part.device == first.device and bool(part.any()) and torch.equal(part, first)


FUSED = {r"qkv|c_attn": "q, k and v", r"gate_up": "gate and up"}


def _cut_heads(place: Place, width: int, ranks: int) -> Diagnostic | None:
    """Return a warning if sharding would split attention heads between ranks, or None.

    `width` is the number of the layer's outputs. The head size is an attribute of the module around the layer.
    """
    size = _head_size(place.parent)
    if not size or width % size or width % ranks or width // ranks % size == 0:
        return None
    heads = width // size
    hint = "take fewer ranks"
    if ranks % heads == 0:
        rows = f"weight.unflatten(0, ({heads}, {size})).repeat_interleave({ranks // heads}, 0).flatten(0, 1)"
        hint += f"; or, for inference, give each head to {ranks // heads} of them: {rows}"
    return _warning(
        f"{place} computes {counted(heads, 'head')} of {size} columns, and each of the {ranks} ranks gets "
        f"{width // ranks} columns: no whole head.",
        "as many heads as the ranks divide, of keys and values as well",
        hint,
    )


def _head_size(module: nn.Module | None) -> int:
    """Return the size of an attention head from attributes of `module` such as `head_dim`.

    Returns 0 if there is no such attribute, or if several have different values.
    """
    attributes = vars(module) if module is not None else {}
    sizes = {
        value
        for name, value in attributes.items()
        if isinstance(value, int) and value > 0 and re.search(r"head_?(dim|size)|(dim|d)_head$", name, re.IGNORECASE)
    }
    return sizes.pop() if len(sizes) == 1 else 0


def _fused(place: Place, ranks: int) -> Diagnostic | None:
    """Return a warning if the layer's name, such as `qkv`, suggests that its weight holds several projections."""
    parts = next((parts for pattern, parts in FUSED.items() if re.search(pattern, place.name, re.IGNORECASE)), None)
    if parts is None or ranks == 1:
        return None
    return _warning(
        f"{place} seems to compute {parts} at once. Each of the {ranks} ranks gets consecutive columns, so that "
        f"chunk() or split() of a rank's output does not give its {parts}.",
        f"rows of the weight in the order of the ranks, each rank's rows of {parts} together",
        "torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in weight.chunk(count)]) orders them",
    )
