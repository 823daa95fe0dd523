"""Warn of models that compute or train something else once a style has sharded one of their layers.

A style sees one layer. The modules around it are searched in the model that `parallelize_module` was called with.
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
    """Warns that a model may compute or train something else once a layer is sharded."""


@dataclass(frozen=True)
class Place:
    """A module and its place in a model; as text, its path and type, such as `layers.3.mlp (MLP)`.

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
        """Return the place of a module that a style is being applied to."""
        root = module
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # parallelize_module calls itself for parts; the outermost call has the model
            if frame.f_code is parallelize_module.__code__:
                root = frame.f_locals["module"]
            frame = frame.f_back
        path = next((name for name, each in root.named_modules() if each is module), "")
        return Place(module, root, path)

    def child(self, name: str, module: nn.Module) -> Place:
        """Return the place of a module in this one."""
        return Place(module, self.root, f"{self.path}.{name}" if self.path else name)

    @property
    def name(self) -> str:
        """The module's name in the module around it."""
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> nn.Module | None:
        """The module around this one; None for the model itself."""
        return self.root.get_submodule(self.path.rpartition(".")[0]) if self.path else None

    def __str__(self) -> str:
        name = type(self.module).__name__
        return f"{self.path} ({name})" if self.path else name


def warn_of_traps(place: Place, mesh: DeviceMesh, *, columns: bool, local: bool) -> None:
    """Warn, on rank 0, of the traps of a model, of each one once.

    Args:
        place: the place of the layer that a style is about to shard.
        mesh: the ranks.
        columns: whether each rank gets columns of the output.
        local: whether the output is this rank's part as a plain tensor.
    """
    if not is_first_rank():
        return
    for trap, warning in _traps(place, mesh, columns, local):
        warned = _warned.setdefault(place.root, set())
        if warning is not None and trap not in warned:
            warned.add(trap)
            warn_user(warning, ShardingWarning)


_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # by model: the traps with a warning


def _traps(place: Place, mesh: DeviceMesh, columns: bool, local: bool) -> Iterator[tuple[str, Diagnostic | None]]:
    """Yield the name of each possible trap, with a warning if the layer is in it."""
    yield "tied", _tied(place, mesh)
    yield "compiled", _compiled(place)
    if columns and local and isinstance(place.module, nn.Linear):
        yield "heads", _cut_heads(place, place.module.out_features, mesh.size())
        yield "fused", _fused(place, mesh.size())


def _warning(message: str, expected: str, hint: str) -> Diagnostic:
    return Diagnostic(message, expected=expected, hint=hint, level="warning")


def _compiled(place: Place) -> Diagnostic | None:
    """Return a warning if `torch.compile` has wrapped another part of the model: a plan finds no layers in it."""
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
    """Return a warning if another module of the model has the same weight."""
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
    """Return True if a module has this weight, or had it before a style sharded the module."""
    other = module._parameters.get("weight")
    return other is weight or (isinstance(module, nn.Embedding) and _was_tied(other, weight, mesh))


def _was_tied(sharded: Tensor | None, weight: Tensor, mesh: DeviceMesh) -> bool:
    """Return True if a sharded weight has the values of an unsharded one, on rank 0, which has the first part.

    Such weights were tied before a style sharded one of them: no two weights are initialized alike.
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
    """Return a warning if ranks would get parts of attention heads; the module around the layer has the head size."""
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
    """Return the size of an attention head, from attributes such as `head_dim`; 0 unless they agree."""
    attributes = vars(module) if module is not None else {}
    sizes = {
        value
        for name, value in attributes.items()
        if isinstance(value, int) and value > 0 and re.search(r"head_?(dim|size)|(dim|d)_head$", name, re.IGNORECASE)
    }
    return sizes.pop() if len(sizes) == 1 else 0


def _fused(place: Place, ranks: int) -> Diagnostic | None:
    """Return a warning if the name of a layer, such as `qkv`, says that it computes several things at once."""
    parts = next((parts for pattern, parts in FUSED.items() if re.search(pattern, place.name, re.IGNORECASE)), None)
    if parts is None or ranks == 1:
        return None
    return _warning(
        f"{place} seems to compute {parts} at once. Each of the {ranks} ranks gets consecutive columns, so that "
        f"chunk() or split() of a rank's output does not give its {parts}.",
        f"rows of the weight in the order of the ranks, each rank's rows of {parts} together",
        "torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in weight.chunk(count)]) orders them",
    )
