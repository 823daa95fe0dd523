"""Cases of parallel styles, their messages and their traps; test_operators.py starts the ranks."""

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
from tests.torch.on_ranks import (
    DEVICE,
    RANK,
    RANKS,
    assert_near,
    case,
    full,
    main,
    part,
    replicated,
    tp_mesh,
    with_parameters_of_rank_0,
)


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
    """Four layers between an embedding and an output layer; both share one weight if `tied`."""

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
    """Record the warnings of a category, as in a fresh process."""
    notices._warned.clear()
    messages: list[warnings.WarningMessage] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [message for message in caught if issubclass(message.category, category)]


# Messages ---------------------------------------------------------------------------------------------------------


@case
def a_first_step_warns_once_at_the_line_of_the_user() -> None:
    fresh = DeviceMesh.from_group(dist.new_group(), DEVICE, mesh_dim_names=("tp",))  # without compiled programs
    model = parallelize_module(with_parameters_of_rank_0(Model()), fresh, plan())
    with recorded(hi.FallbackWarning) as seen:
        model(torch.arange(16).view(2, 8)).sum().backward()
        hi.torch.all_reduce(torch.ones(4, 4), fresh)
    assert len(seen) == (RANK == 0), [str(each.message) for each in seen]
    for each in seen:
        first, hint = str(each.message).splitlines()
        assert each.filename == __file__
        assert "self.gate(x)" in notices.linecache.getline(each.filename, each.lineno)
        assert "ring, chain, fused and push are not possible here" in first
        assert "pipeline" not in first, "operators have no Stream axis"
        assert hint.startswith("  hint: hostir.torch.report()"), "no command about a file, because there is no file"
    report = hi.torch.report()
    assert {row.strategy for row in report if row.group == fresh.get_group().group_name} == {"sequential, aten"}


def refusal(call: Callable[[], object]) -> hi.Diagnostic:
    """Return the diagnostic that refuses a call; it must point to a line of this file."""
    with pytest.raises(hi.HostIRError) as problem:
        call()
    (diagnostic,) = problem.value.diagnostics
    assert diagnostic.span is not None
    assert __file__.endswith(diagnostic.span.file), diagnostic
    return diagnostic


@case
def errors_in_plans_name_the_line_of_the_user_and_the_module() -> None:
    tp = tp_mesh()
    both = DeviceMesh(DEVICE, torch.arange(RANKS).view(1, RANKS), mesh_dim_names=("dp", "tp"))
    column, row = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(-1))
    for mesh, layers, message in (
        (tp, {"layers.3.mlp": ColwiseParallel("wq")}, "layers.3.mlp (MLP) has no linear layer 'wq'"),
        (both, {"layers.*.mlp": ColwiseParallel("up")}, "layers.0.mlp.up (Linear) cannot be sharded over DeviceMesh"),
        (tp, {"layers.3.mlp": column}, "ColwiseParallel cannot shard layers.3.mlp (MLP)"),
        (tp, {"layers.3.mlp.*": column, "layers.3.*.up": row}, "layers.3.mlp.up (ColumnParallelLinear) is sharded"),
    ):
        error = refusal(lambda mesh=mesh, layers=layers: parallelize_module(Model(), mesh, layers))
        assert error.message.startswith(message), error
        assert "parallelize_module(Model()" in error.span.text
    with hi.torch.install(strict=True):
        error = refusal(lambda: parallelize_module(Model(), tp, {"layers.3.mlp.down": row}))
        assert "RowwiseParallel of layers.3.mlp.down (Linear): outputs are sharded" in error.message
    error = refusal(lambda: parallelize_module(MLP(), tp, ColwiseParallel("wq")))
    assert error.message.startswith("MLP has no linear layer 'wq'"), "the root module has no path"
    with recorded(hi.FallbackWarning) as seen:
        parallelize_module(Model(), tp, {"layers.*.mlp.down": row})
    assert [each.filename for each in seen] == [__file__] * (RANK == 0), "one warning for all layers of the plan"
    assert all("of layers.0.mlp.down (Linear), and overlaps nothing" in str(each.message) for each in seen)


@case
def errors_in_calls_name_the_line_of_the_user() -> None:
    model = parallelize_module(MLP(), tp_mesh(), {"down": RowwiseParallel(), "up": ColwiseParallel()})
    a, b = torch.randn(4, 8), torch.randn(8, 8)
    with hi.torch.install():
        error = refusal(lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, "nonesuch"))
        assert error.message == "torch knows no group 'nonesuch' in this process"
    error = refusal(lambda: hi.torch.all_gather_matmul(a, b, "nonesuch"))
    assert error.message == "torch knows no group 'nonesuch' in this process"
    assert "rows" in refusal(lambda: hi.torch.all_gather_matmul(a, b[1:], tp_mesh())).message
    y = model.up(replicated(4, 8).requires_grad_())
    error = refusal(lambda: torch.autograd.grad(y.sum(), model.up.weight, create_graph=True))
    assert "cannot be differentiated again" in error.message
    model.up.weight = nn.Parameter(torch.randn(16, 8))
    assert "self.up(x)" in refusal(lambda: model(a)).span.text


