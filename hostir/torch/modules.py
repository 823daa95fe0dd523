"""Modules for the linear layers of tensor-parallel models.

Their parameters are DTensors, as with torch's styles. So state dicts, `torch.distributed.checkpoint`, optimizers and
`fully_shard` work as they do with torch's styles. `ColumnParallelLinear` and `RowParallelLinear` are `nn.Linear`s.
Their `forward` calls the functions of `hostir.torch`. If hostir cannot run a call, the layer runs a collective and a
matmul of DTensors one after the other, as torch's style does, and a `hi.FallbackWarning` says why.
"""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from hostir.ir.source import described, error, user_span, warn_once
from hostir.torch.functional import column_parallel_linear, gated_linear, name_of, row_parallel_linear
from hostir.torch.ops.remembered import PLAIN
from hostir.torch.ops.running import DTYPES, MACHINES, SETTINGS
from hostir.torch.reporting import LEDGER

LAST = Shard(-1)
MAX_FITTING = 64  # the keys of inputs that a layer remembers


@dataclass(frozen=True)
class Layouts:
    """The placements of a layer's input and output on the ranks of a mesh.

    Fields:
        mesh: the mesh. It has one dimension.
        group: the name of the mesh's process group.
        input: the placement of inputs that are plain tensors.
        output: the placement of the output.
        local_output: True if the layer returns this rank's part as a plain tensor, False if it returns a DTensor.
        fp8: True if the layer multiplies in fp8.
    """

    mesh: DeviceMesh
    group: str
    input: Placement
    output: Placement
    local_output: bool = True
    fp8: bool = False

    def dtensor(self, x: Tensor) -> DTensor:
        """Return an input as a DTensor. A plain tensor is taken as this rank's part."""
        return x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [self.input], run_check=False)

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part of an input as a plain tensor."""
        return x.to_local() if isinstance(x, DTensor) else x

    def returned(self, y: Tensor) -> Tensor:
        """Return `y`, this rank's part of the output, as a plain tensor if `local_output`, otherwise as a DTensor."""
        return y if self.local_output else DTensor.from_local(y, self.mesh, [self.output], run_check=False)

    def redistributed(self, y: Any) -> Tensor:
        """Redistribute a DTensor to the output's placement.

        Return the new DTensor, or this rank's part of it if `local_output` is True.
        """
        y = y.redistribute(self.mesh, [self.output])
        return y.to_local() if self.local_output else y


