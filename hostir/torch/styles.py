"""Styles for torch's `parallelize_module`: they turn linear layers of a model into tensor-parallel layers of hostir.

Each style takes the arguments of torch's style with the same name. If hostir cannot run a layer or a call, torch's
style runs it, and a `hi.FallbackWarning` says why.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel
from torch.distributed.tensor.placement_types import Placement

from hostir.ir.source import error, user_span
from hostir.torch.modules import (
    ColumnParallelLinear,
    Layouts,
    RowParallelLinear,
    ShardedLinear,
    SharedGather,
    SharingLinear,
    leave,
    mesh_of,
)
from hostir.torch.traps import Place, warn_of_traps


class StyleOptions(TypedDict, total=False):
    """The options that both styles pass on to torch's styles. The docstrings of the two styles explain the options."""

    input_layouts: Placement | None
    output_layouts: Placement | None
    use_local_output: bool


class ColwiseParallel(parallel.ColwiseParallel):
    """A style that shards an `nn.Linear` on its output columns. The layer overlaps the all-gather of its input.

    Without names, apply the style to a linear layer. With names, apply it to a module that has linear layers with these
    names and calls them with one input. The layer that is called first gathers the input for all of them. Example:
    `"attention": ColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))`.

    Args:
        names: the names of the linear layers in the module.
        input_layouts: the placement of inputs that are plain tensors. The default is `Replicate()`. With it, nothing is
            gathered, and backward sums the gradient of the input over the ranks while it computes the gradients of the
            weights. hostir runs `Replicate()`, and `Shard(d)` unless d is the last axis.
        output_layouts: the placement of the output. hostir runs `Shard(-1)`, the default.
        use_local_output: True, the default, to return this rank's part as a plain tensor. False to return a DTensor.
        fp8: True to multiply in fp8, as in `column_parallel_linear`. The parameters keep their dtype.
    """

    def __init__(self, *names: str, fp8: bool = False, **options: Unpack[StyleOptions]) -> None:
        super().__init__(**options)
        self.names, self.fp8 = names, fp8

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place = Place.of(module)
        if not self.names:
            return _replaced(self, super()._apply, ColumnParallelLinear, place, device_mesh)
        layers = [_layer(place, name) for name in self.names]
        for layer in layers:
            _replaced(self, super()._apply, SharingLinear, layer, device_mesh)
        sharing = [layer.module for layer in layers if isinstance(layer.module, SharingLinear)]
        shared = SharedGather(sharing)
        for each in sharing:
            each.shared = shared
        return module


def _layer(place: Place, name: str) -> Place:
    """Return the place of the linear layer `name` in the module at `place`.

    Raises HostIRError if the module has no such layer.
    """
    _refuse_compiled(place)
    module = place.module
    layer = getattr(module, name, None)
    if isinstance(layer, OptimizedModule):
        _refuse_compiled(place.child(name, layer))
    if isinstance(layer, nn.Linear):
        return place.child(name, layer)
    has = [each for each, child in module.named_children() if isinstance(child, nn.Linear)]
    raise error(
        f"{place} has no linear layer '{name}'",
        user_span(),
        expected=f"one of {', '.join(has)}" if has else "a module with linear layers",
    )


class RowwiseParallel(parallel.RowwiseParallel):
    """A style that shards an `nn.Linear` on its input columns. The layer overlaps its matmul with the sum over ranks.

    Args:
        input_layouts: the placement of inputs that are plain tensors. hostir runs `Shard(-1)`, the default.
        output_layouts: the placement of the output. hostir runs `Replicate()`, the default, and `Shard(d)` unless d is
            the last axis.
        use_local_output, fp8: as for ColwiseParallel.
    """

    def __init__(self, *, fp8: bool = False, **options: Unpack[StyleOptions]) -> None:
        super().__init__(**options)
        self.fp8 = fp8

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _replaced(self, super()._apply, RowParallelLinear, Place.of(module), device_mesh)


def _replaced(
    style: ColwiseParallel | RowwiseParallel,
    torchs: Any,
    layer: type[ShardedLinear],
    place: Place,
    device_mesh: DeviceMesh,
) -> nn.Module:
    """Turn the linear layer at `place` into a layer of hostir, in place; return it.

    If hostir cannot run the layer, warn, and apply torch's style. `torchs` is the method `_apply` of torch's style.
    """
    module: Any = place.module
    _refuse(style, place)
    mesh, group = mesh_of(device_mesh, str(place))
    layouts = Layouts(mesh, group, style.input_layouts[0], style.output_layouts[0], style.use_local_output, style.fp8)
    warn_of_traps(place, mesh, columns=isinstance(style, ColwiseParallel), local=style.use_local_output)
    if type(module) is nn.Linear:
        why = layer.unfit(module, layouts, layouts.input)
    else:
        why = "it is not an nn.Linear itself, and what it computes is its own"
    if why is None:
        module.__class__ = layer
        module.become(layouts, style.src_data_rank)
        return module
    name = f"hostir.torch.{type(style).__name__}"
    leave(f"{name} of {type(module).__name__}", layouts.group, why, f"{name} of {place}")
    return torchs(module, device_mesh)


def _refuse(style: ColwiseParallel | RowwiseParallel, place: Place) -> None:
    """Raise HostIRError unless the module at `place` is a linear or embedding layer that a style can still shard.

    The layer must not be sharded, and `torch.compile` must not have wrapped it.
    """
    module, name = place.module, type(style).__name__
    _refuse_compiled(place)
    if isinstance(module, ShardedLinear):
        expected = "one style for each layer, applied once"
        raise error(f"{place} is sharded already, and {name} would shard it again", user_span(), expected=expected)
    if isinstance(module, nn.Linear | nn.Embedding):
        return
    layers = [f'"{each}"' for each, child in module.named_children() if isinstance(child, nn.Linear)]
    hint = f"ColwiseParallel({', '.join(layers)}) shards its layers, if all have one input" if layers else ""
    raise error(f"{name} cannot shard {place}", user_span(), expected="an nn.Linear or an nn.Embedding", hint=hint)


def _refuse_compiled(place: Place) -> None:
    """Raise HostIRError for a module that `torch.compile` has wrapped.

    A plan for `parallelize_module` refers to layers by their names. The wrapper changes these names.
    """
    if isinstance(place.module, OptimizedModule):
        raise error(
            f"{place} is compiled already",
            user_span(),
            expected="a plan that is applied first: parallelize_module, then torch.compile",
            hint="module.compile() compiles a module in place, before or after",
        )
