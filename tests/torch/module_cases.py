"""What the ranks of tests/torch/test_operators.py run of modules and styles: `module_cases.py NAME ...`.

Whole modules of torch, with the same parameters on all ranks, are compared with sharded ones, in float64 and bits.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module, style
from torch.utils.checkpoint import checkpoint

import hostir as hi
import hostir.torch
from examples.llama import Float8Linear
from hostir.torch import (
    ColumnParallelLinear,
    ColwiseParallel,
    GatedMLP,
    QKVParallelLinear,
    RowParallelLinear,
    RowwiseParallel,
)
from tests.torch.layer_cases import leaf, near, whole
from tests.torch.operator_cases import DEVICE, RANK, RANKS, everywhere, main, part

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def ranks() -> DeviceMesh:
    return init_device_mesh(DEVICE, (RANKS,), mesh_dim_names=("tp",))


def same(module: nn.Module) -> nn.Module:
    """With the parameters of rank 0 on every rank."""
    for parameter in module.parameters():
        everywhere(parameter.data)
    return module


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(found: nn.Module, true: nn.Module) -> None:
    """The gradients of a sharded module are those of the whole one, in float64."""
    mine, theirs = dict(found.named_parameters()), dict(true.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        assert parameter.grad is not None, name
        near(full(parameter.grad), theirs[name].grad)


def calls(operator: str) -> int:
    return sum(row.calls for row in hi.torch.report() if row.operator == operator)


class Block(nn.Module):
    """Three layers of one input, and one of what they make together."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 16, bias, dtype=dtype) for bias in (True, False, False))
        self.out = nn.Linear(16, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.silu(self.a(x)) * self.b(x) + self.c(x))


def plan(axis: int) -> dict[str, style.ParallelStyle]:
    return {
        "": ColwiseParallel("a", "b", "c", input_layouts=Shard(axis)),
        "out": RowwiseParallel(output_layouts=Shard(axis)),
    }


# Styles ---------------------------------------------------------------------------------------------------------------


@case
def styles_are_torchs() -> None:
    for axis, local_in, local_out in itertools.product((0, 1), *[(True, False)] * 2):
        shard, bias = Shard(axis), local_in == local_out  # next to either of each
        exact = same(nn.Sequential(nn.Linear(8, 16, bias), nn.GELU(), nn.Linear(16, 8, bias)))
        x, weights = whole(4, 8, 8), whole(4, 8, 8)
        results = []
        for styles in ((ColwiseParallel, RowwiseParallel), (style.ColwiseParallel, style.RowwiseParallel)):
            model = copy.deepcopy(exact)
            col = styles[0](input_layouts=shard, use_local_output=local_in)
            row = styles[1](output_layouts=shard, use_local_output=local_out)
            parallelize_module(model, ranks(), {"0": col, "2": row})
            mine = leaf(part(x, axis))
            y = model(mine if local_in else DTensor.from_local(mine, ranks(), [shard]))
            assert isinstance(y, DTensor) != local_out
            (full(y) * weights).sum().backward() if not local_out else (y * part(weights, axis)).sum().backward()
            results.append((model, y, mine))
        true = copy.deepcopy(exact).double()
        given = leaf(x.double())
        true_y = true(given)
        (true_y * weights).sum().backward()
        for (model, y, mine), (other, theirs, _) in itertools.pairwise([*results, results[0]]):
            near(full(y) if not local_out else y, true_y if not local_out else part(true_y, axis))
            near(mine.grad, part(given.grad, axis))
            like(model, true)
            assert isinstance(y, DTensor) == isinstance(theirs, DTensor)
            ours, of_torch = model.state_dict(), other.state_dict()
            assert ours.keys() == of_torch.keys() == exact.state_dict().keys()
            for name, value in ours.items():
                assert value.placements == of_torch[name].placements
                assert torch.equal(value.full_tensor(), exact.state_dict()[name])