def mesh_of(mesh: DeviceMesh, what: str = "layers") -> tuple[DeviceMesh, str]:
    """Return `mesh` and the name of its process group. Raises HostIRError unless `mesh` has one dimension.

    The message says that `what` cannot be sharded over `mesh`.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        expected = 'a DeviceMesh of one dimension, such as mesh["tp"]'
        raise error(f"{what} cannot be sharded over {described(mesh)}", user_span(), expected=expected)
    return mesh, name_of(mesh)


@torch._dynamo.assume_constant_result
def leave(name: str, group: str, why: str, what: str = "") -> None:
    """Record that torch runs a call of a layer, and warn once. Raises HostIRError in strict mode.

    Under torch.compile, this function runs once, when the graph is traced.

    Args:
        name: the layer's name in the report.
        group: the name of the process group.
        why: the reason why hostir cannot run the call.
        what: the layer's name in messages, for instance with its path in the model. By default `name`.
    """
    what = what or name
    if SETTINGS.strict:
        raise error(f"hostir cannot run {what}: {why}", user_span(), hint="without strict=True, torch runs it")
    message = f"torch runs {what}, and overlaps nothing: {why}."
    warn_once((name, why), message, "hostir.torch.report() counts the calls")
    LEDGER.left(name, group, why)


class ParameterOptions(TypedDict, total=False):
    """Options of all sharded layers. The docstring of `ColumnParallelLinear` explains the options."""

    fp8: bool
    device: Any
    dtype: torch.dtype | None


class LinearOptions(ParameterOptions, total=False):
    """Options for the constructor of a sharded linear layer."""

    bias: bool
    local_output: bool


class OutputOptions(TypedDict, total=False):
    """Options of `from_linear`, which makes a sharded linear layer from an `nn.Linear`."""

    local_output: bool
    fp8: bool


Layer = TypeVar("Layer", bound="ShardedLinear")


class ShardedLinear(nn.Linear):
    """An `nn.Linear` whose parameters are DTensors over the ranks of a mesh.

    Fields:
        gathers: True if the input is sharded on tokens and the output on features. False if the input is sharded on
            features and the output on tokens.
        weights: the placements of `weight` and `bias`.
        layouts: the placements of input and output, and the mesh.
        input_axis: the axis on which an input is sharded if it is a plain tensor; None if plain inputs are unsharded.
        output_axis: the same for outputs. Both fields are integers or None, so torch.compile treats them as constants.
        fitting: keys of inputs for which `unfit_call` has returned None: see `refusal`.
    """

    gathers: bool
    weights: tuple[Placement, Placement]
    layouts: Layouts
    input_axis: int | None
    output_axis: int | None
    fitting: set[tuple[Any, ...]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        tokens_axis: int | None,
        *,
        bias: bool = True,
        local_output: bool = True,
        fp8: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layouts = self.layouts_for(mesh, tokens_axis, local_output, fp8)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.become(layouts, 0)

    @classmethod
    def layouts_for(
        cls, mesh: DeviceMesh, tokens_axis: int | None, local_output: bool = True, fp8: bool = False
    ) -> Layouts:
        """Return the layouts of a layer of this class.

        Tokens are sharded on `tokens_axis`; None for unsharded tokens.
        """
        tokens = Replicate() if tokens_axis is None else Shard(tokens_axis)
        first, last = (tokens, LAST) if cls.gathers else (LAST, tokens)
        return Layouts(*mesh_of(mesh), first, last, local_output, fp8)

    def become(self, layouts: Layouts, source: int | None) -> None:
        """Take on `layouts`, and shard the parameters over the ranks.

        Rank `source` shards its parameters, and sends each other rank the part for that rank. If `source` is None, each
        rank shards its parameters, and nothing is sent.
        """
        self.layouts, self.fitting = layouts, set()
        self.input_axis, self.output_axis = (
            placement.dim if isinstance(placement, Shard) else None for placement in (layouts.input, layouts.output)
        )
        for (name, parameter), placement in zip(self.named_parameters(), self.weights, strict=False):
            sharded = distribute_tensor(parameter.data, layouts.mesh, [placement], src_data_rank=source)
            self.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

    @classmethod
    def converted(cls: type[Layer], linear: nn.Linear, layouts: Layouts) -> Layer:
        """Return a sharded layer that computes the same as `linear`. All ranks get the parameters of rank 0."""
        if not isinstance(linear, nn.Linear):
            raise error(f"not a linear layer: {described(linear)}", user_span(), expected="a torch.nn.Linear")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        layer.become(layouts, 0)
        return layer

    @classmethod
    @abstractmethod
    def unfit(cls, linear: nn.Linear, layouts: Layouts, placement: Placement) -> str | None:
        """Return the reason why hostir cannot run the layer, or None if it can.

        `placement` is the input's placement.
        """

    def refusal(self, x: Tensor) -> str | None:
        """Return the result of `unfit_call`. For tensors like those of earlier calls, it is not worked out again."""
        if torch.compiler.is_dynamo_compiling() or type(x) not in PLAIN:
            return self.unfit_call(x)
        key = x.shape, x.dtype, x.device, self.weight.dtype, torch.is_autocast_enabled(x.device.type)
        if key in self.fitting:
            return None
        why = self.unfit_call(x)
        if why is None:
            if len(self.fitting) >= MAX_FITTING:
                self.fitting.clear()
            self.fitting.add(key)
        return why

    def unfit_call(self, x: Tensor) -> str | None:
        """Return the reason why hostir cannot run a call with input `x`, or None if it can.

        All ranks return the same value.
        """
        layouts, placement = self.layouts, self.layouts.input
        if isinstance(x, DTensor):
            placement = x.placements[0]
            if x.device_mesh != layouts.mesh:
                return f"its input is on another mesh, {x.device_mesh}"
        if x.ndim < 2:
            return f"its input has {x.ndim} axes"
        if x.device.type not in MACHINES:
            return f"its input is on {x.device}"
        if not torch.is_autocast_enabled(x.device.type) and (x.dtype != self.weight.dtype or x.dtype not in DTYPES):
            return f"its input is {x.dtype}, its weight {self.weight.dtype}"
        if layouts.fp8 and x.dtype == torch.float64:
            return "its input is torch.float64, which is not quantized to fp8"
        return self.unfit(self, layouts, LAST if self.sharded_axis(x) == x.ndim - 1 else placement)

    def sharded_axis(self, x: Tensor) -> int | None:
        """Return the axis that an input is sharded on, as a nonnegative index; None for an unsharded input."""
        if isinstance(x, DTensor):
            placement = x.placements[0]
            return placement.dim if isinstance(placement, Shard) else None
        return None if self.input_axis is None else self.input_axis % x.ndim

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's parts of the weight and of the bias. The bias is None if the layer has none."""
        weight: Any = self.weight
        bias: Any = self.bias
        mesh = self.layouts.mesh
        if not isinstance(weight, DTensor) or (weight.device_mesh is not mesh and weight.device_mesh != mesh):
            raise error(
                f"the weight of a {type(self).__name__} is not sharded over the ranks of its group alone",
                user_span(),
                expected="a call of a module around which fully_shard, if used, has gathered the parameters",
                hint="layers that share a gather need one fully_shard around all of them",
            )
        if bias is not None:
            partial = isinstance(bias.placements[0], Replicate) and self.output_axis is not None
            bias = bias.to_local(grad_placements=[Partial()] if partial else None)
        return local_weight(weight), bias

    def extra_repr(self) -> str:
        layouts = self.layouts
        fp8 = ", fp8" * layouts.fp8
        return f"{super().extra_repr()}, {layouts.mesh.size()} ranks, {layouts.input} -> {layouts.output}{fp8}"


