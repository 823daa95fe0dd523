"""What the ranks of tests/torch/test_operators.py run of the pass over graphs: `overlap_cases.py NAME ...`.

Graphs are those that AOTAutograd traces of torch's own DTensors and collectives; no code is generated for them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed._functional_collectives as funcol
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hostir as hi
import hostir.torch
from examples.llama import Block
from hostir.torch import OverlapPass
from tests.torch.layer_cases import leaf, near, whole
from tests.torch.module_cases import full, like, ranks, same
from tests.torch.operator_cases import DEVICE, RANKS, group, main, part

CASES: dict[str, Callable[[], None]] = {}
if torch.__version__ < "2.13":  # of gathers along other axes than the first; its dynamo does not look into it
    torch.compiler.allow_in_graph(torch._utils._maybe_view_chunk_cat)


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def passed(overlap: OverlapPass) -> Any:
    """A backend of torch.compile that runs the graphs as they are behind the pass."""

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        overlap(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)


def traced(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> tuple[Any, OverlapPass]:
    torch._dynamo.reset()
    overlap = OverlapPass()
    return torch.compile(function, fullgraph=True, backend=passed(overlap), dynamic=dynamic)(*inputs), overlap


def fused(overlap: OverlapPass) -> list[str]:
    return [each.fused.removeprefix("hostir::") for each in overlap.report]


AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
SCALED_AG, SCALED_RS = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"


@case
def mlps_of_dtensors() -> None:
    shape = (2, 4 * RANKS, 8)
    exact = same(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, False)))
    styles = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(copy.deepcopy(exact), ranks(), {"0": styles[0], "2": styles[1]})
    x, weights = whole(*shape), whole(*shape)
    mine = leaf(part(x, 1))
    y, overlap = traced(model, DTensor.from_local(mine, ranks(), [Shard(1)]), dynamic=True)
    (y * part(weights, 1)).sum().backward()
    true, given = copy.deepcopy(exact).double(), leaf(x.double())
    true_y = true(given)
    (true_y * weights).sum().backward()
    near(y, part(true_y, 1))
    near(mine.grad, part(given.grad, 1))
    like(model, true)
    assert fused(overlap) == [AG, RS, AG, RS]


PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


@case
def blocks_of_llama() -> None:
    exact = same(Block(64, 8, 4, 96))
    model = parallelize_module(copy.deepcopy(exact), ranks(), PLAN)
    x, weights = whole(2, 8 * RANKS, 64), whole(2, 8 * RANKS, 64)
    mine = leaf(part(x, 1))
    y, overlap = traced(model, DTensor.from_local(mine, ranks(), [Shard(1)]))
    (y.to_local() * part(weights, 1)).sum().backward()
    true, given = copy.deepcopy(exact).double(), leaf(x.double())
    true_y = true(given)
    (true_y * weights).sum().backward()
    near(full(y), true_y)
    near(mine.grad, part(given.grad, 1))
    like(model, true)
    assert fused(overlap)[:4] == [AG, RS, AG, RS], overlap.report
    assert "3 products and the gathered tensor" in str(overlap.report[0])
    assert "2 products and the gathered tensor" in str(overlap.report[2])
    backward = fused(overlap)[4:]
    assert backward.count(AG) == 2
    assert backward.count(RS) == 2
    assert "a sum of 2 products" in str(overlap.report)
    assert "a sum of 3 products" in str(overlap.report)


@case
def all_reduces_of_dtensors() -> None:
    exact = same(Block(8, 4, 4, 16).feed_forward)
    styles = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    model = parallelize_module(copy.deepcopy(exact), ranks(), {"": prepared, **styles})
    x, weights = whole(2, 5, 8), whole(2, 5, 8)  # rows that no number of ranks divides
    mine = leaf(x)
    y, overlap = traced(lambda x: model(x), mine)
    (y * weights).sum().backward()
    true, given = copy.deepcopy(exact).double(), leaf(x.double())
    true_y = true(given)
    (true_y * weights).sum().backward()
    near(y, true_y)
    near(mine.grad, given.grad)
    like(model, true)
    assert fused(overlap) == [AR, AR], overlap.report
    assert "a sum of 2 products" in str(overlap.report)
    a, b = whole(3, 5, 8), whole(8, 4)
    found, overlap = traced(lambda a, b: funcol.all_reduce(a @ b, "sum", group()).relu(), a, b, dynamic=True)
    near(found, (a.double() @ b.double()).relu() * RANKS)
    assert fused(overlap) == [AR]


@case
def products_of_fp8() -> None:
    f8, bf16 = torch.float8_e4m3fn, torch.bfloat16

    def gathered(x: Tensor, axis: int, dtype: torch.dtype | None = None) -> Tensor:
        y = funcol.all_gather_tensor(x if dtype is None else x.view(torch.uint8), axis, group())  # gloo knows no fp8
        return y if dtype is None else y.view(dtype)

    for axes, axis, mode in ((2, 0, "one"), (3, 0, "replicated"), (3, 1, "sharded"), (2, 1, "one")):
        whole_a, b = whole(*(16, 32) if axes == 2 else (4, 16, 32)).to(f8), whole(16, 32).to(f8).t()
        rows = whole(*whole_a.shape[:-1], 1).exp() if mode != "one" else torch.tensor(0.25)
        columns = whole(1, 16).exp() if mode != "one" else torch.tensor(0.5)

        def gather(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, axis: int = axis, mode: str = mode) -> Any:
            full = gathered(a, axis, f8)
            scale = gathered(of_a, axis) if mode == "sharded" else of_a
            flat = scale.reshape(-1, 1) if mode != "one" else scale
            y = torch._scaled_mm(full.flatten(0, -2), b, flat, of_b, out_dtype=bf16)
            return full.to(bf16).sum(), y.view(*full.shape[:-1], -1)

        def scatter(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, axis: int = axis, mode: str = mode) -> Tensor:
            flat = of_a.reshape(-1, 1) if mode != "one" else of_a
            y = torch._scaled_mm(a.flatten(0, -2), b, flat, of_b, out_dtype=bf16).view(*a.shape[:-1], -1)
            return funcol.reduce_scatter_tensor(y, "sum", axis, group())

        exact = (whole_a.double() * rows) @ (b.double() * columns)
        a = part(whole_a.view(torch.uint8), axis).contiguous().view(f8)
        of_a = part(rows, axis).contiguous() if mode == "sharded" else rows
        (total, y), overlap = traced(gather, a, b, of_a, columns)
        near(y, exact)
        torch.testing.assert_close(total, whole_a.to(bf16).sum())
        fits = axis < axes - 1
        assert fused(overlap) == [SCALED_AG * fits] * (1 + (mode == "sharded")), overlap.report
        assert ("1 product and the gathered tensor" if fits else "the products sum over") in str(overlap.report)
        assert ("the scales of all_gather" in str(overlap.report)) == (mode == "sharded")
        y, overlap = traced(scatter, whole_a, b, rows, columns)
        near(y, part(exact, axis) * RANKS)
        assert fused(overlap) == [SCALED_RS * fits], overlap.report
        assert ("it scatters columns of a scaled product" in str(overlap.report)) != fits


@case
def inductor_runs_what_the_pass_makes() -> None:
    """Matmuls alone: for anything else inductor would start a C++ compiler, which takes ten seconds."""
    exact = same(nn.Sequential(nn.Linear(8, 16, False), nn.Linear(16, 8, False)))
    x, weights = whole(1, 4 * RANKS, 8), whole(1, 4 * RANKS, 8)
    true, given = copy.deepcopy(exact).double(), leaf(x.double())
    true_y = true(given)
    (true_y * weights).sum().backward()
    for styles in ((ColwiseParallel, RowwiseParallel), (hi.torch.ColwiseParallel, hi.torch.RowwiseParallel)):
        plan = {"0": styles[0](input_layouts=Shard(1)), "1": styles[1](output_layouts=Shard(1))}
        model, mine = parallelize_module(copy.deepcopy(exact), ranks(), plan), leaf(part(x, 1))
        torch._dynamo.reset()
        overlap = OverlapPass()
        with inductor.patch(post_grad_custom_post_pass=overlap, force_disable_caches=True):
            y = torch.compile(model, fullgraph=True)(DTensor.from_local(mine, ranks(), [Shard(1)]))
            (y * part(weights, 1)).sum().backward()
        near(y, part(true_y, 1))
        near(mine.grad, part(given.grad, 1))
        like(model, true)
        assert fused(overlap) == [AG, RS, AG, RS] * (styles[0] is ColwiseParallel), overlap.report
    torch._dynamo.reset()


# MicroPipelineTPTest --------------------------------------------------------------------------------------------------


@case
def all_gathers_of_torchs_tests() -> None:
    for axes, axis, return_a in itertools.product((2, 3), (0, 1, 2), (True, False)):
        if axis >= axes:
            continue
        whole_a, b = whole(*(64, 32) if axes == 2 else (2, 64, 32)), whole(32, 16)

        def function(a: Tensor, b: Tensor, axis: int = axis, return_a: bool = return_a) -> Any:
            full = funcol.all_gather_tensor(a, gather_dim=axis, group=group())
            return (full, full @ b) if return_a else full @ b

        b = b.repeat(RANKS, 1) if axis == axes - 1 else b
        a = torch.cat([whole_a] * RANKS, 0) if axes == 3 and axis == 0 else whole_a
        a = torch.cat([whole_a] * RANKS, axis) if axis == axes - 1 else a
        found, overlap = traced(function, part(a, axis).contiguous(), b)
        full, c = found if return_a else (a, found)
        assert torch.equal(full, a)
        near(c, a.double() @ b.double())
        fits = axis < axes - 1
        assert fused(overlap) == [AG * fits]
        assert ("the axis that the products sum over" in str(overlap.report)) != fits
        assert ("and the gathered tensor" in str(overlap.report)) == (fits and return_a)


@case
def reduce_scatters_of_torchs_tests() -> None:
    for axes, axis, op in itertools.product((2, 3), (0, 1, 2), ("sum", "avg")):
        if axis >= axes or (op == "avg" and torch.distributed.get_backend() == "gloo"):
            continue
        a, b = whole(*(64, 32) if axes == 2 else (4, 64, 32)), whole(32, 16)

        def function(a: Tensor, b: Tensor, axis: int = axis, op: str = op) -> Tensor:
            return funcol.reduce_scatter_tensor(a @ b, op, scatter_dim=axis, group=group())

        found, overlap = traced(function, a, b)
        near(found, part(a.double() @ b.double(), axis) * (RANKS if op == "sum" else 1))
        assert fused(overlap) == [RS]


@case
def collectives_that_are_left_alone_say_why() -> None:
    a, b = whole(8, 8), whole(8, 8)
    gather = lambda x, axis=0: funcol.all_gather_tensor(x, axis, group())  # noqa: E731
    scatter = lambda x, axis=0, op="sum": funcol.reduce_scatter_tensor(x, op, axis, group())  # noqa: E731

    def twice(a: Tensor, b: Tensor) -> Any:
        c = a @ b
        return scatter(c), c.relu()

    def of_its_own(a: Tensor, b: Tensor) -> Tensor:
        full = gather(a)
        return full.relu() @ full[:8]

    functions: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "used by relu": lambda a, b: gather(a).relu(),
        "right side of mm: a gathered weight": lambda a, b: b.repeat(1, RANKS) @ gather(a),
        "before it is relu": lambda a, b: scatter((a @ b).relu()),
        "before it is cat": lambda a, b: scatter(torch.cat((a @ b).chunk(2 * RANKS, 1))),  # of more parts than ranks
        "has 2 users": twice,
        "its sum is 'max'": lambda a, b: scatter(a @ b, op="max"),
        "its sum is 'min'": lambda a, b: funcol.all_reduce(a @ b, "min", group()),
        "only all-gathers, reduce-scatters and all-reduces": lambda a, b: funcol.broadcast(a @ b, 0, group()),
        "it gathers a tensor of 1 axes": lambda a, b: gather(a[0]) * 2,
        "relu": of_its_own,
    }
    if DEVICE == "cpu":  # GPUs multiply no integers
        functions["its dtypes are torch.int64"] = lambda a, b: gather(a.long()) @ b.long()
    for why, function in functions.items():
        found, overlap = traced(function, a, b)
        assert why in str(overlap.report), overlap.report
        assert not any(fused(overlap)), overlap.report
        for mine, true in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, function(a, b))), strict=True):
            torch.testing.assert_close(mine, true)
    assert "Inductor took it from its cache" in str(OverlapPass().report)


@case
def several_gathers_of_one_graph() -> None:
    a, b, c = whole(8, 16), whole(16, 16), whole(16, 16)

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(a, 0, group())
        x = full @ b
        late = x.sum() * c  # a right side that comes after another product of the same rows
        y = full @ late + full @ (c * 2)
        return funcol.reduce_scatter_tensor(torch.addmm(x[0], y, c), "sum", 0, group())

    found, overlap = traced(function, part(a, 0), b, c)
    full = a.double()
    x = full @ b.double()
    y = full @ (x.sum() * c.double()) + full @ (c.double() * 2)
    near(found, part(y @ c.double() + x[0], 0) * RANKS)
    assert fused(overlap)[0] == AG
    assert "2 products and the gathered tensor" in str(overlap.report)

    def added(a: Tensor, b: Tensor, z: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(a, 1, group())
        return torch.addmm(z, full.reshape(-1, 16), b)

    a, z = whole(3, 2 * RANKS, 16), whole(6 * RANKS, 16)
    for residual in (z, z[:, :1].contiguous(), z[:1], z[0]):
        found, overlap = traced(added, part(a, 1).contiguous(), b, residual)
        near(found, a.flatten(0, 1).double() @ b.double() + residual)
        assert fused(overlap) == [AG]

    def between(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(funcol.all_gather_tensor(a, 0, group()) @ b, 0, group())
        full = full / full.square().sum().sqrt()
        rows = funcol.reduce_scatter_tensor(full, "sum", 0, group())
        return funcol.reduce_scatter_tensor(rows @ c, "sum", 0, group())

    a = whole(8, 16)
    found, overlap = traced(between, part(a, 0), b, c)
    product = a.double() @ b.double()
    near(found, part(product / product.norm() * RANKS**0.5 @ c.double(), 0) * RANKS)
    assert fused(overlap) == [AG, "", "", RS]


if __name__ == "__main__":
    main(CASES)