@case
def one_gather_serves_several_layers() -> None:
    for axis in (0, 1):
        exact = same(Block())
        model = parallelize_module(copy.deepcopy(exact), ranks(), plan(axis))
        x, weights = whole(4, 8, 8), whole(4, 8, 8)
        for _ in range(2):
            model.zero_grad()
            hi.torch.report(clear=True)
            mine = leaf(part(x, axis))
            with hi.torch.install(strict=True):
                (model(mine) * part(weights, axis)).sum().backward()
            assert calls("hostir::all_gather_matmul") == 2, "one before a, b and c; one of the gradient behind out"
            assert calls("hostir::matmul_reduce_scatter") == 2
        true, given = copy.deepcopy(exact).double(), leaf(x.double())
        (true(given) * weights).sum().backward()
        near(mine.grad, part(given.grad, axis))
        like(model, true)
    sharing = model.a, model.b
    with torch.no_grad():
        x = part(whole(4, 8, 8), 1).clone()
        before = model.a(x)
        after = model.b(x.add_(1))
        near(after, part(F.linear(DTensor.from_local(x, ranks(), [Shard(1)]).full_tensor(), exact.b.weight), 2))
        assert not torch.equal(before, model.a(x)), "a tensor that was written to is gathered again"
    assert sharing[1](x).requires_grad, "nor does a result without gradients serve a call with them"


