"""Linear layers of tensor-parallel models as modules; their parameters are DTensors, as those of torch's styles are.

So state dicts, `torch.distributed.checkpoint`, optimizers and `fully_shard` treat them as they treat torch's own. A
module is an `nn.Linear` whose `forward` runs the functions of this package where these apply, and else, with a
`hi.FallbackWarning`, what torch's style does: collective and matmul of DTensors, one after the other.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from hostir.ir.source import described, error, user_span, warn_once
from hostir.torch.functional import column_parallel_linear, gated_linear, name_of, row_parallel_linear
from hostir.torch.ops.running import DTYPES, MACHINES, SETTINGS
from hostir.torch.reporting import LEDGER

LAST = Shard(-1)

# Placements ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layouts:
    """The placements of a layer's input and output on the ranks of a mesh.

    Fields:
        mesh: of one dimension.
        group: the name of its process group.
        input: the placement of inputs that are no DTensors.
        output: the placement of the output.
        local_output: whether the output is this rank's part as a plain tensor; else it is a DTensor.
        fp8: whether products are of operands in fp8.
    """

    mesh: DeviceMesh
    group: str
    input: Placement
    output: Placement
    local_output: bool = True
    fp8: bool = False

    def dtensor(self, x: Tensor) -> DTensor:
        """Return an input as a DTensor."""
        return x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [self.input], run_check=False)

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part of an input."""
        return x.to_local() if isinstance(x, DTensor) else x

    def given(self, y: Tensor) -> Tensor:
        """Return this rank's part of an output as the caller wants it."""
        return y if self.local_output else DTensor.from_local(y, self.mesh, [self.output], run_check=False)

    def redistributed(self, y: Any) -> Tensor:
        """Return an output of torch's, a DTensor, as the caller wants it."""
        y = y.redistribute(self.mesh, [self.output])
        return y.to_local() if self.local_output else y