class _LocalPart(torch.autograd.Function):
    """Autograd function that returns this rank's part of a sharded weight. The gradient has the weight's `grad_dtype`.

    It does the same as `DTensor.to_local`. Its backward pass takes a fifth as many function calls.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor, grad_dtype: torch.dtype | None) -> Tensor:
        ctx.set_materialize_grads(False)
        part = weight.to_local().detach()
        ctx.spec, ctx.layout = weight._spec, (part.shape, part.stride(), part.dtype)
        if grad_dtype is not None:
            part.grad_dtype = grad_dtype  # otherwise autograd rounds the gradient to the dtype of the part
        return part

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return None, None
        spec = ctx.spec
        if torch.is_grad_enabled() or (dy.shape, dy.stride(), dy.dtype) != ctx.layout:
            options: Any = {"shape": spec.shape, "stride": spec.stride}
            return DTensor.from_local(dy, spec.mesh, spec.placements, run_check=False, **options), None
        new: Any = DTensor
        return new(dy, copy.copy(spec), requires_grad=False), None


# `Function.apply` also looks for functorch's transforms. A call of a layer inside a transform is refused later.
_local_part = super(torch.autograd.Function, _LocalPart).apply


def local_weight(weight: DTensor) -> Tensor:
    """Return this rank's part of a weight as a plain tensor.

    Operators compute the gradient of this part in the weight's `grad_dtype`.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not weight.requires_grad:
        return weight.to_local()
    if not weight.is_leaf or type(weight.placements[0]) is not Shard:
        return weight.to_local()
    dtype = weight.grad_dtype
    if dtype in (None, weight.dtype):
        return _local_part(weight, None)
    part: Any = _local_part(weight, dtype)
    part.dtype_of_gradient = dtype
    return part


def _indivisible(what: str, length: int, layouts: Layouts) -> str | None:
    ranks = layouts.mesh.size()
    return f"its {ranks} ranks do not divide {what}, which are {length}" if length % ranks else None