@case
def what_styles_cannot_do_is_torchs_and_said() -> None:
    tp = ranks()
    for made, kwargs, why in (
        (ColwiseParallel, {"fp8": True}, "fp8 is for tokens that are gathered"),
        (ColwiseParallel, {"input_layouts": Shard(-1)}, "the axis that the product sums over"),
        (ColwiseParallel, {"input_layouts": Shard(0), "output_layouts": Replicate()}, "not sharded on the last axis"),
        (RowwiseParallel, {"output_layouts": Shard(-1)}, "not on the axis of the tokens"),
        (RowwiseParallel, {"output_layouts": Shard(0), "input_layouts": Replicate()}, "not sharded on the last axis"),
    ):
        exact = same(nn.Linear(8, 16))
        with pytest.raises(hi.HostIRError, match=why), hi.torch.install(strict=True):
            parallelize_module(copy.deepcopy(exact), tp, made(**kwargs))
        hi.torch.report(clear=True)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = parallelize_module(copy.deepcopy(exact), tp, made(**kwargs, use_local_output=False))
        assert [w.category for w in seen if why in str(w.message)] == [hi.FallbackWarning] * (RANK == 0)
        assert [row.strategy for row in hi.torch.report()] == ["torch"]
        x = whole(4, 8)
        near(full(model(distribute_tensor(x, tp, [Shard(0)]))), exact.double()(x.double()))
    with pytest.raises(hi.HostIRError, match="do not divide"), hi.torch.install(strict=True):
        parallelize_module(nn.Linear(8, 15), tp, ColwiseParallel(input_layouts=Shard(0)))
    with pytest.raises(hi.HostIRError, match="no linear layer 'wq'"):
        parallelize_module(Block(), tp, ColwiseParallel("wq", input_layouts=Shard(0)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        layer = parallelize_module(nn.Embedding(8, 16), tp, RowwiseParallel(output_layouts=Shard(0)))
        assert isinstance(layer.weight, DTensor)
    assert any("Embedding" in str(w.message) for w in seen) == (RANK == 0)


@case
def calls_that_do_not_fit_are_torchs_and_said() -> None:
    tp = ranks()
    exact = same(nn.Linear(8, 16))
    layers = [
        parallelize_module(copy.deepcopy(exact), tp, each)
        for each in (
            ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
            RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        )
    ]
    inputs = [(whole(4 * RANKS + 1, 8), Shard(0)), (whole(4 * RANKS, 8), Replicate()), (whole(8), Shard(0))]
    for layer, (x, placement) in itertools.product(layers, inputs):
        if x.ndim == 1 and layer is layers[1]:
            continue  # torch has nothing to scatter, either
        if placement == Replicate() and layer is layers[0]:
            continue  # a whole input is not gathered
        given = distribute_tensor(x, tp, [placement])
        with hi.torch.install(strict=True), pytest.raises(hi.HostIRError, match="cannot run"):
            layer(given)
        with warnings.catch_warnings(record=True):
            near(full(layer(given)), exact.double()(x.double()))
        exact.float()


# Modules --------------------------------------------------------------------------------------------------------------


@case
def modules_compute_what_whole_layers_do() -> None:
    tp = ranks()
    for axis, local in itertools.product((0, 1), (True, False)):
        exact = same(nn.ModuleDict({n: nn.Linear(*s) for n, s in {"up": (8, 16), "down": (16, 8)}.items()}))
        up = ColumnParallelLinear.from_linear(exact["up"], tp, gather_dim=axis, local_output=local)
        down = RowParallelLinear.from_linear(exact["down"], tp, scatter_dim=axis, local_output=local)
        x, weights = whole(4, 8, 8), whole(4, 8, 8)
        true, given, mine = copy.deepcopy(exact).double(), leaf(x.double()), leaf(part(x, axis))
        with hi.torch.install(strict=True):
            y = down(up(mine if local else DTensor.from_local(mine, tp, [Shard(axis)])))
            ((y if local else y.to_local()) * part(weights, axis)).sum().backward()
        (true["down"](true["up"](given)) * weights).sum().backward()
        near(mine.grad, part(given.grad, axis))
        like(nn.ModuleDict({"up": up, "down": down}), true)
    drawn = ColumnParallelLinear(8, 16, tp, dtype=torch.bfloat16, device=DEVICE)
    assert drawn.weight.full_tensor().shape == (16, 8)
    assert drawn.weight.dtype == torch.bfloat16
    assert f"{RANKS} ranks" in repr(drawn)
    with pytest.raises(hi.HostIRError, match="DeviceMesh of one dimension"):
        ColumnParallelLinear(8, 16, dist.group.WORLD)


@case
def replicated_ends_are_all_reduces() -> None:
    tp = ranks()
    for local in (True, False):
        exact = same(nn.ModuleDict({"a": nn.Linear(8, 16), "b": nn.Linear(8, 16, bias=False), "out": nn.Linear(16, 8)}))
        plan = {"": ColwiseParallel("a", "b"), "out": RowwiseParallel(use_local_output=local)}
        model = parallelize_module(copy.deepcopy(exact), tp, plan)
        x, weights = whole(5, 8), whole(5, 8)  # no number of ranks divides the rows
        mine = leaf(x)
        hi.torch.report(clear=True)
        with hi.torch.install(strict=True):
            given = mine if local else DTensor.from_local(mine, tp, [Replicate()])
            y = model["out"](F.silu(model["a"](given)) * model["b"](given))
            assert isinstance(y, DTensor) != local
            (y * weights if local else y * distribute_tensor(weights, tp, [Replicate()])).sum().backward()
        assert calls("hostir::matmul_all_reduce") == 1, "of out"
        assert calls("hostir::all_reduce") == 1, "of the gradient of the input, of both layers"
        true, given = copy.deepcopy(exact).double(), leaf(x.double())
        true_y = true["out"](F.silu(true["a"](given)) * true["b"](given))
        (true_y * weights).sum().backward()
        near(full(y), true_y)
        near(mine.grad, given.grad)
        like(model, true)
    with torch.no_grad():
        assert RowParallelLinear.from_linear(exact["out"], tp, scatter_dim=None)(part(whole(4, 16), 1)).shape == (4, 8)
    for parameter in (model["a"].weight, model["b"].weight):
        parameter.requires_grad_(False)
    frozen = leaf(x)
    (model["a"](frozen) + model["b"](frozen)).sum().backward()
    near(frozen.grad, (exact["a"].weight + exact["b"].weight).double().sum(0).expand(5, 8))
    assert calls("hostir::matmul_all_reduce") == 3, "and of the gradient of the input, where nothing else is to be done"
    up, gated = ColumnParallelLinear(8, 16, tp, gather_dim=None), GatedMLP(8, 16, tp, sequence_dim=None)
    up(x).sum().backward()  # of the weights alone
    near(full(up.weight.grad), x.double().sum(0).expand(16, 8))
    near(gated(x), exact_gated(gated, x))
    row, w, dy = leaf(whole(8)), leaf(part(whole(16, 8), 0)), part(whole(16), 0)  # one token, without an axis for it
    hi.torch.column_parallel_linear(row, w, tp, gather_dim=None).backward(dy)
    near(w.grad, torch.outer(dy.double(), row.double()))
    near(row.grad, hi.torch.all_reduce((dy.double() @ w.double()).detach(), tp))
    frozen = leaf(row)
    hi.torch.column_parallel_linear(frozen, w.detach(), tp, gather_dim=None).backward(dy)
    near(frozen.grad, row.grad.double())
    for given in (leaf(row), row.detach()):
        mine = leaf(w)
        (y,) = torch.ops.hostir.replicated_linear(given, [mine], tp.get_group().group_name)
        y.backward(dy)
        near(mine.grad, w.grad.double())
        if given.requires_grad:
            near(given.grad, row.grad.double())


def exact_gated(mlp: GatedMLP, x: Tensor) -> Tensor:
    gate, up, down = (layer.weight.full_tensor().double().t() for layer in (mlp.gate, mlp.up, mlp.down))
    return (F.silu(x.double() @ gate) * (x.double() @ up)) @ down


@case
def attention_and_gated_mlp_gather_once() -> None:
    tp = ranks()
    for axis in (0, 1):
        q, k, v = (same(nn.Linear(8, n, bias=False)) for n in (16, 8, 8))
        gate, up, down = (same(nn.Linear(*s, bias=False)) for s in ((8, 16), (8, 16), (16, 8)))
        exact = nn.ModuleDict({"q": q, "k": k, "v": v, "gate": gate, "up": up, "down": down})
        projections = QKVParallelLinear.from_linear(q, k, v, tp, gather_dim=axis)
        mlp = GatedMLP.from_linear(gate, up, down, tp, sequence_dim=axis)
        assert mlp.state_dict().keys() == {f"{n}.weight" for n in ("gate", "up", "down")}
        x = whole(4, 8, 8)
        mine = leaf(part(x, axis))
        hi.torch.report(clear=True)
        with hi.torch.install(strict=True):
            parts = projections(mine)
            y = mlp(mine)
        assert calls("hostir::all_gather_matmul") == 1
        assert calls("hostir::all_gather_gated") == 1
        true, given = copy.deepcopy(exact).double(), leaf(x.double())
        trues = [true[n](given) for n in "qkv"]
        true_y = true["down"](F.silu(true["gate"](given)) * true["up"](given))
        for found, each in zip(parts, trues, strict=True):
            near(found, part(each, 2))
        near(y, part(true_y, axis))
        (sum(p.sum() for p in parts) + y.sum()).backward()
        (sum(t.sum() for t in trues) + true_y.sum()).backward()
        near(mine.grad, part(given.grad, axis))
        like(nn.ModuleDict({**projections._modules, **mlp._modules}), true)
        bf16 = mlp.bfloat16()
        with pytest.raises(RuntimeError, match="dtype"), warnings.catch_warnings(record=True):
            bf16(mine)  # the words are torch's
    drawn = GatedMLP(8, 16, tp)
    near(full(drawn.up.weight), drawn.up.weight.full_tensor().double())
    QKVParallelLinear(8, 16, 8, tp)


@case
def layers_in_fp8_multiply_rounded_numbers() -> None:
    tp = ranks()
    for axis, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        exact = same(Block(dtype))
        model = copy.deepcopy(exact)
        columns = ColwiseParallel("a", "b", "c", input_layouts=Shard(axis), fp8=True)
        parallelize_module(model, tp, {"": columns, "out": RowwiseParallel(output_layouts=Shard(axis), fp8=True)})
        x, weights = whole(4, 32, 8, dtype=dtype), whole(4, 32, 8, dtype=dtype)
        x[..., 0] *= torch.logspace(-1, 1, 32, 2.0)  # rows of other sizes have other scales; none outweighs all others
        mine = leaf(part(x, axis))
        hi.torch.report(clear=True)
        with hi.torch.install(strict=True):
            y = model(mine)
            (y * part(weights, axis)).sum().backward()
        names = "hostir::all_gather_scaled_matmul", "hostir::scaled_matmul_reduce_scatter"
        assert [calls(name) for name in names] == [2, 2]
        assert "fp8" in repr(model.a)
        rounded_alone, given = copy.deepcopy(exact).double(), leaf(x.double())
        for name, layer in rounded_alone.named_children():
            layer.__class__ = Float8Linear
            layer.gathers_dy = name == "out"
        true_y = rounded_alone(given)
        (true_y * weights).sum().backward()
        # A number on the border goes to its other neighbour, 1/12 away, if it was computed otherwise: of bf16, rounded
        # several times, one in ten (3 %); on tensor cores, which add up fp8 in some 14 bits, one in 500 (0.4 %).
        bound = 4e-2 if dtype == torch.bfloat16 else 1e-2 if DEVICE == "cuda" else 1e-3
        gradients = {n: (full(model.get_parameter(n).grad), p.grad) for n, p in rounded_alone.named_parameters()}
        pairs = {"y": (y, part(true_y, axis)), "dx": (mine.grad, part(given.grad, axis)), **gradients}
        off = {name: ((found.double() - true).norm() / true.norm()).item() for name, (found, true) in pairs.items()}
        assert max(off.values()) <= bound, (dtype, bound, off)
    x, w = whole(32, 64), whole(16, 64)
    y = hi.torch.column_parallel_linear(part(x, 0), w, tp, fp8=True)
    assert ((y - x @ w.t()).abs() <= ((1 + 2**-4) ** 2 - 0.999) * (x.abs() @ w.t().abs())).all()
    hostile = x.clone()
    hostile[0, 0], hostile[1, 1], hostile[2] = torch.nan, torch.inf, 0
    y = hi.torch.column_parallel_linear(part(hostile, 0), w, tp, fp8=True)
    assert y[:2].isnan().all()
    assert y[2:].isfinite().all()
    with pytest.raises(hi.HostIRError, match="not summed on all ranks"):
        hi.torch.row_parallel_linear(x, w, tp, reduce="all", fp8=True)
    with pytest.raises(hi.HostIRError, match="products in fp8 are not summed"), hi.torch.install(strict=True):
        parallelize_module(nn.Linear(16, 8), tp, RowwiseParallel(fp8=True))
    for layer in (hi.torch.column_parallel_linear, hi.torch.row_parallel_linear):
        with pytest.raises(hi.HostIRError, match=r"input of torch\.float32 and weights of torch\.bfloat16"):
            layer(part(x, 0), w.bfloat16(), tp, fp8=True)
    for made in (QKVParallelLinear(16, 16, 8, tp, fp8=True), GatedMLP(16, 32, tp, fp8=True)):
        ys = made(part(x[:, :16], 0))
        for found in (ys,) if isinstance(ys, Tensor) else ys:
            assert found.isfinite().all()
    assert calls("hostir::all_gather_gated") == 0


# With the rest of torch -----------------------------------------------------------------------------------------------


@case
def weights_of_modules_say_in_which_dtype_their_gradients_are() -> None:
    tp, x, h = ranks(), whole(16 * RANKS, 8), whole(16 * RANKS, 8 * RANKS)
    x, h = x.bfloat16(), h.bfloat16()
    for cls, given, true in ((ColumnParallelLinear, part(x, 0), x), (RowParallelLinear, part(h, 1), h)):
        layer = cls.from_linear(same(nn.Linear(true.shape[1], 8 * RANKS, bias=False).bfloat16()), tp)
        layer.weight.grad_dtype = torch.float32
        dy = whole(16 * RANKS, 8 * RANKS).bfloat16()
        column = cls is ColumnParallelLinear
        for _ in range(2):  # added up in f32, too
            (layer(leaf(given)) * part(dy, 1 if column else 0)).sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        assert layer.weight.grad.placements == layer.weight.placements
        exact = 2 * dy.double().t() @ true.double()
        torch.testing.assert_close(full(layer.weight.grad).double(), exact, rtol=1e-5, atol=1e-5)


@case
def modules_compile_copy_and_recompute() -> None:
    if RANKS != 2:
        return
    from torch._dynamo.testing import CompileCounterWithBackend

    exact = same(Block())
    model = parallelize_module(copy.deepcopy(exact), ranks(), plan(0))
    again = copy.deepcopy(model)
    assert again.a.shared is again.b.shared is not model.a.shared
    x = whole(8, 8)
    mine = part(x, 0)
    model.b(mine).sum().backward()  # frees a graph that the result of a, which is kept, is part of
    with torch.no_grad():
        for module in (model, exact, again):
            module.a.bias.add_(1.0)
    y = model.a(mine)
    y.sum().backward()
    torch.testing.assert_close(y, part(exact.a(x), 1))
    model.zero_grad()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(again, fullgraph=True, backend=counter, dynamic=True)
    for rows in (4, 6, 10):
        x = part(whole(rows * RANKS, 8), 0)
        ways = [leaf(x) for _ in range(3)]
        y = model(ways[0])
        y.sum().backward()
        for found, mine in (
            (compiled(ways[1]), ways[1]),
            (checkpoint(model, ways[2], use_reentrant=False), ways[2]),
        ):
            torch.testing.assert_close(found, y)
            found.sum().backward()
            torch.testing.assert_close(mine.grad, ways[0].grad)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), 2 * full(q.grad))  # twice: checkpointed, too
    assert counter.frame_count == 1
    torch._dynamo.reset()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert model.b(x).dtype == torch.bfloat16