def mesh_of(mesh: DeviceMesh, what: str = "layers") -> tuple[DeviceMesh, str]:
    """Return a mesh of one dimension, and the name of its group.

    Raises HostIRError for anything else: `what`, in words, cannot be sharded over it.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        expected = 'a DeviceMesh of one dimension, such as mesh["tp"]'
        raise error(f"{what} cannot be sharded over {described(mesh)}", user_span(), expected=expected)
    return mesh, name_of(mesh)


@torch._dynamo.assume_constant_result
def leave(name: str, group: str, why: str, what: str = "") -> None:
    """Say, once, why torch does what a layer is for; under torch.compile while the graph is traced.

    The report calls it `name`; messages say `what`, which may name the layer itself, for the first that is left so.
    """
    what = what or name
    if SETTINGS.strict:
        raise error(f"hostir cannot run {what}: {why}", user_span(), hint="without strict=True, torch runs it")
    message = f"torch runs {what}, and overlaps nothing: {why}."
    warn_once((name, why), message, "hostir.torch.report() counts the calls")
    LEDGER.left(name, group, why)


# Layers ---------------------------------------------------------------------------------------------------------------

Layer = TypeVar("Layer", bound="ShardedLinear")


class ShardedLinear(nn.Linear):
    """An `nn.Linear` whose parameters are DTensors over the ranks of a mesh.

    Fields:
        layouts: how inputs come and outputs go; the ranks.
        weights: the placements of weight and bias.
        input_axis, output_axis: those that are sharded, of plain tensors; None for whole ones. As ints of a module,
            they are constants of the graphs of torch.compile.
    """

    layouts: Layouts
    weights: tuple[Placement, Placement]
    input_axis: int | None
    output_axis: int | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layouts: Layouts,
        bias: bool,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.become(layouts, 0)

    def become(self, layouts: Layouts, source: int | None) -> None:
        """Shard the parameters, which are whole, over the ranks: those of rank `source`, or with None this rank's."""
        self.layouts = layouts
        self.input_axis, self.output_axis = (
            placement.dim if isinstance(placement, Shard) else None for placement in (layouts.input, layouts.output)
        )
        for (name, whole), placement in zip(self.named_parameters(), self.weights, strict=False):
            sharded = distribute_tensor(whole.data, layouts.mesh, [placement], src_data_rank=source)
            self.register_parameter(name, nn.Parameter(sharded, requires_grad=whole.requires_grad))

    @classmethod
    def converted(cls: type[Layer], linear: nn.Linear, layouts: Layouts, source: int | None = 0) -> Layer:
        """Return a layer with the parameters of `linear`, sharded."""
        if not isinstance(linear, nn.Linear):
            raise error(f"not a linear layer: {described(linear)}", user_span(), expected="a torch.nn.Linear")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        layer.become(layouts, source)
        return layer

    @classmethod
    @abstractmethod
    def unfit(cls, linear: nn.Linear, layouts: Layouts) -> str | None:
        """Return why calls cannot go through hostir, whatever their inputs; None if they can."""

    def unfit_call(self, x: Tensor) -> str | None:
        """Return why this call cannot go through hostir; None if it can. The same on all ranks."""
        layouts = self.layouts
        if why := self.unfit(self, layouts):
            return why
        if isinstance(x, DTensor) and x.device_mesh != layouts.mesh:
            return f"its input is on another mesh, {x.device_mesh}"
        if x.ndim < 2:
            return f"its input has {x.ndim} axes"
        if x.device.type not in MACHINES:
            return f"its input is on {x.device}"
        if not torch.is_autocast_enabled(x.device.type) and (x.dtype != self.weight.dtype or x.dtype not in DTYPES):
            return f"its input is {x.dtype}, its weight {self.weight.dtype}"
        if layouts.fp8 and x.dtype == torch.float64:
            return "its input is torch.float64, which is not quantized to fp8"
        return None

    def sharded_axis(self, x: Tensor) -> int | None:
        """Return the axis of an input that is sharded, counted from the first one; None if none is."""
        if isinstance(x, DTensor):
            given = x.placements[0]
            return given.dim if isinstance(given, Shard) else None
        return None if self.input_axis is None else self.input_axis % x.ndim

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's part of weight and bias."""
        weight: Any = self.weight
        bias: Any = self.bias
        if not isinstance(weight, DTensor) or weight.device_mesh != self.layouts.mesh:
            raise error(
                f"the weight of a {type(self).__name__} is not sharded over the ranks of its group alone",
                user_span(),
                expected="a call of a module around which fully_shard, if used, has gathered the parameters",
                hint="layers that share a gather need one fully_shard around all of them",
            )
        if bias is not None:
            own_tokens = isinstance(bias.placements[0], Replicate) and self.output_axis is not None
            bias = bias.to_local(grad_placements=[Partial()] if own_tokens else None)
        return local_weight(weight), bias

    def extra_repr(self) -> str:
        layouts = self.layouts
        fp8 = ", fp8" * layouts.fp8
        return f"{super().extra_repr()}, {layouts.mesh.size()} ranks, {layouts.input} -> {layouts.output}{fp8}"


class _WideGradient(torch.autograd.Function):
    """This rank's part of a weight, of which the gradient arrives in the dtype that the weight says."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.lies = weight.device_mesh, weight.placements, weight.shape, weight.stride()
        part = weight.to_local().detach()
        part.grad_dtype = weight.grad_dtype  # or autograd rounds a gradient to the dtype of what it is of
        return part

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        mesh, placements, shape, stride = ctx.lies
        return DTensor.from_local(dy, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_weight(weight: DTensor) -> Tensor:
    """Return this rank's part of a weight; with a `grad_dtype` of its own, operators give its gradient in that."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not weight.requires_grad:
        return weight.to_local()
    if not weight.is_leaf or weight.grad_dtype in (None, weight.dtype):
        return weight.to_local()
    part: Any = _WideGradient.apply(weight)
    part.dtype_of_gradient = weight.grad_dtype
    return part


def _indivisible(what: str, length: int, layouts: Layouts) -> str | None:
    ranks = layouts.mesh.size()
    return f"its {ranks} ranks do not divide {what}, which are {length}" if length % ranks else None


def _uneven(x: Tensor, axis: int, layouts: Layouts) -> str | None:
    """Return why parts of an axis are not equal; those of plain tensors are taken to be."""
    ranks = layouts.mesh.size()
    uneven = isinstance(x, DTensor) and x.shape[axis] % ranks
    return f"its {ranks} ranks do not divide axis {axis}, which is {x.shape[axis]}" if uneven else None