class ColumnParallelLinear(ShardedLinear):
    """A column-parallel linear layer: it gathers the tokens, and computes this rank's columns of the output.

    The input is this rank's tokens, `[..., in_features]`. The output is this rank's columns for all tokens,
    `[..., out_features/ranks]`. The input may be a DTensor that is sharded on the axis of the tokens. The output may be
    a DTensor that is sharded on the last axis. `weight` and `bias` are sharded on their first axis.

    Args:
        in_features, out_features: the features of the unsharded layer.
        mesh: a DeviceMesh of one dimension. The number of its ranks must divide `out_features`.
        gather_dim: the axis of the tokens. It must not be the last axis. With None, every rank passes all tokens.
        bias: True, the default, for a layer with a bias.
        local_output: True, the default, to return this rank's part as a plain tensor. False to return a DTensor.
        fp8: True to multiply in fp8, as in `column_parallel_linear`. The parameters keep their dtype.
        device, dtype: the device and dtype of the parameters, as for `nn.Linear`. All ranks get their parts of rank 0's
            parameters.
    """

    gathers = True
    weights = (Shard(0), Shard(0))

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        *,
        gather_dim: int | None = 0,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, out_features, mesh, gather_dim, **options)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mesh: DeviceMesh, *, gather_dim: int | None = 0, **options: Unpack[OutputOptions]
    ) -> ColumnParallelLinear:
        """Return a sharded layer that computes the same as `linear`. All ranks get the parameters of rank 0."""
        return cls.converted(linear, cls.layouts_for(mesh, gather_dim, **options))

    @classmethod
    def unfit(cls, linear: nn.Linear, layouts: Layouts, placement: Placement) -> str | None:
        if not isinstance(placement, (Shard, Replicate)):
            return f"its input is {placement}, neither sharded on tokens nor whole"
        if layouts.fp8 and not isinstance(placement, Shard):
            return "its input is whole, and fp8 is for tokens that are gathered"
        if placement == LAST:
            return "its input is sharded on the axis that the product sums over"
        if layouts.output != LAST:
            return f"outputs are {layouts.output}, not sharded on the last axis"
        return _indivisible("its out_features", linear.out_features, layouts)

    def unfit_call(self, x: Tensor) -> str | None:
        if why := ShardedLinear.unfit_call(self, x):  # torch 2.11 does not trace super() on Python 3.12
            return why
        axis, ranks = self.sharded_axis(x), self.layouts.mesh.size()
        if axis is not None and isinstance(x, DTensor) and x.shape[axis] % ranks:  # plain tensors are equal parts
            return f"its {ranks} ranks do not divide axis {axis}, which is {x.shape[axis]}"
        return None

    def forward(self, input: Tensor) -> Tensor:
        return columns(input, [self])[0]