# Warnings about wrong results -------------------------------------------------------------------------------------


@contextmanager
def warns(text: str) -> Iterator[None]:
    """Assert that rank 0 gets one warning with this text at a line of this file, or no warning if the text is empty."""
    with recorded(ShardingWarning) as messages:
        yield
    assert len(messages) == (RANK == 0 and text != ""), [str(message.message) for message in messages]
    for message in messages:
        assert message.filename == __file__
        assert text in str(message.message), message.message


@case
def untied_weights_are_a_warning() -> None:
    ours = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    torchs = style.ColwiseParallel(input_layouts=Shard(1))
    exact = with_parameters_of_rank_0(Model(tied=True))
    for layers, message in (
        (plan(), "output (Linear) and embedding share one weight"),  # torch's style is applied first
        (dict(reversed(plan().items())), "output (Linear) and embedding share one weight"),
        (plan(embedding=ours), "embedding (Embedding) and output share one weight"),
        (plan(embedding=ours, output=torchs), "embedding (Embedding) and output share one weight"),
    ):
        model = copy.deepcopy(exact)
        with warns(message):
            parallelize_module(model, tp_mesh(), layers)
        assert model.output.weight is not model.embedding.weight
        model.output.weight = model.embedding.weight  # as the warning says
        tokens, weights = torch.arange(16).view(2, 8), replicated(2, 8, 32)
        (model(tokens) * part(weights, 2)).sum().backward()
        true = copy.deepcopy(exact).double()
        (true(tokens) * weights).sum().backward()
        assert_near(full(model.embedding.weight.grad), true.embedding.weight.grad)
    with warns(""):
        parallelize_module(with_parameters_of_rank_0(Model()), tp_mesh(), plan())


@case
def compiled_layers_are_refused() -> None:
    model = Model()
    model.layers[2] = torch.compile(model.layers[2], backend="eager")
    model.layers[3].mlp = torch.compile(model.layers[3].mlp, backend="eager")
    up = model.layers[1].mlp.up
    model.layers[1].mlp.up = torch.compile(up, backend="eager")
    column, names = ColwiseParallel(), ColwiseParallel("gate", "up")
    for layers, path in (
        ({"layers.1.mlp.up": column}, "layers.1.mlp.up"),
        ({"layers.1.mlp": names}, "layers.1.mlp.up"),
        ({"layers.3.mlp": names}, "layers.3.mlp"),
        ({"layers.2": column}, "layers.2"),
    ):
        error = refusal(lambda layers=layers: parallelize_module(model, tp_mesh(), layers))
        assert error.message == f"{path} (OptimizedModule) is compiled already"
    assert type(model.layers[1].mlp.gate) is nn.Linear, "nothing is sharded when an error is raised"
    with warns("layers.1.mlp.up is compiled already"):
        parallelize_module(model, tp_mesh(), {"output": column})
    exact = with_parameters_of_rank_0(Layer())
    model, x = copy.deepcopy(exact), replicated(2, 8, 8)
    model.compile(backend="eager")
    model(x)
    styles = {name.removeprefix("layers.*."): s for name, s in plan().items() if name.startswith("layers")}
    with warns(""):
        parallelize_module(model, tp_mesh(), styles)
    assert_near(model(part(x, 1)), part(exact.double()(x.double()), 1))


class Attention(nn.Module):
    """Attention over as many heads as the widths of its layers hold."""

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
    exact, x = with_parameters_of_rank_0(nn.Sequential(Attention(2 * RANKS, 1))), replicated(2, 8, 8)
    for layers in (
        {"0": ColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))},
        {f"0.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("wq", "wk", "wv")},
    ):
        model = copy.deepcopy(exact)
        with warns(
            f"0.wk (Linear) computes 1 head of 4 columns, and each of the {RANKS} ranks gets {4 // RANKS} columns"
        ):
            parallelize_module(model, tp_mesh(), layers)
        with pytest.raises(RuntimeError, match="unflatten"):
            model(part(x, 1))
    model = copy.deepcopy(exact)
    for name in ("wk", "wv"):  # as the warning says
        layer = getattr(model[0], name)
        weight = layer.weight.data.unflatten(0, (-1, 4)).repeat_interleave(RANKS, 0).flatten(0, 1)
        setattr(model[0], name, nn.Linear(8, 4 * RANKS, bias=False))
        getattr(model[0], name).weight.data = weight
    with warns(""):
        parallelize_module(model, tp_mesh(), {"0": ColwiseParallel("wq", "wk", "wv", input_layouts=Shard(1))})
    assert_near(model(part(x, 1)), part(exact.double()(x.double()), 2))
    with warns(""):  # as DTensors, parts of a head are allowed
        parallelize_module(
            with_parameters_of_rank_0(Attention(2, 1)), tp_mesh(), {"wk": ColwiseParallel(use_local_output=False)}
        )


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24 * RANKS)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)