class ColumnParallelLinear(ShardedLinear):
    """The first linear layer of a pair: gathers the tokens, and computes this rank's columns of the output.

    Its input is this rank's tokens, `[..., in_features]`; its output `[..., out_features/ranks]` of all tokens. Either
    may be a DTensor, sharded on the axis of the tokens and on the last one. `weight` and `bias` are sharded on rows.

    Args:
        in_features, out_features: of the whole layer.
        mesh: a DeviceMesh of one dimension; its ranks divide `out_features`.
        bias: whether there is one.
        gather_dim: the axis of the tokens, not the last one; with None every rank has all tokens.
        local_output: whether the output is a plain tensor, this rank's part.
        fp8: whether products are of operands in fp8, as of `column_parallel_linear`; parameters are as they were.
        device, dtype: of the parameters, as of `nn.Linear`. Rank 0's are those of all ranks.
    """

    weights = (Shard(0), Shard(0))

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        *,
        bias: bool = True,
        gather_dim: int | None = 0,
        local_output: bool = True,
        fp8: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layouts = Layouts(*mesh_of(mesh), _tokens(gather_dim), LAST, local_output, fp8)
        super().__init__(in_features, out_features, layouts, bias, device, dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        mesh: DeviceMesh,
        *,
        gather_dim: int | None = 0,
        local_output: bool = True,
        fp8: bool = False,
    ) -> ColumnParallelLinear:
        """Return a sharded layer that computes what a whole one does, with the parameters that rank 0 has."""
        return cls.converted(linear, Layouts(*mesh_of(mesh), _tokens(gather_dim), LAST, local_output, fp8))

    @classmethod
    def unfit(cls, linear: nn.Linear, layouts: Layouts) -> str | None:
        if not isinstance(layouts.input, (Shard, Replicate)):
            return f"inputs are {layouts.input}, neither sharded on tokens nor whole"
        if layouts.fp8 and not isinstance(layouts.input, Shard):
            return "inputs are whole, and fp8 is for tokens that are gathered"
        if layouts.input == LAST:
            return "inputs are sharded on the axis that the product sums over"
        if layouts.output != LAST:
            return f"outputs are {layouts.output}, not sharded on the last axis"
        return _indivisible("its out_features", linear.out_features, layouts)

    def unfit_call(self, x: Tensor) -> str | None:
        if why := super().unfit_call(x):
            return why
        axis = self.sharded_axis(x)
        if axis is None and isinstance(x, DTensor) and not x.placements[0].is_replicate():
            return f"its input is {x.placements[0]}, neither sharded on tokens nor whole"
        if axis is None:
            return "its input is whole, and fp8 is for tokens that are gathered" if self.layouts.fp8 else None
        if axis == x.ndim - 1:
            return "its input is sharded on the axis that the product sums over"
        return _uneven(x, axis, self.layouts)

    def forward(self, input: Tensor) -> Tensor:
        return columns(input, [self])[0]


