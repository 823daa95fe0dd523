"""What the ranks of tests/torch/test_operators.py run of styles and their messages: `style_cases.py NAME ...`."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
    style,
)

import hostir as hi
import hostir.ir.source as notices
import hostir.torch
from hostir.torch import ColwiseParallel, GatedMLP, QKVParallelLinear, RowwiseParallel, ShardingWarning
from tests.torch.layer_cases import near, whole
from tests.torch.module_cases import full, ranks, same
from tests.torch.operator_cases import DEVICE, RANK, RANKS, main, part

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Model(nn.Module):
    """With an embedding and an output whose weights may be one."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(8)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def plan(**others: ParallelStyle) -> dict[str, ParallelStyle]:
    return {
        "embedding": style.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.mlp": ColwiseParallel("gate", "up", input_layouts=Shard(1)),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "output": ColwiseParallel(input_layouts=Shard(1)),
        **others,
    }


@contextmanager
def recorded(category: type[Warning]) -> Iterator[list[warnings.WarningMessage]]:
    """What is warned of inside, of this category, as in a fresh process."""
    notices._warned.clear()
    found: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [each for each in seen if issubclass(each.category, category)]


# Messages -------------------------------------------------------------------------------------------------------------


@case
def a_first_step_warns_once_at_the_users_line() -> None:
    fresh = DeviceMesh.from_group(dist.new_group(), DEVICE, mesh_dim_names=("tp",))  # no program is compiled for it
    model = parallelize_module(same(Model()), fresh, plan())
    with recorded(hi.FallbackWarning) as seen:
        model(torch.arange(16).view(2, 8)).sum().backward()
        hi.torch.all_reduce(torch.ones(4, 4), fresh)
    assert len(seen) == (RANK == 0), [str(each.message) for each in seen]
    for each in seen:
        first, hint = str(each.message).splitlines()
        assert each.filename == __file__
        assert "self.gate(x)" in notices.linecache.getline(each.filename, each.lineno)
        assert "ring, fused and push are not possible here" in first
        assert "pipeline" not in first, "no one can give an operator a Stream axis"
        assert hint.startswith("  hint: hostir.torch.report()"), "a command for a file with a fusion is of no use"
    report = hi.torch.report()
    assert {row.strategy for row in report if row.group == fresh.get_group().group_name} == {"sequential, aten"}


def refused(call: Callable[[], object]) -> hi.Diagnostic:
    """The diagnostic with which a call is refused, which is at a line of this file."""
    with pytest.raises(hi.HostIRError) as problem:
        call()
    (found,) = problem.value.diagnostics
    assert found.span is not None
    assert __file__.endswith(found.span.file), found
    return found


@case
def errors_of_plans_name_the_users_line_and_the_module() -> None:
    tp = ranks()
    both = DeviceMesh(DEVICE, torch.arange(RANKS).view(1, RANKS), mesh_dim_names=("dp", "tp"))
    column, row = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(-1))
    for mesh, given, said in (
        (tp, {"layers.3.mlp": ColwiseParallel("wq")}, "layers.3.mlp (MLP) has no linear layer 'wq'"),
        (both, {"layers.*.mlp": ColwiseParallel("up")}, "layers.0.mlp.up (Linear) cannot be sharded over DeviceMesh"),
        (tp, {"layers.3.mlp": column}, "ColwiseParallel cannot shard layers.3.mlp (MLP)"),
        (tp, {"layers.3.mlp.*": column, "layers.3.*.up": row}, "layers.3.mlp.up (ColumnParallelLinear) is sharded"),
    ):
        found = refused(lambda mesh=mesh, given=given: parallelize_module(Model(), mesh, given))
        assert found.message.startswith(said), found
        assert "parallelize_module(Model()" in found.span.text
    with hi.torch.install(strict=True):
        found = refused(lambda: parallelize_module(Model(), tp, {"layers.3.mlp.down": row}))
        assert "RowwiseParallel of layers.3.mlp.down (Linear): outputs are sharded" in found.message
    found = refused(lambda: parallelize_module(MLP(), tp, ColwiseParallel("wq")))
    assert found.message.startswith("MLP has no linear layer 'wq'"), "a model has no path in itself"
    with recorded(hi.FallbackWarning) as seen:
        parallelize_module(Model(), tp, {"layers.*.mlp.down": row})
    assert [each.filename for each in seen] == [__file__] * (RANK == 0), "one is for all layers of the plan"
    assert all("of layers.0.mlp.down (Linear), and overlaps nothing" in str(each.message) for each in seen)


