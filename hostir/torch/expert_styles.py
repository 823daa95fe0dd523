"""A style for torch's `parallelize_module` that shards the experts of a mixture of experts.

torch has no such style. The module gets the `forward` of `hostir.torch.GroupedExperts`. So the style first computes a
few random tokens with the module as it is, and refuses a module that computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from hostir.ir.source import error, user_span
from hostir.torch.experts import GroupedExperts, ShardedExperts, Stored, check_hidden
from hostir.torch.modules import mesh_of
from hostir.torch.traps import Place

TOKENS = 8  # random tokens that are computed before a module is sharded
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest value


class TensorParallelExperts(ParallelStyle):
    """A style that shards the experts of a mixture of experts over the ranks: each rank gets a slice of every expert.

    Apply it to a module that has the matrices of all experts, or to an `nn.ModuleList` of experts with three
    `nn.Linear`s each. An expert computes `down(silu(gate(x)) * up(x))`. After that, call the module with this rank's
    tokens, their experts and their weights, as `hostir.torch.GroupedExperts`. The parameters keep their names. But the
    matrices of an `nn.ModuleList` become the parameters `gate`, `up` and `down` of one module, so load a checkpoint
    before.

    Before it shards, the style computes a few random tokens with the module. It calls the module in one of two ways,
    whichever works: with tokens, experts and weights, or with rows sorted by expert and the number of rows of each
    expert. Raises HostIRError if the module computes something else.

    Args:
        gate, up, down: the names of the parameters, or of the linear layers of each expert. If `gate` and `up` are one
            name, this parameter holds both: the gate's columns, then as many others. It becomes two parameters, with
            `_gate` and `_up` added to its name. So load a checkpoint before.
        transposed: True if the parameters are `[experts, outputs, inputs]`, False for `[experts, inputs, outputs]`. For
            an `nn.ModuleList` it has no meaning.
        check: False to shard the module without computing random tokens. Use it for modules on torch's meta device.
    """

    def __init__(
        self, gate: str = "gate", up: str = "up", down: str = "down", *, transposed: bool = False, check: bool = True
    ) -> None:
        self.stored, self.check = Stored(gate, up, down, transposed), check

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place = Place.of(module)
        mesh, group = mesh_of(device_mesh, str(place))
        if isinstance(module, ShardedExperts):
            expected = "one style for each module, applied once"
            raise error(f"{place} is sharded already", user_span(), expected=expected)
        listed = isinstance(module, nn.ModuleList)
        in_one = self.stored.gate if self.stored.gate == self.stored.up and not listed else ""
        stored = Stored() if listed else self.stored
        if listed:
            parameters = _of_layers(place, self.stored)
        elif in_one:
            parameters = _of_both(place, stored)
            stored = replace(stored, gate=f"{in_one}_gate", up=f"{in_one}_up")
            if taken := [name for name in (stored.gate, stored.up) if hasattr(module, name)]:
                what = f"{place} has '{taken[0]}' already, the name of a half of '{in_one}' once it is sharded"
                raise error(what, user_span(), expected="a module without this name")
        else:
            parameters = _of_module(place, stored)
        gate, up, down = matrices = stored.matrices(parameters)
        if gate.dim() != 3 or gate.shape != up.shape or down.shape != (gate.shape[0], gate.shape[2], gate.shape[1]):
            raise _misfit(place, stored, parameters)
        check_hidden(gate.shape[2], mesh)
        if self.check:
            _check(place, matrices)
        target: Any = module
        cls: Any = type(module)
        if listed:
            module._modules.clear()
            for name, parameter in zip(stored.placements, parameters, strict=True):
                module.register_parameter(name, nn.Parameter(parameter.contiguous()))
            target.__class__ = GroupedExperts
        else:
            if in_one:
                trained = getattr(module, in_one).requires_grad
                delattr(module, in_one)
                for name, parameter in zip((stored.gate, stored.up), parameters, strict=False):
                    module.register_parameter(name, nn.Parameter(parameter, requires_grad=trained))
            target.__class__ = _sharded(cls)
        target.become(mesh, group, stored, self.src_data_rank)
        return module


@cache
def _sharded(cls: Any) -> Any:
    """Return the subclass of a class of modules that computes as `ShardedExperts`."""
    return type(f"Sharded{cls.__name__}", (ShardedExperts, cls), {"__module__": cls.__module__})


def _of_module(place: Place, stored: Stored) -> list[Tensor]:
    """Return the parameters of a module that stores all experts. Raises HostIRError if it lacks one."""
    own = dict(place.module.named_parameters(recurse=False))
    if missing := [name for name in stored.placements if name not in own]:
        has = ", ".join(own) or "none"
        raise error(
            f"{place} has no parameter '{missing[0]}'",
            user_span(),
            expected=f"its parameters, which are: {has}",
            hint="TensorParallelExperts(gate, up, down) takes the names of three parameters",
        )
    return _unsharded(place, [own[name] for name in stored.placements])


def _of_both(place: Place, stored: Stored) -> list[Tensor]:
    """Return gate, up and down of a module that stores gate and up in one parameter."""
    parameters = _of_module(place, stored)
    both, down = parameters[0], parameters[-1]
    axis = 1 if stored.transposed else 2
    wide, narrow = both.shape, down.shape
    if both.dim() == down.dim() == 3:
        wide, narrow = (matrix.shape for matrix in stored.matrices([both, down]))
    if len(wide) != 3 or wide[2] % 2 or narrow != (wide[0], wide[2] // 2, wide[1]):
        forms = ("[experts, 2 * hidden, features]", "[experts, features, hidden]")
        if not stored.transposed:
            forms = ("[experts, features, 2 * hidden]", "[experts, hidden, features]")
        raise error(
            f"{place} has {stored.gate} {list(both.shape)}, {stored.down} {list(down.shape)}",
            user_span(),
            expected=" and ".join(forms),
            hint="check 'transposed'",
        )
    return [*(part.detach().contiguous() for part in both.chunk(2, axis)), down]


def _of_layers(place: Place, names: Stored) -> list[Tensor]:
    """Return the matrices of an `nn.ModuleList` of experts, `[experts, inputs, outputs]` each."""
    parameters = []
    for name in names.placements:
        layers = [getattr(expert, name, None) for expert in place.module.children()]
        wrong = [n for n, layer in enumerate(layers) if type(layer) is not nn.Linear or layer.bias is not None]
        if wrong or not layers:
            what = f"expert {wrong[0]} of {place}" if layers else str(place)
            expected = "experts with three layers of type nn.Linear without bias"
            raise error(f"{what} has no linear layer '{name}' without a bias", user_span(), expected=expected)
        weights = _unsharded(place, [layer.weight for layer in layers if isinstance(layer, nn.Linear)])
        if len({weight.shape for weight in weights}) > 1:
            raise error(f"the layers '{name}' of {place} have several sizes", user_span(), expected="equal experts")
        parameters.append(torch.stack([weight.detach().t() for weight in weights]))
    return parameters


def _unsharded(place: Place, parameters: list[Any]) -> list[Tensor]:
    """Return the parameters. Raises HostIRError if one is a DTensor."""
    if any(isinstance(p, DTensor) for p in parameters):
        expected = "unsharded parameters: apply this style before fully_shard"
        raise error(f"the parameters of {place} are sharded already", user_span(), expected=expected)
    return parameters


def _misfit(place: Place, stored: Stored, parameters: list[Tensor]) -> Exception:
    """Return the error for parameters whose shapes do not fit each other."""
    shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in zip(stored.placements, parameters, strict=True))
    one, other = "[experts, features, hidden]", "[experts, hidden, features]"
    first, last = (other, one) if stored.transposed else (one, other)
    return error(f"{place} has {shapes}", user_span(), expected=f"two parameters {first} and one {last}")


# What a module computes -------------------------------------------------------------------------------------------
WAYS = ("module(tokens, experts, weights)", "module(rows, numbers of rows)")  # of calling it


@torch.no_grad()
def _check(place: Place, matrices: list[Tensor]) -> None:
    """Raise HostIRError unless the module at `place` computes what `GroupedExperts` computes with these matrices."""
    gate, up, down = matrices
    if gate.is_meta:
        hint = "TensorParallelExperts(..., check=False) shards it without a call"
        raise error(f"{place} is on meta, so it computes nothing", user_span(), expected="values", hint=hint)
    count, source = len(gate), torch.Generator(gate.device).manual_seed(0)
    x, chances = (torch.rand(TOKENS, n, generator=source, device=gate.device) for n in (gate.shape[1], count))
    x, chosen = (x - 0.5).to(gate.dtype), chances.topk(min(2, count)).indices
    weights = chances.gather(1, chosen).to(gate.dtype)
    exact = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in chosen.unique().tolist():
        wide = [matrix[e].double() for matrix in (gate, up, down)]
        share = (weights.double() * (chosen == e)).sum(1, keepdim=True)
        exact += share * ((F.silu(x.double() @ wide[0]) * (x.double() @ wide[1])) @ wide[2])
    bound, problems = BOUNDS.get(gate.dtype, 0.1) * float(exact.abs().max()), []
    with _evaluating(place.module):
        for call in _calls(place.module, count):
            try:
                y = call(x, chosen, weights)
            except Exception as raised:  # the module may be called in another way
                problems.append(f"{type(raised).__name__}: {next(iter(str(raised).splitlines()), '')}")
                continue
            if isinstance(y, Tensor) and y.shape == x.shape and float((y.double() - exact).abs().max()) <= bound:
                return
            problems.append("it computes something else")
    raise error(
        f"{place} does not compute down(silu(gate(x)) * up(x)) for the experts of each token",
        user_span(),
        expected="a module that is called with tokens, experts and weights, or with sorted rows and their numbers",
        hint="check the names of the parameters, and 'transposed'; check=False shards it without a call",
        notes=tuple((None, f"called as {way}: {why}") for way, why in zip(WAYS, problems, strict=False)),
    )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Return a context manager in which a module is in evaluation mode, without dropout."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


def _calls(module: nn.Module, count: int) -> Iterator[Callable[[Tensor, Tensor, Tensor], Any]]:
    """Yield functions that compute tokens, their experts and their weights by a module of `count` experts."""
    if isinstance(module, nn.ModuleList):
        yield lambda x, chosen, weights: sum(
            expert(x) * (weights * (chosen == e)).sum(1, keepdim=True) for e, expert in enumerate(module)
        )
        return
    yield module

    def by_rows(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        rows = module(x[order // chosen.shape[1]], torch.bincount(chosen.flatten(), minlength=count))
        by_token = torch.empty_like(rows).index_copy_(0, order, rows)
        return (by_token.view(*chosen.shape, -1) * weights[..., None]).sum(1)

    yield by_rows