def columns(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> list[Tensor]:
    """Return the outputs of layers that all have the input x, which is gathered once."""
    layouts = layers[0].layouts
    if why := next(filter(None, [layer.unfit_call(x) for layer in layers]), None):
        leave("ColumnParallelLinear", layouts.group, why)
        whole = layouts.dtensor(x).redistribute(layouts.mesh, [Replicate()])
        return [layer.layouts.redistributed(F.linear(whole, layer.weight, layer.bias)) for layer in layers]
    axis = layers[0].sharded_axis(x)
    weights, biases = zip(*(layer.parts() for layer in layers), strict=True)
    wanted = None if all(bias is None for bias in biases) else biases
    outputs = column_parallel_linear(layouts.local(x), weights, layouts.group, wanted, gather_dim=axis, fp8=layouts.fp8)
    return [layer.layouts.given(y) for layer, y in zip(layers, outputs, strict=True)]


class RowParallelLinear(ShardedLinear):
    """The second linear layer of a pair: multiplies this rank's columns, sums over the ranks, scatters the tokens.

    Its input is this rank's columns of all tokens, `[..., in_features/ranks]`; its output this rank's tokens,
    `[..., out_features]`. Either may be a DTensor, sharded on the last axis and on that of the tokens. `weight` is
    sharded on its columns; `bias` is whole, and its gradient Partial where the tokens are scattered.

    Args:
        in_features, out_features: of the whole layer.
        mesh: a DeviceMesh of one dimension; its ranks divide `in_features`.
        bias: whether there is one.
        scatter_dim: the axis of the tokens, not the last one; with None every rank gets all tokens.
        local_output: whether the output is a plain tensor, this rank's part.
        fp8: whether products are of operands in fp8, as of `column_parallel_linear`; parameters are as they were.
        device, dtype: of the parameters, as of `nn.Linear`. Rank 0's are those of all ranks.
    """

    weights = (Shard(1), Replicate())

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        *,
        bias: bool = True,
        scatter_dim: int | None = 0,
        local_output: bool = True,
        fp8: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layouts = Layouts(*mesh_of(mesh), LAST, _tokens(scatter_dim), local_output, fp8)
        super().__init__(in_features, out_features, layouts, bias, device, dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        mesh: DeviceMesh,
        *,
        scatter_dim: int | None = 0,
        local_output: bool = True,
        fp8: bool = False,
    ) -> RowParallelLinear:
        """Return a sharded layer that computes what a whole one does, with the parameters that rank 0 has."""
        return cls.converted(linear, Layouts(*mesh_of(mesh), LAST, _tokens(scatter_dim), local_output, fp8))

    @classmethod
    def unfit(cls, linear: nn.Linear, layouts: Layouts) -> str | None:
        if layouts.input != LAST:
            return f"inputs are {layouts.input}, not sharded on the last axis"
        if not isinstance(layouts.output, (Shard, Replicate)):
            return f"outputs are {layouts.output}, neither sharded on tokens nor whole"
        if layouts.output == LAST:
            return "outputs are sharded on the last axis, not on that of the tokens"
        if layouts.fp8 and not isinstance(layouts.output, Shard):
            return "outputs are whole, and products in fp8 are not summed on all ranks"
        return _indivisible("its in_features", linear.in_features, layouts)

    def unfit_call(self, x: Tensor) -> str | None:
        if why := super().unfit_call(x):
            return why
        if self.sharded_axis(x) != x.ndim - 1:
            return "its input is not sharded on the last axis"
        if self.output_axis is None:
            return None
        axis = self.output_axis % x.ndim
        if axis == x.ndim - 1:
            return "its output is sharded on the last axis, not on that of the tokens"
        return _indivisible(f"axis {axis} of its input", x.shape[axis], self.layouts)

    def forward(self, input: Tensor) -> Tensor:
        layouts = self.layouts
        if why := self.unfit_call(input):
            leave("RowParallelLinear", layouts.group, why)
            mine = layouts.dtensor(input).redistribute(layouts.mesh, [LAST])
            return layouts.redistributed(F.linear(mine, self.weight, self.bias))
        weight, bias = self.parts()
        how: Any = {"reduce": "all"} if self.output_axis is None else {"scatter_dim": self.output_axis}
        y = row_parallel_linear(layouts.local(input), weight, layouts.group, bias, fp8=layouts.fp8, **how)
        return layouts.given(y)


def _tokens(axis: int | None) -> Placement:
    return Replicate() if axis is None else Shard(axis)


# Layers that share a gather -------------------------------------------------------------------------------------------


class SharedGather:
    """Layers that are called one after the other with one input: the first call gathers it and computes all of them.

    The results that are not yet asked for are kept until they are, until a call with another input or after a change
    of a parameter, or until a backward pass through any of them, which frees the graph that they share.
    """

    def __init__(self, layers: Sequence[SharingLinear]) -> None:
        self.layers = [*layers]
        self.input: Tensor | None = None
        self.state: tuple[Any, ...] = ()
        self.number = 0  # of the results that are kept
        self.outputs: list[Tensor | None] = [None] * len(self.layers)

    def output(self, layer: SharingLinear, x: Tensor) -> Tensor:
        """Return the output of one of the layers."""
        index = next(i for i, each in enumerate(self.layers) if each is layer)
        counts = not torch.compiler.is_compiling()
        read = [x, *(p for each in self.layers for p in each.parameters())] if counts else []
        seen = [(id(y), 0 if y.is_inference() else y._version) for y in read]  # there writes are not counted
        state = (*seen, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type))
        if self.input is not x or self.state != state or self.outputs[index] is None:
            self.input, self.state, self.outputs = x, state, [*columns(x, self.layers)]
            self.number += counts
        result = self.outputs[index]
        assert result is not None, "it was computed"
        self.outputs[index] = None
        if counts and result.requires_grad:
            result.register_hook(partial(_forget, weakref.ref(self), self.number))
        if all(y is None for y in self.outputs):
            self.input = None
        return result


def _forget(shared: weakref.ref[SharedGather], number: int, grad: Tensor) -> None:
    """Drop the results that were computed with the one of which this is the gradient."""
    found = shared()
    if found is not None and found.number == number:
        found.input, found.outputs = None, [None] * len(found.layers)


