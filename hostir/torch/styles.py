"""Styles for torch's `parallelize_module`: a plain model becomes tensor-parallel, its linear layers those of hostir.

Each has the arguments of torch's style of that name, and what hostir cannot do is left to that style, with a
`hi.FallbackWarning` that says why.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import style
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


class ColwiseParallel(style.ColwiseParallel):
    """Shard an `nn.Linear` on its output columns; its input, sharded on tokens, is gathered while it is multiplied.

    With names, a style of the module that holds layers so called: all of them get the input that the first one is
    called with, which is gathered once: `"attention": ColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))`.

    Args:
        names: of linear layers in the module, called with one input.
        input_layouts: the placement of inputs that are no DTensors; hostir runs `Shard(d)`, not of the last axis, and
            `Replicate()`, the default: then the gradient of the input is summed beside those of the weights.
        output_layouts: the placement of the output; hostir runs `Shard(-1)`, the default.
        use_local_output: whether the output is a plain tensor, this rank's part.
        fp8: whether products are of operands in fp8, as of `column_parallel_linear`; parameters are as they were.
    """

    def __init__(
        self,
        *names: str,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        fp8: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
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
    """Return a linear layer that the module at a place holds."""
    _refuse_compiled(place)
    module = place.module
    found = getattr(module, name, None)
    if isinstance(found, OptimizedModule):
        _refuse_compiled(place.child(name, found))
    if isinstance(found, nn.Linear):
        return place.child(name, found)
    has = [each for each, child in module.named_children() if isinstance(child, nn.Linear)]
    raise error(
        f"{place} has no linear layer '{name}'",
        user_span(),
        expected=f"one of {', '.join(has)}" if has else "a module with linear layers",
    )


class RowwiseParallel(style.RowwiseParallel):
    """Shard an `nn.Linear` on its input columns; its products are summed over the ranks while others are computed.

    Args:
        input_layouts: the placement of inputs that are no DTensors; hostir runs `Shard(-1)`, the default.
        output_layouts: the placement of the output; hostir runs `Shard(d)`, not of the last axis, and `Replicate()`,
            the default.
        use_local_output: whether the output is a plain tensor, this rank's part.
        fp8: whether products are of operands in fp8, as of `column_parallel_linear`; parameters are as they were.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        fp8: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.fp8 = fp8

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _replaced(self, super()._apply, RowParallelLinear, Place.of(module), device_mesh)


def _replaced(
    given: ColwiseParallel | RowwiseParallel,
    torchs: Any,
    kind: type[ShardedLinear],
    place: Place,
    device_mesh: DeviceMesh,
) -> nn.Module:
    """Make a layer one of hostir, in place, or leave it to torch's style."""
    module: Any = place.module
    _refuse(given, place)
    mesh, group = mesh_of(device_mesh, str(place))
    layouts = Layouts(mesh, group, given.input_layouts[0], given.output_layouts[0], given.use_local_output, given.fp8)
    warn_of_traps(place, mesh, columns=isinstance(given, ColwiseParallel), local=given.use_local_output)
    why = unfit(module, kind, layouts)
    if why is None:
        module.__class__ = kind
        module.become(layouts, given.src_data_rank)
        return module
    name = f"hostir.torch.{type(given).__name__}"
    leave(f"{name} of {type(module).__name__}", layouts.group, why, f"{name} of {place}")
    return torchs(module, device_mesh)


def _refuse(given: ColwiseParallel | RowwiseParallel, place: Place) -> None:
    """Raise HostIRError for modules that neither hostir nor torch can shard by a style."""
    module, name = place.module, type(given).__name__
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
    """Raise HostIRError for a module that `torch.compile` has wrapped: plans find no layers in the wrapper."""
    if isinstance(place.module, OptimizedModule):
        raise error(
            f"{place} is compiled already",
            user_span(),
            expected="a plan that is applied first: parallelize_module, then torch.compile",
            hint="module.compile() compiles a module in place, before or after",
        )


def unfit(module: nn.Module, kind: type[ShardedLinear], layouts: Layouts) -> str | None:
    """Return why a module cannot become a layer of hostir; None if it can."""
    if type(module) is not nn.Linear:
        return "it is not an nn.Linear itself, and what it computes is its own"
    return kind.unfit(module, layouts)