@case
def errors_of_calls_name_the_users_line() -> None:
    model = parallelize_module(MLP(), ranks(), {"down": RowwiseParallel(), "up": ColwiseParallel()})
    a, b = torch.randn(4, 8), torch.randn(8, 8)
    with hi.torch.install():
        found = refused(lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, "nonesuch"))
        assert found.message == "torch knows no group 'nonesuch' in this process"
    found = refused(lambda: hi.torch.all_gather_matmul(a, b, "nonesuch"))
    assert found.message == "torch knows no group 'nonesuch' in this process"
    assert "rows" in refused(lambda: hi.torch.all_gather_matmul(a, b[1:], ranks())).message
    y = model.up(whole(4, 8).requires_grad_())
    found = refused(lambda: torch.autograd.grad(y.sum(), model.up.weight, create_graph=True))
    assert "cannot be differentiated again" in found.message
    model.up.weight = nn.Parameter(torch.randn(16, 8))
    assert "self.up(x)" in refused(lambda: model(a)).span.text


# Traps ----------------------------------------------------------------------------------------------------------------


@contextmanager
def trap(said: str) -> Iterator[None]:
    """Rank 0 is warned of one trap, at a line of this file; of none if nothing is to be said."""
    with recorded(ShardingWarning) as seen:
        yield
    assert len(seen) == (RANK == 0 and said != ""), [str(each.message) for each in seen]
    for each in seen:
        assert each.filename == __file__
        assert said in str(each.message), each.message


@case
def tied_weights_that_untie_are_a_warning() -> None:
    ours = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    torchs = style.ColwiseParallel(input_layouts=Shard(1))
    exact = same(Model(tied=True))
    for given, said in (
        (plan(), "output (Linear) and embedding share one weight"),  # torch's style came first
        (dict(reversed(plan().items())), "output (Linear) and embedding share one weight"),
        (plan(embedding=ours), "embedding (Embedding) and output share one weight"),
        (plan(embedding=ours, output=torchs), "embedding (Embedding) and output share one weight"),
    ):
        model = copy.deepcopy(exact)
        with trap(said):
            parallelize_module(model, ranks(), given)
        assert model.output.weight is not model.embedding.weight
        model.output.weight = model.embedding.weight  # as the warning says
        tokens, weights = torch.arange(16).view(2, 8), whole(2, 8, 32)
        (model(tokens) * part(weights, 2)).sum().backward()
        true = copy.deepcopy(exact).double()
        (true(tokens) * weights).sum().backward()
        near(full(model.embedding.weight.grad), true.embedding.weight.grad)
    with trap(""):
        parallelize_module(same(Model()), ranks(), plan())


@case
def layers_that_are_compiled_before_are_refused() -> None:
    model = Model()
    model.layers[2] = torch.compile(model.layers[2], backend="eager")
    model.layers[3].mlp = torch.compile(model.layers[3].mlp, backend="eager")
    up = model.layers[1].mlp.up
    model.layers[1].mlp.up = torch.compile(up, backend="eager")
    column, names = ColwiseParallel(), ColwiseParallel("gate", "up")
    for given, path in (
        ({"layers.1.mlp.up": column}, "layers.1.mlp.up"),
        ({"layers.1.mlp": names}, "layers.1.mlp.up"),
        ({"layers.3.mlp": names}, "layers.3.mlp"),
        ({"layers.2": column}, "layers.2"),
    ):
        found = refused(lambda given=given: parallelize_module(model, ranks(), given))
        assert found.message == f"{path} (OptimizedModule) is compiled already"
    assert type(model.layers[1].mlp.gate) is nn.Linear, "nothing is sharded when an error is raised"
    with trap("layers.1.mlp.up is compiled already"):
        parallelize_module(model, ranks(), {"output": column})
    exact = same(Layer())
    model, x = copy.deepcopy(exact), whole(2, 8, 8)
    model.compile(backend="eager")
    model(x)
    inside = {name.removeprefix("layers.*."): each for name, each in plan().items() if name.startswith("layers")}
    with trap(""):
        parallelize_module(model, ranks(), inside)
    near(model(part(x, 1)), part(exact.double()(x.double()), 1))