@case
def a_fused_projection_is_a_warning_and_needs_rows_ordered_by_rank() -> None:
    exact, x = with_parameters_of_rank_0(nn.Sequential(Fused())), replicated(2, 8, 8)
    true = [part(y, 2) for y in copy.deepcopy(exact).double()(x.double())]
    model = copy.deepcopy(exact)
    with warns("0.qkv (Linear) seems to compute q, k and v at once"):
        parallelize_module(model, tp_mesh(), {"0.qkv": ColwiseParallel(input_layouts=Shard(1))})
    assert not all(torch.allclose(y.double(), z, atol=1e-3) for y, z in zip(model(part(x, 1)), true, strict=True))
    model = copy.deepcopy(exact)
    for parameter in model.parameters():
        q, k, v = parameter.data.chunk(3)
        by_rank = [rows.chunk(RANKS)[rank] for rank in range(RANKS) for rows in (q, k, v)]
        parameter.data = torch.cat(by_rank)
    with warns("chunk() or split()"):  # the warning cannot know the order of rows
        parallelize_module(model, tp_mesh(), {"0.qkv": ColwiseParallel(input_layouts=Shard(1))})
    for y, z in zip(model(part(x, 1)), true, strict=True):
        assert_near(y, z)
    assert QKVParallelLinear(8, 8 * RANKS, 8 * RANKS, tp_mesh())(part(x, 0))[1].shape[-1] == 8


# Communication counts ---------------------------------------------------------------------------------------------


def inputs(axis: int | None, wants_gradient: bool) -> Tensor:
    x = replicated(2, 8, 8)
    return (x if axis is None else part(x, axis)).clone().requires_grad_(wants_gradient)


def counted(model: nn.Module, x: Tensor) -> tuple[dict[str, int], dict[str, int], dict[str, dict[str, dict[str, int]]]]:
    """Return the collectives that CommDebugMode counts in forward, in backward, and by module in both."""
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


def mlp(styles: ModuleType, axis: int | None) -> nn.Module:
    """Return an MLP sharded by the styles of a Python module."""
    column = {} if axis is None else {"input_layouts": Shard(axis)}
    row = {} if axis is None else {"output_layouts": Shard(axis)}
    columns = {name: styles.ColwiseParallel(**column) for name in ("gate", "up")}
    plan = {**columns, "down": styles.RowwiseParallel(**row)}
    return parallelize_module(with_parameters_of_rank_0(MLP()), tp_mesh(), plan)


def prepared(axis: int | None) -> nn.Module:
    """Return an MLP sharded by torch's styles that gathers its input once."""
    layout = Replicate() if axis is None else Shard(axis)
    before = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
    columns = {name: style.ColwiseParallel() for name in ("gate", "up")}
    down = style.RowwiseParallel(output_layouts=layout)
    return parallelize_module(with_parameters_of_rank_0(MLP()), tp_mesh(), {"": before, **columns, "down": down})


def gathered_once(axis: int | None) -> nn.Module:
    """Return an MLP sharded by hostir's styles that gathers its input once."""
    layout = Replicate() if axis is None else Shard(axis)
    names, down = ColwiseParallel("gate", "up", input_layouts=layout), RowwiseParallel(output_layouts=layout)
    return parallelize_module(with_parameters_of_rank_0(MLP()), tp_mesh(), {"": names, "down": down})


@case
def comm_debug_mode_counts_the_same_collectives_as_for_torchs_styles() -> None:
    for axis, wants_gradient in itertools.product((None, 0, 1), (False, True)):
        x = inputs(axis, wants_gradient)
        apart, once = counted(mlp(style, axis), x), counted(prepared(axis), x)
        assert apart[0], "torch's own styles communicate"
        for strategy in ("sequential", "push") if axis is None else ("sequential", "ring", "push"):
            with hi.torch.install(strategy=strategy):
                counts = counted(mlp(hi.torch, axis), x)
                assert counts == apart, (strategy, axis, wants_gradient, counts, apart)
                gated = counted(GatedMLP(8, 16, tp_mesh(), sequence_dim=axis), x)
                assert gated[:2] == once[:2], (strategy, axis, wants_gradient, gated, once)
                if not wants_gradient:  # with gradients, the mode gives each layer another view of the input
                    assert counted(gathered_once(axis), x)[:2] == once[:2]


if __name__ == "__main__":
    main()