@case
def fully_shard_and_checkpoints() -> None:
    if RANKS != 4:
        return
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    exact = same(nn.Sequential(Block(), Block()))
    model = copy.deepcopy(exact)
    parallelize_module(model, mesh["tp"], {f"{i}{'.' * bool(n)}{n}": s for i in range(2) for n, s in plan(0).items()})
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    true = copy.deepcopy(exact).double()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, true)]
    for _ in range(3):
        x = whole(2, 8, 8)  # a batch of each replica
        with hi.torch.install(strict=True):
            model(x[dp].chunk(2)[tp]).square().sum().backward()
        (sum(true(x.double()[i]).square().sum() for i in range(2)) / 2).backward()
        like(model, true)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        near(value.full_tensor(), true.state_dict()[name])
    layer = ColumnParallelLinear.from_linear(same(nn.Linear(8, 8, bias=False)), mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    x, dy = whole(2, 16, 8).bfloat16(), whole(2, 16, 8).bfloat16()
    for _ in range(2):  # added up in f32, as docs/models.md says
        (layer(leaf(x[dp].chunk(2)[tp])) * dy[dp].chunk(2, 1)[tp]).sum().backward()
    exact = sum((dy[i].double().t() @ x[i].double()).bfloat16().double() for i in range(2))
    assert layer.weight.grad.dtype == torch.float32
    error = (layer.weight.grad.full_tensor().double() - exact).abs() / exact.abs().max()
    assert error.max() <= 2**-8  # where a sum rounds to the neighbour
    assert error.median() <= 1e-6


@case
def a_checkpoint_of_some_ranks_is_loaded_by_others() -> None:
    if RANKS != 4:
        return
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    exact = same(Block())
    half = DeviceMesh(DEVICE, [0, 1])
    if RANK < 2:
        saved = parallelize_module(copy.deepcopy(exact), half, plan(0))
        dcp.save(saved.state_dict(), checkpoint_id=folder[0], process_group=half.get_group())
    dist.barrier()
    fresh = parallelize_module(Block(), ranks(), plan(0))
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    fresh.load_state_dict(state)
    alone = Block().state_dict()
    dcp.load(alone, checkpoint_id=folder[0], no_dist=True)
    for name, value in exact.state_dict().items():
        assert torch.equal(fresh.state_dict()[name].full_tensor(), value)
        assert torch.equal(alone[name], value)
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(folder[0])


if __name__ == "__main__":
    main(CASES)