def columns(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> list[Tensor]:
    """Return the outputs of several layers for one input `x`. `x` is gathered once for all layers."""
    layouts = layers[0].layouts
    if why := next(filter(None, [layer.refusal(x) for layer in layers]), None):
        leave("ColumnParallelLinear", layouts.group, why)
        gathered = layouts.dtensor(x).redistribute(layouts.mesh, [Replicate()])
        return [layer.layouts.redistributed(F.linear(gathered, layer.weight, layer.bias)) for layer in layers]
    axis = layers[0].sharded_axis(x)
    weights, biases = zip(*[layer.parts() for layer in layers], strict=True)
    added = None if all(bias is None for bias in biases) else biases
    outputs = column_parallel_linear(layouts.local(x), weights, layouts.group, added, gather_dim=axis, fp8=layouts.fp8)
    return [layer.layouts.returned(y) for layer, y in zip(layers, outputs, strict=True)]


class RowParallelLinear(ShardedLinear):
    """A row-parallel linear layer: it multiplies this rank's columns, sums over the ranks, and scatters the tokens.

    The input is this rank's columns of all tokens, `[..., in_features/ranks]`. The output is this rank's tokens,
    `[..., out_features]`. The input may be a DTensor that is sharded on the last axis. The output may be a DTensor that
    is sharded on the axis of the tokens. `weight` is sharded on its columns, and `bias` is replicated. If the tokens
    are scattered, the gradient of `bias` has the placement Partial.

    Args:
        in_features, out_features: the features of the unsharded layer.
        mesh: a DeviceMesh of one dimension. The number of its ranks must divide `in_features`.
        scatter_dim: the axis of the tokens. It must not be the last axis. With None, every rank gets all tokens.
        bias, local_output, fp8, device, dtype: as for ColumnParallelLinear.
    """

    gathers = False
    weights = (Shard(1), Replicate())

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        *,
        scatter_dim: int | None = 0,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, out_features, mesh, scatter_dim, **options)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mesh: DeviceMesh, *, scatter_dim: int | None = 0, **options: Unpack[OutputOptions]
    ) -> RowParallelLinear:
        """Return a sharded layer that computes the same as `linear`. All ranks get the parameters of rank 0."""
        return cls.converted(linear, cls.layouts_for(mesh, scatter_dim, **options))

    @classmethod
    def unfit(cls, linear: nn.Linear, layouts: Layouts, placement: Placement) -> str | None:
        if placement != LAST:
            return f"its input is {placement}, not sharded on the last axis"
        if not isinstance(layouts.output, (Shard, Replicate)):
            return f"outputs are {layouts.output}, neither sharded on tokens nor whole"
        if layouts.output == LAST:
            return "outputs are sharded on the last axis, not on the axis of the tokens"
        if layouts.fp8 and not isinstance(layouts.output, Shard):
            return "outputs are whole, and products in fp8 are not summed on all ranks"
        return _indivisible("its in_features", linear.in_features, layouts)

    def unfit_call(self, x: Tensor) -> str | None:
        if why := ShardedLinear.unfit_call(self, x):
            return why
        if self.output_axis is None:
            return None
        axis = self.output_axis % x.ndim
        if axis == x.ndim - 1:
            return "its output is sharded on the last axis, not on the axis of the tokens"
        return _indivisible(f"axis {axis} of its input", x.shape[axis], self.layouts)

    def forward(self, input: Tensor) -> Tensor:
        layouts = self.layouts
        if why := self.refusal(input):
            leave("RowParallelLinear", layouts.group, why)
            columns = layouts.dtensor(input).redistribute(layouts.mesh, [LAST])
            return layouts.redistributed(F.linear(columns, self.weight, self.bias))
        weight, bias = self.parts()
        reduction: Any = {"reduce": "all"} if self.output_axis is None else {"scatter_dim": self.output_axis}
        y = row_parallel_linear(layouts.local(input), weight, layouts.group, bias, fp8=layouts.fp8, **reduction)
        return layouts.returned(y)


class SharedGather:
    """A cache for layers that are called one after the other with the same input, such as q, k and v.

    The first layer to be called gathers the input and computes the outputs of all layers. The other outputs are kept
    until their layers are called. A call with another input, or with a changed parameter, computes all outputs anew.
    All outputs share one autograd graph. A backward pass through one output frees this graph, so it also drops the
    outputs that are kept.
    """

    def __init__(self, layers: Sequence[SharingLinear]) -> None:
        self.layers = [*layers]
        self.input: Tensor | None = None
        self.state: tuple[Any, ...] = ()
        self.number = 0  # counts how often the outputs were computed
        self.outputs: list[Tensor | None] = [None] * len(self.layers)

    def output(self, layer: SharingLinear, x: Tensor) -> Tensor:
        """Return the output of `layer` for `x`.

        This is the kept output if it is valid. Otherwise the outputs of all layers are computed.
        """
        index = next(i for i, each in enumerate(self.layers) if each is layer)
        counts = not torch.compiler.is_compiling()
        read: list[Any] = [x] if counts else []
        for each in self.layers if counts else ():
            read += each.parameters() if each._modules else each._parameters.values()  # the latter takes less time
        versions = [(id(y), 0 if y is None or y.is_inference() else y._version) for y in read]  # they have no version
        state = (*versions, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type))
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
    """Backward hook: drop the kept outputs of the other layers, because this backward pass frees their graph.

    Does nothing if the outputs have been computed again after the hook was registered. `number` is the number of
    computations at that time.
    """
    gather = shared()
    if gather is not None and gather.number == number:
        gather.input, gather.outputs = None, [None] * len(gather.layers)