class SharingLinear(ColumnParallelLinear):
    """A ColumnParallelLinear whose input is gathered for others, too."""

    shared: SharedGather

    def forward(self, input: Tensor) -> Tensor:
        return self.shared.output(self, input)


class QKVParallelLinear(nn.Module):
    """The projections of attention behind one gather: returns q, k and v of all tokens, this rank's heads of each.

    Its layers `q`, `k` and `v` are ColumnParallelLinear; state dicts have those names.

    Args:
        features: of the input.
        q_features, kv_features: of the outputs, over all ranks: the number of heads times the size of one.
        mesh, bias, gather_dim, fp8, device, dtype: as of ColumnParallelLinear.
    """

    def __init__(
        self,
        features: int,
        q_features: int,
        kv_features: int,
        mesh: DeviceMesh,
        *,
        bias: bool = False,
        gather_dim: int | None = 0,
        fp8: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def layer(width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                features, width, mesh, bias=bias, gather_dim=gather_dim, fp8=fp8, device=device, dtype=dtype
            )

        self.q, self.k, self.v = layer(q_features), layer(kv_features), layer(kv_features)

    @classmethod
    def from_linear(
        cls,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        mesh: DeviceMesh,
        *,
        gather_dim: int | None = 0,
        fp8: bool = False,
    ) -> QKVParallelLinear:
        """Return sharded projections that compute what three whole ones do, with the parameters that rank 0 has."""
        convert = lambda x: ColumnParallelLinear.from_linear(x, mesh, gather_dim=gather_dim, fp8=fp8)  # noqa: E731
        return _assembled(cls, convert, q=q, k=k, v=v)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = columns(x, [self.q, self.k, self.v])
        return q, k, v


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`: one gather before, a reduce-scatter after; this rank's tokens in and out.

    Its layers `gate`, `up` and `down` have no biases. The two products are computed again in the backward call, which
    saves `tokens x 3 x hidden/ranks` numbers of memory; not so in fp8.

    Args:
        features: of input and output.
        hidden: the width between, over all ranks.
        mesh, fp8, device, dtype: as of ColumnParallelLinear.
        sequence_dim: the axis of the tokens; with None every rank has all tokens, before and after.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        mesh: DeviceMesh,
        *,
        sequence_dim: int | None = 0,
        fp8: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": False, "fp8": fp8, "device": device, "dtype": dtype}
        self.gate = ColumnParallelLinear(features, hidden, mesh, gather_dim=sequence_dim, **made)
        self.up = ColumnParallelLinear(features, hidden, mesh, gather_dim=sequence_dim, **made)
        self.down = RowParallelLinear(hidden, features, mesh, scatter_dim=sequence_dim, **made)

    @classmethod
    def from_linear(
        cls,
        gate: nn.Linear,
        up: nn.Linear,
        down: nn.Linear,
        mesh: DeviceMesh,
        *,
        sequence_dim: int | None = 0,
        fp8: bool = False,
    ) -> GatedMLP:
        """Return a sharded MLP that computes what three whole layers do, with the parameters that rank 0 has."""
        if any(each.bias is not None for each in (gate, up)):
            raise error("gate and up have biases", user_span(), expected="layers without, as of Llama's MLP")
        convert = lambda x: ColumnParallelLinear.from_linear(x, mesh, gather_dim=sequence_dim, fp8=fp8)  # noqa: E731
        mlp = _assembled(cls, convert, gate=gate, up=up)
        mlp.down = RowParallelLinear.from_linear(down, mesh, scatter_dim=sequence_dim, fp8=fp8)
        return mlp

    def forward(self, x: Tensor) -> Tensor:
        gate, up, layouts, axis = self.gate, self.up, self.gate.layouts, self.gate.sharded_axis(x)
        if axis is None or layouts.fp8 or gate.unfit_call(x) or up.unfit_call(x):
            g, u = columns(x, [gate, up])
            return self.down(F.silu(g) * u)
        return self.down(gated_linear(layouts.local(x), gate.parts()[0], up.parts()[0], layouts.group, gather_dim=axis))


Container = TypeVar("Container", bound=nn.Module)


def _assembled(cls: type[Container], convert: Callable[[nn.Linear], nn.Module], **layers: nn.Linear) -> Container:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, layer in layers.items():
        setattr(module, name, convert(layer))
    return module