class Attention(nn.Module):
    """Of one rank's heads, as many as the widths of its layers say."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = 4
        self.wq = nn.Linear(8, 4 * heads, bias=False)
        self.wk, self.wv = (nn.Linear(8, 4 * kv_heads, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


@case
def fewer_heads_than_ranks_are_a_warning() -> None:
    exact, x = same(nn.Sequential(Attention(2 * RANKS, 1))), whole(2, 8, 8)
    for given in (
        {"0": ColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))},
        {f"0.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("wq", "wk", "wv")},
    ):
        model = copy.deepcopy(exact)
        with trap(
            f"0.wk (Linear) computes 1 head of 4 columns, and each of the {RANKS} ranks gets {4 // RANKS} columns"
        ):
            parallelize_module(model, ranks(), given)
        with pytest.raises(RuntimeError, match="unflatten"):
            model(part(x, 1))
    model = copy.deepcopy(exact)
    for name in ("wk", "wv"):  # as the warning says
        layer = getattr(model[0], name)
        weight = layer.weight.data.unflatten(0, (-1, 4)).repeat_interleave(RANKS, 0).flatten(0, 1)
        setattr(model[0], name, nn.Linear(8, 4 * RANKS, bias=False))
        getattr(model[0], name).weight.data = weight
    with trap(""):
        parallelize_module(model, ranks(), {"0": ColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))})
    near(model(part(x, 1)), part(exact.double()(x.double()), 2))
    with trap(""):  # outputs that are DTensors know that they are parts of a head
        parallelize_module(same(Attention(2, 1)), ranks(), {"wk": ColwiseParallel(use_local_output=False)})


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24 * RANKS)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)


@case
def a_fused_projection_is_a_warning_and_needs_its_rows_by_rank() -> None:
    exact, x = same(nn.Sequential(Fused())), whole(2, 8, 8)
    true = [part(y, 2) for y in copy.deepcopy(exact).double()(x.double())]
    model = copy.deepcopy(exact)
    with trap("0.qkv (Linear) seems to compute q, k and v at once"):
        parallelize_module(model, ranks(), {"0.qkv": ColwiseParallel(input_layouts=Shard(1))})
    assert not all(torch.allclose(y.double(), z, atol=1e-3) for y, z in zip(model(part(x, 1)), true, strict=True))
    model = copy.deepcopy(exact)
    for parameter in model.parameters():
        q, k, v = parameter.data.chunk(3)
        by_rank = [each.chunk(RANKS)[rank] for rank in range(RANKS) for each in (q, k, v)]
        parameter.data = torch.cat(by_rank)
    with trap("chunk() or split()"):  # a name says nothing about the order of rows
        parallelize_module(model, ranks(), {"0.qkv": ColwiseParallel(input_layouts=Shard(1))})
    for y, z in zip(model(part(x, 1)), true, strict=True):
        near(y, z)
    assert QKVParallelLinear(8, 8 * RANKS, 8 * RANKS, ranks())(part(x, 0))[1].shape[-1] == 8


# Communication counts -------------------------------------------------------------------------------------------------


def inputs(axis: int | None, wants_gradient: bool) -> Tensor:
    x = whole(2, 8, 8)
    return (x if axis is None else part(x, axis)).clone().requires_grad_(wants_gradient)


def counted(model: nn.Module, x: Tensor) -> tuple[dict[str, int], dict[str, int], dict[str, dict[str, dict[str, int]]]]:
    """The collectives that CommDebugMode counts in forward, in backward, and in both by module."""
    forward, backward, both = CommDebugMode(), CommDebugMode(), CommDebugMode()
    with forward:
        y = model(x).sum()
    with backward:
        y.backward()
    with both:
        model(x).sum().backward()
    named = lambda counts: {str(name): n for name, n in counts.items()}  # noqa: E731
    modules = both.comm_module_counts.items()
    by_module = {name: {way: named(counts) for way, counts in ways.items()} for name, ways in modules}
    return named(forward.get_comm_counts()), named(backward.get_comm_counts()), by_module


def mlp(given: ModuleType, axis: int | None) -> nn.Module:
    """An MLP by the styles of a module."""
    column = {} if axis is None else {"input_layouts": Shard(axis)}
    row = {} if axis is None else {"output_layouts": Shard(axis)}
    columns = {name: given.ColwiseParallel(**column) for name in ("gate", "up")}
    return parallelize_module(same(MLP()), ranks(), {**columns, "down": given.RowwiseParallel(**row)})


def prepared(axis: int | None) -> nn.Module:
    """An MLP by torch's styles, whose input is gathered once."""
    layout = Replicate() if axis is None else Shard(axis)
    before = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
    columns = {name: style.ColwiseParallel() for name in ("gate", "up")}
    down = style.RowwiseParallel(output_layouts=layout)
    return parallelize_module(same(MLP()), ranks(), {"": before, **columns, "down": down})


def gathered_once(axis: int | None) -> nn.Module:
    """An MLP by hostir's styles, whose input is gathered once."""
    layout = Replicate() if axis is None else Shard(axis)
    names, down = ColwiseParallel("gate", "up", input_layouts=layout), RowwiseParallel(output_layouts=layout)
    return parallelize_module(same(MLP()), ranks(), {"": names, "down": down})


@case
def comm_debug_mode_counts_what_it_counts_of_torchs_styles() -> None:
    for axis, wants_gradient in itertools.product((None, 0, 1), (False, True)):
        x = inputs(axis, wants_gradient)
        apart, once = counted(mlp(style, axis), x), counted(prepared(axis), x)
        assert apart[0], "torch's own styles communicate"
        for strategy in ("sequential", "push") if axis is None else ("sequential", "ring", "push"):
            with hi.torch.install(strategy=strategy):
                found = counted(mlp(hi.torch, axis), x)
                assert found == apart, (strategy, axis, wants_gradient, found, apart)
                gated = counted(GatedMLP(8, 16, ranks(), sequence_dim=axis), x)
                assert gated[:2] == once[:2], (strategy, axis, wants_gradient, gated, once)
                if not wants_gradient:  # else hooks of the mode give each layer a view of its own of the input
                    assert counted(gathered_once(axis), x)[:2] == once[:2]


if __name__ == "__main__":
    main(CASES)