class SharingLinear(ColumnParallelLinear):
    """A ColumnParallelLinear that shares one all-gather of its input with the other layers of a `SharedGather`."""

    shared: SharedGather

    def forward(self, input: Tensor) -> Tensor:
        return self.shared.output(self, input)


class QKVParallelLinear(nn.Module):
    """The q, k and v projections of attention. They gather their input once, and return this rank's heads.

    The outputs cover all tokens. The layers `q`, `k` and `v` are ColumnParallelLinear. State dicts contain the layers
    under these names.

    Args:
        features: the features of the input.
        q_features: the features of q over all ranks, which is the number of heads of q times the head size.
        kv_features: the features of k over all ranks. v has as many features.
        mesh, gather_dim, fp8, device, dtype: as for ColumnParallelLinear.
        bias: True for layers with biases. By default they have no biases.
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
        **options: Unpack[ParameterOptions],
    ) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            ColumnParallelLinear(features, width, mesh, gather_dim=gather_dim, bias=bias, **options)
            for width in (q_features, kv_features, kv_features)
        )

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
        """Return sharded projections that compute the same as `q`, `k` and `v`.

        All ranks get the parameters of rank 0.
        """
        layouts = ColumnParallelLinear.layouts_for(mesh, gather_dim, fp8=fp8)
        return _assembled(cls, q=_column(q, layouts), k=_column(k, layouts), v=_column(v, layouts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = columns(x, [self.q, self.k, self.v])
        return q, k, v


class GatedMLP(nn.Module):
    """A gated MLP, `down(silu(gate(x)) * up(x))`. Input and output are this rank's tokens, `[..., features]`.

    It all-gathers the tokens once before `gate` and `up`, and reduce-scatters the output of `down`. The layers `gate`,
    `up` and `down` have no biases. The products of `gate` and `up` are not saved: backward computes them again. This
    saves the memory for `3 * tokens * hidden / ranks` elements. With fp8, or with `sequence_dim=None`, the products are
    saved and not computed again.

    Args:
        features: the features of input and output.
        hidden: the number of outputs of `gate`, over all ranks. `up` has as many outputs.
        mesh, fp8, device, dtype: as for ColumnParallelLinear.
        sequence_dim: the axis of the tokens. With None, every rank has all tokens, in the input and in the output.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        mesh: DeviceMesh,
        *,
        sequence_dim: int | None = 0,
        **options: Unpack[ParameterOptions],
    ) -> None:
        super().__init__()
        self.gate, self.up = (
            ColumnParallelLinear(features, hidden, mesh, gather_dim=sequence_dim, bias=False, **options)
            for _ in ("gate", "up")
        )
        self.down = RowParallelLinear(hidden, features, mesh, scatter_dim=sequence_dim, bias=False, **options)

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
        """Return a sharded MLP that computes the same as `gate`, `up` and `down` in a gated MLP.

        All ranks get the parameters of rank 0.
        """
        if any(each.bias is not None for each in (gate, up)):
            raise error("gate and up have biases", user_span(), expected="layers without biases, as in Llama's MLP")
        layouts = ColumnParallelLinear.layouts_for(mesh, sequence_dim, fp8=fp8)
        last = RowParallelLinear.from_linear(down, mesh, scatter_dim=sequence_dim, fp8=fp8)
        return _assembled(cls, gate=_column(gate, layouts), up=_column(up, layouts), down=last)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, layouts, axis = self.gate, self.up, self.gate.layouts, self.gate.sharded_axis(x)
        if axis is None or layouts.fp8 or gate.refusal(x) or up.refusal(x):
            g, u = columns(x, [gate, up])
            return self.down(F.silu(g) * u)
        return self.down(gated_linear(layouts.local(x), gate.parts()[0], up.parts()[0], layouts.group, gather_dim=axis))


Container = TypeVar("Container", bound=nn.Module)
_column = ColumnParallelLinear.converted


def _assembled(cls: type[Container], **layers: nn.Module) -> Container:
    """Return a module of class `cls` with these layers, without a call of its constructor."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, layer in layers.items():
        setattr(module, name, layer)
    return module
