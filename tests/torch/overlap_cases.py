"""Cases of the pass over graphs that fuses matmuls and collectives; test_operators.py starts the ranks.

AOTAutograd traces the graphs from torch's DTensors and collectives. No code is generated for them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import ScalingType as Recipe

import hostir as hi
import hostir.torch
from examples.llama import Block
from hostir.torch import OverlapPass
from tests.torch.on_ranks import (
    DEVICE,
    RANKS,
    assert_gradients_near,
    assert_like_unsharded,
    assert_near,
    case,
    full,
    group,
    leaf,
    main,
    part,
    replicated,
    tp_mesh,
    with_parameters_of_rank_0,
)
from tests.torch.without_code import backend_with

if torch.__version__ < "2.13":  # dynamo cannot trace these functions
    torch.compiler.allow_in_graph(torch._utils._maybe_view_chunk_cat)  # gathers along other axes than the first
    torch.compiler.allow_in_graph(torch._scaled_mm_v2)  # products of fp8 with recipes


class Watched(OverlapPass):
    """The pass, which also records the collectives that remain in its graphs."""

    left: tuple[str, ...] = ()
    graph: torch.fx.Graph  # the latest

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        names = [node.name for node in graph.nodes if getattr(node.target, "namespace", "") == "_c10d_functional"]
        self.left, self.graph = (*self.left, *names), graph


def traced(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> tuple[Any, Watched]:
    torch._dynamo.reset()
    overlap = Watched()
    return torch.compile(function, fullgraph=True, backend=backend_with(overlap), dynamic=dynamic)(*inputs), overlap


def traced_together(
    *calls: tuple[Callable[..., Any], tuple[Tensor, ...]], dynamic: bool | None = None
) -> tuple[list[Any], Watched]:
    """Trace several calls as one graph, which takes less time than a graph for each; return their results.

    Each call gets copies of its tensors, so no two calls gather the same tensor.
    """
    inputs = [x.clone() for _, tensors in calls for x in tensors]  # clone keeps the strides

    def every(*inputs: Tensor) -> list[Any]:
        results, rest = [], inputs
        for function, tensors in calls:
            results.append(function(*rest[: len(tensors)]))
            rest = rest[len(tensors) :]
        return results

    return traced(every, *inputs, dynamic=dynamic)


def fused(overlap: OverlapPass) -> list[str]:
    return [entry.fused.removeprefix("hostir::") for entry in overlap.report]


AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
ARN, RSN = "all_reduce_residual_norm", "reduce_scatter_residual_norm"
SCALED_AG, SCALED_RS = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"


@case
def mlps_of_dtensors_are_fused() -> None:
    shape = (2, 4 * RANKS, 8)
    exact = with_parameters_of_rank_0(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, False)))
    styles = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(copy.deepcopy(exact), tp_mesh(), {"0": styles[0], "2": styles[1]})
    x, weights = replicated(*shape), replicated(*shape)
    mine = leaf(part(x, 1))
    y, overlap = traced(model, DTensor.from_local(mine, tp_mesh(), [Shard(1)]), dynamic=True)
    (y * part(weights, 1)).sum().backward()
    assert_like_unsharded(model, exact, x, weights, y, mine.grad, 1)
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
def blocks_of_llama_are_fused() -> None:
    exact = with_parameters_of_rank_0(Block(64, 8, 4, 96))
    model = parallelize_module(copy.deepcopy(exact), tp_mesh(), PLAN)
    x, weights = replicated(2, 8 * RANKS, 64), replicated(2, 8 * RANKS, 64)
    mine = leaf(part(x, 1))
    y, overlap = traced(model, DTensor.from_local(mine, tp_mesh(), [Shard(1)]))
    (y.to_local() * part(weights, 1)).sum().backward()
    assert_like_unsharded(model, exact, x, weights, full(y), mine.grad, 1)
    assert fused(overlap)[:4] == [AG, RS, AG, RS], overlap.report
    assert "3 products and the gathered tensor" in str(overlap.report[0])
    assert "2 products and the gathered tensor" in str(overlap.report[2])
    backward = fused(overlap)[4:]
    assert backward.count(AG) == 2
    assert backward.count(RS) == 2
    assert "a sum of 2 products" in str(overlap.report)
    assert "a sum of 3 products" in str(overlap.report)


@case
def all_reduces_of_dtensors_are_fused() -> None:
    exact = with_parameters_of_rank_0(Block(8, 4, 4, 16).feed_forward)
    styles = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    model = parallelize_module(copy.deepcopy(exact), tp_mesh(), {"": prepared, **styles})
    x, weights = replicated(2, 5, 8), replicated(2, 5, 8)  # rows that the ranks do not divide
    mine = leaf(x)
    y, overlap = traced(lambda x: model(x), mine)
    (y * weights).sum().backward()
    assert_like_unsharded(model, exact, x, weights, y, mine.grad, 0)
    assert fused(overlap) == [AR, AR], overlap.report
    assert "a sum of 2 products" in str(overlap.report)
    a, b = replicated(3, 5, 8), replicated(8, 4)
    result, overlap = traced(lambda a, b: funcol.all_reduce(a @ b, "sum", group()).relu(), a, b, dynamic=True)
    assert_near(result, (a.double() @ b.double()).relu() * RANKS)
    assert fused(overlap) == [AR]


@case
def products_of_fp8_are_fused() -> None:
    f8, bf16 = torch.float8_e4m3fn, torch.bfloat16

    def gathered(x: Tensor, axis: int, dtype: torch.dtype | None = None) -> Tensor:
        y = funcol.all_gather_tensor(x if dtype is None else x.view(torch.uint8), axis, group())  # gloo has no fp8
        return y if dtype is None else y.view(dtype)

    for axes, axis, mode in ((2, 0, "one"), (3, 0, "replicated"), (3, 1, "sharded"), (2, 1, "one")):
        full_a, b = replicated(*(16, 32) if axes == 2 else (4, 16, 32)).to(f8), replicated(16, 32).to(f8).t()
        rows = replicated(*full_a.shape[:-1], 1).exp() if mode != "one" else torch.tensor(0.25)
        columns = replicated(1, 16).exp() if mode != "one" else torch.tensor(0.5)

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

        exact = (full_a.double() * rows) @ (b.double() * columns)
        a = part(full_a.view(torch.uint8), axis).contiguous().view(f8)
        of_a = part(rows, axis).contiguous() if mode == "sharded" else rows
        ((total, y), rows_of_sum), overlap = traced_together(
            (gather, (a, b, of_a, columns)), (scatter, (full_a, b, rows, columns))
        )
        assert_near(y, exact)
        torch.testing.assert_close(total, full_a.to(bf16).sum())
        assert_near(rows_of_sum, part(exact, axis) * RANKS)
        fits = axis < axes - 1
        gathers = 1 + (mode == "sharded")
        assert fused(overlap) == [SCALED_AG * fits] * gathers + [SCALED_RS * fits], overlap.report
        assert ("1 product and the gathered tensor" if fits else "the products sum over") in str(overlap.report)
        assert ("the scales of all_gather" in str(overlap.report)) == (mode == "sharded")
        assert ("it scatters columns of a scaled product" in str(overlap.report)) != fits


F8 = torch.float8_e4m3fn


def calls(*names: str) -> list[int]:
    """Return the numbers of calls of operators since the last report; no other operator may have run."""
    rows = hi.torch.report(clear=True)
    assert {row.operator for row in rows} <= {f"hostir::{name}" for name in names}, rows
    assert all(row.strategy != "torch" for row in rows), rows
    return [sum(row.calls for row in rows if row.operator == f"hostir::{name}") for name in names]


def joined(x: Tensor, axis: int, by: str) -> Tensor:
    """Gather fp8 along another axis than the first, by concatenating bytes: `cat` has no fp8."""
    if by == "fp8":  # as DTensors of fp8 are gathered
        parts = funcol.all_gather_tensor(x, 0, group()).chunk(RANKS)
        return torch.cat([rows.view(torch.uint8) for rows in parts], axis).view(F8)
    full = funcol.all_gather_tensor(x.view(torch.uint8), 0, group())
    if by == "fp8 of bytes":
        full = full.view(F8)
    dtype = torch.int16 if by == "pairs of bytes" else torch.int8
    parts = full.chunk(RANKS)[:: -1 if by == "reversed bytes" else 1]
    if by == "numbers":
        return torch.cat([rows.view((torch.uint8, torch.int8)[k % 2]) for k, rows in enumerate(parts)], axis).to(F8)
    return torch.cat([rows.view(dtype) for rows in parts], axis).view(F8)


def rows_of_fp8(a: Tensor, b: Tensor, axis: int, by: str, more: bool = False) -> Any:
    full = joined(a, axis, by)
    quarter, half = (torch.tensor(x, device=a.device) for x in (0.25, 0.5))  # dynamo may ignore the default device
    y = torch._scaled_mm(full.flatten(0, -2), b, quarter, half, out_dtype=torch.bfloat16)
    y = y.view(*full.shape[:-1], -1)
    return (y, full.float()) if more else y


@case
def gathers_of_fp8_along_other_axes_are_fused() -> None:
    full_a, b = replicated(4, 8 * RANKS, 32).to(F8), replicated(16, 32).to(F8).t()
    a = part(full_a.view(torch.uint8), 1).contiguous().view(F8)
    expected = rows_of_fp8(a, b, 1, "bytes")
    assert_near(expected, (full_a.double() * 0.25) @ (b.double() * 0.5))
    hi.torch.report(clear=True)
    ways = "fp8", "bytes", "fp8 of bytes"
    for dynamic in (False, True):
        ys, overlap = traced_together(*((partial(rows_of_fp8, axis=1, by=by), (a, b)) for by in ways), dynamic=dynamic)
        for y in ys:
            assert_near(y, expected)
        assert fused(overlap) == [SCALED_AG] * 3, overlap.report
        assert overlap.left == ()
        assert calls(SCALED_AG) == [3]
    (y, full), overlap = traced(rows_of_fp8, a, b, 1, "fp8", True)
    assert_near(y, expected)
    assert torch.equal(full, full_a.float())
    assert "1 product and the gathered tensor" in str(overlap.report)
    assert overlap.left == ()


@case
def parts_concatenated_in_another_way_are_not_fused() -> None:
    a, b = replicated(4, 8, 32).to(F8), replicated(16, 32).to(F8).t()
    reasons = {
        (1, "pairs of bytes"): "as torch.int16, of another size",
        (1, "reversed bytes"): "puts its parts together otherwise than rank by rank",
        (1, "numbers"): "puts its parts together otherwise than rank by rank",
        (2, "bytes"): "the axis that the products sum over",
    }
    wide = b.t().contiguous().view(torch.uint8).repeat(1, RANKS).view(F8).t()
    calls = [(partial(rows_of_fp8, axis=axis, by=by), (a, b if axis == 1 else wide)) for axis, by in reasons]
    ys, overlap = traced_together(*calls)
    for y, (function, inputs), reason, entry in zip(ys, calls, reasons.values(), overlap.report, strict=True):
        torch.testing.assert_close(y, function(*inputs))
        assert entry.fused == ""
        assert reason in str(entry), overlap.report


@case
def gathered_bytes_viewed_as_two_dtypes_are_fused_once() -> None:
    full_a, b = replicated(8 * RANKS, 32).to(F8), replicated(16, 32).to(F8).t()

    def function(a: Tensor, b: Tensor, one: Tensor) -> Any:
        full = funcol.all_gather_tensor(a.view(torch.uint8), 0, group())
        dtypes = F8, torch.float8_e5m2
        return [torch._scaled_mm(full.view(d), b, one, one, out_dtype=torch.bfloat16) for d in dtypes]

    inputs = part(full_a.view(torch.uint8), 0).contiguous().view(F8), b, torch.tensor(1.0)
    ys, overlap = traced(function, *inputs)
    for y, true in zip(ys, function(*inputs), strict=True):
        assert_near(y, true)
    assert "1 product and the gathered tensor" in str(overlap.report)


def flat_products(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, axis: int) -> Tensor:
    full = funcol.all_gather_tensor(a.view(torch.uint8), axis, group()).view(F8)
    scale = funcol.all_gather_tensor(of_a, axis, group())
    y = torch._scaled_mm(full.flatten(0, -2), b, scale.flatten(0, -2), of_b, out_dtype=torch.bfloat16)
    return y.view(full.shape[0], full.shape[1], -1)


def flat_rows(a: Tensor, b: Tensor, axis: int) -> Tensor:
    full = funcol.all_gather_tensor(a, axis, group())
    return (full.flatten(0, -2) @ b).view(full.shape[0], full.shape[1], -1)


def flat_sums(a: Tensor, b: Tensor, axis: int) -> Tensor:
    y = funcol.reduce_scatter_tensor((a.flatten(0, -2) @ b).view(a.shape[0], a.shape[1], -1), "sum", axis, group())
    return y.flatten(0, -2).view(y.shape[0], y.shape[1], -1) * y.shape[axis]


@case
def sizes_of_fused_results_do_not_keep_the_unfused_results() -> None:
    full_a, b = replicated(2 * RANKS, 4 * RANKS, 32), replicated(32, 16)
    of_rows, of_b, right = (
        replicated(*full_a.shape[:-1], 1).exp(),
        replicated(1, 16).exp(),
        replicated(16, 32).to(F8).t(),
    )
    for axis, free in itertools.product((0, 1), (False, True)):
        a, of_a = part(full_a, axis).contiguous(), part(of_rows, axis).contiguous()
        calls = (
            (partial(flat_rows, axis=axis), (a, b)),
            (partial(flat_sums, axis=axis), (full_a, b)),
            (partial(flat_products, axis=axis), (a.to(F8), right, of_a, of_b)),
        )
        ys, overlap = traced_together(*calls, dynamic=free)
        for y, (function, inputs) in zip(ys, calls, strict=True):
            assert_near(y, function(*inputs))
        assert fused(overlap) == [AG, RS, SCALED_AG, SCALED_AG], overlap.report
        assert overlap.left == ()
        if free:
            names = [node.name for node in overlap.graph.nodes if node.target is torch.ops.aten.sym_size.int]
            assert names == []


def blocks(x: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers that quantized rows stand for, with one scale for each 128 elements of a row."""
    return x.double() * scale.repeat_interleave(128, -1).double()


def by_blocks(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, recipes: bool) -> Tensor:
    """Return the product with scales of 1x128 and 128x128 blocks in the layouts that cuBLAS needs."""
    of_a = of_a.t().contiguous().t()
    if not recipes:
        return torch._scaled_mm(a, b, of_a, of_b, out_dtype=torch.bfloat16)
    one, other = Recipe.BlockWise1x128, Recipe.BlockWise128x128
    return torch.nn.functional.scaled_mm(a, b, of_a, one, of_b, other, output_dtype=torch.bfloat16)


@case
def products_of_fp8_with_scales_of_blocks_are_fused() -> None:
    K, N = 256, 256  # torch multiplies these on GPUs only

    def gather(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, axis: int, sharded: bool, recipes: bool) -> Tensor:
        full = funcol.all_gather_tensor(a.view(torch.uint8), axis, group()).view(F8)
        scale = funcol.all_gather_tensor(of_a, axis, group()) if sharded else of_a
        y = by_blocks(full.flatten(0, -2), b, scale.flatten(0, -2), of_b, recipes)
        return y.view(*full.shape[:-1], -1)

    def scatter(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, axis: int, recipes: bool) -> Tensor:
        y = by_blocks(a.flatten(0, -2), b, of_a.flatten(0, -2), of_b, recipes).view(*a.shape[:-1], -1)
        return funcol.reduce_scatter_tensor(y, "sum", axis, group())

    hi.torch.report(clear=True)
    for axes, axis, recipes in ((2, 0, False), (2, 0, True), (3, 0, True), (3, 1, False), (3, 1, True)):
        rows = (8 * RANKS,) if axes == 2 else (2 * RANKS, 4 * RANKS)
        full_a, b = replicated(*rows, K).to(F8), replicated(N, K).to(F8).t()
        of_rows, of_b = replicated(*rows, K // 128).exp(), replicated(N // 128, K // 128).exp().t()
        exact = blocks(full_a, of_rows) @ blocks(b.t(), of_b.t().repeat_interleave(128, 0)).t()
        if recipes:  # cuBLAS needs scales of at least 4 blocks along K
            of_b = torch.nn.functional.pad(of_b.t(), (0, 2), value=float("nan")).t()
        a = part(full_a.view(torch.uint8), axis).contiguous().view(F8)
        options: dict[str, Any] = {"axis": axis, "recipes": recipes}
        (y, y_of_sharded, rows_of_sum), overlap = traced_together(
            (partial(gather, sharded=False, **options), (a, b, of_rows, of_b)),
            (partial(gather, sharded=True, **options), (a, b, part(of_rows, axis).contiguous(), of_b)),
            (partial(scatter, **options), (full_a, b, of_rows, of_b)),
        )
        assert_near(y, exact)
        assert_near(y_of_sharded, exact)
        assert_near(rows_of_sum, part(exact, axis) * RANKS)
        assert fused(overlap) == [SCALED_AG] * 3 + [SCALED_RS], overlap.report
        assert overlap.left == ()
        assert calls(SCALED_AG, SCALED_RS) == [2, 1]


@case
def scaled_mm_with_recipes_is_fused() -> None:
    def gather(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, recipe: Recipe) -> Tensor:
        full = funcol.all_gather_tensor(a.view(torch.uint8), 0, group()).view(F8)
        return torch.nn.functional.scaled_mm(full, b, of_a, recipe, of_b, recipe, output_dtype=torch.bfloat16)

    full_a, b = replicated(8 * RANKS, 32).to(F8), replicated(16, 32).to(F8).t()
    a = part(full_a.view(torch.uint8), 0).contiguous().view(F8)
    scales = {
        Recipe.TensorWise: (torch.tensor([0.25]), torch.tensor([0.5])),
        Recipe.RowWise: (replicated(8 * RANKS, 1).exp(), replicated(1, 16).exp()),
    }
    for recipe, of in scales.items():
        y, overlap = traced(lambda *x, recipe=recipe: gather(*x, recipe), a, b, *of)
        assert_near(y, gather(a, b, *of, recipe))
        assert_near(y, (full_a.double() * of[0]) @ (b.double() * of[1]))
        assert fused(overlap) == [SCALED_AG], overlap.report
        assert overlap.left == ()


def seen_by_the_pass(function: Callable[..., Any], *inputs: Tensor) -> OverlapPass:
    """Trace a function with fake tensors, run the pass on the graph, and return the pass.

    The tensors are fake because few GPUs can run the operators.
    """
    overlap = OverlapPass()
    with FakeTensorMode() as mode:
        overlap(make_fx(lambda a, b, c, d: function(a, b, c, d))(*(mode.from_tensor(x) for x in inputs)).graph)
    return overlap


@case
def unfused_scales_are_reported_with_a_reason() -> None:
    a, scale = replicated(128, 256).to(F8), replicated(2, 128 * RANKS).t()

    def by_recipes(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(a.view(torch.uint8), 0, group()).view(F8)
        recipe = Recipe.BlockWise1x128
        return torch.nn.functional.scaled_mm(full, b, of_a, recipe, of_b, recipe, output_dtype=torch.bfloat16)

    def gather(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(a.view(torch.uint8), 0, group()).view(F8)
        return torch._scaled_mm(full, b, of_a, of_b, out_dtype=torch.bfloat16)

    b, narrow = replicated(256, 256).to(F8).t(), replicated(192, 256).to(F8).t()
    reasons: dict[str, tuple[Callable[..., Any], Tensor, Tensor]] = {
        "are BlockWise1x128 and BlockWise1x128: hostir has no such product": (by_recipes, b, replicated(2, 256).t()),
        "nor of 1x128 and 128x128 blocks": (gather, b, replicated(2, 256)),
        "blocks of 128 x 128 are not known to divide the right side": (gather, narrow, replicated(2, 2)),
    }
    for reason, (function, right, of_b) in reasons.items():
        overlap = seen_by_the_pass(function, a, right, scale, of_b)
        assert reason in str(overlap.report), overlap.report
        assert not any(fused(overlap)), overlap.report


def on_another_thread(function: Callable[[], Any]) -> None:
    """Call a function as autograd calls the backward of CUDA tensors: on a thread with the defaults of all settings."""
    if DEVICE == "cuda":  # autograd has such a thread
        function()
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


@case
def every_mode_of_inductor_fuses_forward_and_backward() -> None:
    exact = with_parameters_of_rank_0(nn.Sequential(nn.Linear(8, 16, False), nn.Linear(16, 8, False)))
    plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "1": RowwiseParallel(output_layouts=Shard(1))}
    for mode in ("reduce-overhead", "max-autotune-no-cudagraphs"):
        model = parallelize_module(copy.deepcopy(exact), tp_mesh(), plan)
        for parameter in model.parameters():  # a graph's next run overwrites gradients that are its own results
            parameter.grad = torch.zeros_like(parameter)
        torch._dynamo.reset()
        overlap, totals = OverlapPass(), []
        compiled = torch.compile(model, fullgraph=True, dynamic=True, options=overlap.options(mode))
        with inductor.patch(force_disable_caches=True):
            for tokens in (4, 6):  # the gradients of the weights accumulate
                x = replicated(1, tokens * RANKS, 8)
                totals.append(x)
                mine = leaf(part(x, 1))
                y = compiled(DTensor.from_local(mine, tp_mesh(), [Shard(1)], shape=x.shape, stride=x.stride()))
                on_another_thread(y.square().sum().backward)
        reference = copy.deepcopy(exact).double()
        for x in totals:
            reference(x.double()).square().sum().backward()
        assert_gradients_near(model, reference)
        operators = fused(overlap)  # torch may compile a second time for other sizes
        assert operators == [AG, RS, AG, RS] * (len(operators) // 4), overlap.report
        assert str(overlap.report).endswith(f"{len(operators)} collectives fused, 0 left alone")
    torch._dynamo.reset()


@case
def options_refuse_an_unknown_mode() -> None:
    with pytest.raises(hi.HostIRError, match=r"one of default, .*reduce-overhead"):
        OverlapPass().options("reduce-overheads")


@case
def inductor_runs_fused_graphs() -> None:
    """Compile matmuls only: for other operations Inductor starts a C++ compiler, which takes ten seconds."""
    exact = with_parameters_of_rank_0(nn.Sequential(nn.Linear(8, 16, False), nn.Linear(16, 8, False)))
    x, weights = replicated(1, 4 * RANKS, 8), replicated(1, 4 * RANKS, 8)
    for styles in ((ColwiseParallel, RowwiseParallel), (hi.torch.ColwiseParallel, hi.torch.RowwiseParallel)):
        plan = {"0": styles[0](input_layouts=Shard(1)), "1": styles[1](output_layouts=Shard(1))}
        model, mine = parallelize_module(copy.deepcopy(exact), tp_mesh(), plan), leaf(part(x, 1))
        torch._dynamo.reset()
        overlap = OverlapPass()
        with inductor.patch(force_disable_caches=True):
            y = torch.compile(model, fullgraph=True, options=overlap.options())(
                DTensor.from_local(mine, tp_mesh(), [Shard(1)])
            )
            on_another_thread((y * part(weights, 1)).sum().backward)
        assert_like_unsharded(model, exact, x, weights, y, mine.grad, 1)
        assert fused(overlap) == [AG, RS, AG, RS] * (styles[0] is ColwiseParallel), overlap.report
    torch._dynamo.reset()


# MicroPipelineTPTest ----------------------------------------------------------------------------------------------


@case
def all_gathers_of_torchs_tests_are_fused() -> None:
    for axes, axis in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        full_a, b = replicated(*(64, 32) if axes == 2 else (2, 64, 32)), replicated(32, 16)

        def function(a: Tensor, b: Tensor, return_a: bool, axis: int = axis) -> Any:
            full = funcol.all_gather_tensor(a, gather_dim=axis, group=group())
            return (full, full @ b) if return_a else full @ b

        b = b.repeat(RANKS, 1) if axis == axes - 1 else b
        a = torch.cat([full_a] * RANKS, 0) if axes == 3 and axis == 0 else full_a
        a = torch.cat([full_a] * RANKS, axis) if axis == axes - 1 else a
        inputs = part(a, axis).contiguous(), b
        ((full, c), only_c), overlap = traced_together(
            *((partial(function, return_a=k), inputs) for k in (True, False))
        )
        assert torch.equal(full, a)
        for product in (c, only_c):
            assert_near(product, a.double() @ b.double())
        fits = axis < axes - 1
        assert fused(overlap) == [AG * fits] * 2
        for entry, return_a in zip(overlap.report, (True, False), strict=True):
            assert ("the axis that the products sum over" in str(entry)) != fits
            assert ("and the gathered tensor" in str(entry)) == (fits and return_a)


@case
def reduce_scatters_of_torchs_tests_are_fused() -> None:
    def function(a: Tensor, b: Tensor, axis: int, op: str) -> Tensor:
        return funcol.reduce_scatter_tensor(a @ b, op, scatter_dim=axis, group=group())

    b, calls = replicated(32, 16), []
    for op, axes, axis in itertools.product(("sum", "avg"), (2, 3), (0, 1, 2)):
        if axis < axes and not (op == "avg" and torch.distributed.get_backend() == "gloo"):
            a = replicated(*(64, 32) if axes == 2 else (4, 64, 32))
            calls.append((partial(function, axis=axis, op=op), (a, b)))
    results, overlap = traced_together(*calls)
    assert fused(overlap) == [RS] * len(calls)
    for result, (call, (a, b)) in zip(results, calls, strict=True):
        exact = part(a.double() @ b.double(), call.keywords["axis"])
        assert_near(result, exact * (RANKS if call.keywords["op"] == "sum" else 1))


def normed_as_in_torch(x: Tensor, r: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    added = x + r
    return torch.nn.functional.rms_norm(added, added.shape[-1:], w, 1e-5), added


def normed_as_in_llama(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Round before the multiplication with the weight, as implementations of Llama do."""
    added = r + x.view(r.shape)
    wide = added.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(r) * w, added


def normed_by_one_operator(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    added = x + r
    return torch.ops.aten._fused_rms_norm(added, [16], w, 1e-5)[0], added


@case
def few_summed_rows_are_fused_with_their_residual_and_norm() -> None:
    tokens = 2 * RANKS

    def summed(norm: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *rest: norm(funcol.all_reduce(x, "sum", group()), *rest)

    def scattered(norm: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *rest: norm(funcol.reduce_scatter_tensor(x, "sum", 0, group()), *rest)

    def multiplied(a: Tensor, b: Tensor, r: Tensor, w: Tensor) -> Any:
        return normed_as_in_torch(funcol.all_reduce(a @ b, "sum", group()), r, w)

    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        x, w, r = torch.randn(tokens, 16).to(dtype), replicated(16, dtype=dtype), replicated(tokens, 16, dtype=dtype)
        mine, cube = part(r, 0).contiguous(), replicated(2, RANKS, 16, dtype=dtype)
        a, b = torch.randn(tokens, 8).to(dtype), torch.randn(8, 16).to(dtype)
        without_weight = lambda x, r: normed_as_in_torch(x, r, None)  # noqa: E731
        norms: list[Callable[..., Any]] = [normed_as_in_torch, normed_as_in_llama, without_weight, normed_as_in_torch]
        norms += [normed_by_one_operator, normed_as_in_torch]
        calls: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
            (summed(norms[0]), (x, r, w)),
            (summed(norms[1]), (x, cube, w)),
            (summed(norms[2]), (x, r)),
            (multiplied, (a, b, r, w)),
            (summed(norms[4]), (x, r, w)),
            (scattered(norms[5]), (x, mine, w)),
        ]
        with torch.no_grad():
            results, overlap = traced_together(*calls, dynamic=True if dtype == torch.bfloat16 else None)
            assert fused(overlap) == [ARN] * 5 + [RSN], overlap.report
            assert str(overlap.report).endswith("\n6 collectives fused, 0 left alone")
            assert "the residual and the norm after it" in str(overlap.report)
            for (function, inputs), norm, (normed, added) in zip(calls, norms, results, strict=True):
                expected = function(*inputs)[1]
                # Both sums round RANKS times, each time by at most eps / 2 of the sum of the absolute values. Two
                # numbers have only one order.
                total = function(*(each.abs() for each in inputs))[1]
                bound_of_sum = torch.finfo(dtype).eps * RANKS * total * (RANKS > 2)
                assert ((added - expected).abs() <= bound_of_sum).all()
                weights = [w] if inputs[-1] is w else []
                expected = norm(added, torch.zeros_like(added), *weights)[0]
                torch.testing.assert_close(normed, expected, rtol=bound, atol=bound / 64)
        names = {str(node.target) for node in overlap.graph.nodes}
        assert not any("rsqrt" in name or "mean" in name for name in names), "the norm has left the graph"


@case
def sums_whose_norm_differs_or_that_are_needed_elsewhere_keep_their_norm() -> None:
    def summed(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", group())

    x, r, w = torch.randn(4, 16).bfloat16(), replicated(4, 16).bfloat16(), replicated(16)

    def used_twice(x: Tensor, r: Tensor) -> Any:
        total = summed(x)
        return (*normed_as_in_torch(total, r, None), total * 2)

    def over_columns(x: Tensor, r: Tensor) -> Any:
        added = (summed(x) + r).float()
        return (added * torch.rsqrt(added.pow(2).mean(0, keepdim=True) + 1e-5)).bfloat16()

    def centered(x: Tensor, r: Tensor) -> Any:
        return torch.nn.functional.layer_norm(summed(x) + r, (16,))

    functions: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, r: (wide := (summed(x) + r).float()) * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5),
        lambda x, r: normed_as_in_torch(summed(x).float(), r.float(), w)[0].bfloat16(),  # the residual is in f32
        lambda x, r: normed_as_in_torch(summed(x), r[0], None),
        lambda x, r: normed_as_in_torch(funcol.all_reduce(x, "max", group()), r, None),
        lambda x, r: torch.nn.functional.rms_norm(summed(x) + r, (16,), None, -1e-6),
        used_twice,
        over_columns,
        centered,
    ]
    with torch.no_grad():
        results, overlap = traced_together(*((function, (x, r)) for function in functions))
        assert not any(fused(overlap)), overlap.report
        torch.testing.assert_close(results, [function(x, r) for function in functions])
    mine = leaf(r)
    (normed, _), overlap = traced(lambda x, r: normed_as_in_torch(summed(x), r, None), x, mine)
    assert fused(overlap)[0] == "", "the scale of each row is saved for backward"
    normed.sum().backward()
    assert mine.grad is not None
    for rows, fate in ((64, ARN), (1 << 14, AR)):  # sums of 1/2 MB, and of 128 MB
        tensors = torch.randn(rows, 8).bfloat16(), torch.randn(8, 4096).bfloat16(), w, r
        seen = seen_by_the_pass(
            lambda a, b, w, r: normed_as_in_llama(summed(a @ b), (a @ b).relu(), w.bfloat16().repeat(256)), *tensors
        )
        assert fused(seen) == [fate], seen.report


@case
def unfused_collectives_are_reported_with_a_reason() -> None:
    a, b = replicated(8, 8), replicated(8, 8)
    gather = lambda x, axis=0: funcol.all_gather_tensor(x, axis, group())  # noqa: E731
    scatter = lambda x, axis=0, op="sum": funcol.reduce_scatter_tensor(x, op, axis, group())  # noqa: E731

    def twice(a: Tensor, b: Tensor) -> Any:
        c = a @ b
        return scatter(c), c.relu()

    def two_readers(a: Tensor, b: Tensor) -> Tensor:
        full = gather(a)
        return full.relu() @ full[:8]

    functions: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "used by relu": lambda a, b: gather(a).relu(),
        "right side of mm: a gathered weight": lambda a, b: b.repeat(1, RANKS) @ gather(a),
        "before it is relu": lambda a, b: scatter((a @ b).relu()),
        "before it is cat": lambda a, b: scatter(torch.cat((a @ b).chunk(2 * RANKS, 1))),  # more parts than ranks
        "has 2 users": twice,
        "its sum is 'max'": lambda a, b: scatter(a @ b, op="max"),
        "its sum is 'min'": lambda a, b: funcol.all_reduce(a @ b, "min", group()),
        "only all-gathers, reduce-scatters and all-reduces are": lambda a, b: funcol.all_reduce_coalesced(
            [a @ b, a], "sum", group()
        ),
        "only all-gathers, reduce-scatters and all-reduces": lambda a, b: funcol.broadcast(a @ b, 0, group()),
        "it gathers a tensor of 1 axes": lambda a, b: gather(a[0]) * 2,
        "relu": two_readers,
    }
    if DEVICE == "cpu":  # GPUs multiply no integers
        functions["its dtypes are torch.int64"] = lambda a, b: gather(a.long()) @ b.long()
    results, overlap = traced_together(*((function, (a, b)) for function in functions.values()))
    for result, function, reason, entry in zip(results, functions.values(), functions, overlap.report, strict=True):
        assert reason in str(entry), overlap.report
        torch.testing.assert_close(result, function(a, b))
    assert not any(fused(overlap)), overlap.report
    summary = str(overlap.report).splitlines()[-1]
    assert summary.startswith(f"0 collectives fused, {len(functions)} left alone: "), summary
    assert summary.count(" about ") == len(functions), summary
    assert f"(estimated for {RANKS} x " in summary
    assert "Inductor took it from its cache" in str(OverlapPass().report)


@case
def several_gathers_of_one_graph_are_fused() -> None:
    a, b, c = replicated(8, 16), replicated(16, 16), replicated(16, 16)

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(a, 0, group())
        x = full @ b
        late = x.norm() * c  # this right side depends on another product of the same rows
        y = full @ late + full @ (c * 2)
        return funcol.reduce_scatter_tensor(torch.addmm(x[0], y, c), "sum", 0, group())

    result, overlap = traced(function, part(a, 0), b, c)
    full = a.double()
    x = full @ b.double()
    y = full @ (x.norm() * c.double()) + full @ (c.double() * 2)
    assert_near(result, part(y @ c.double() + x[0], 0) * RANKS)
    assert fused(overlap)[0] == AG
    assert "2 products and the gathered tensor" in str(overlap.report)

    def added(a: Tensor, b: Tensor, z: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(a, 1, group())
        return torch.addmm(z, full.reshape(-1, 16), b)

    a, z = replicated(3, 2 * RANKS, 16), replicated(6 * RANKS, 16)
    residuals = z, z[:, :1].contiguous(), z[:1], z[0]
    results, overlap = traced_together(*((added, (part(a, 1).contiguous(), b, residual)) for residual in residuals))
    for result, residual in zip(results, residuals, strict=True):
        assert_near(result, a.flatten(0, 1).double() @ b.double() + residual)
    assert fused(overlap) == [AG] * 4

    def between(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        full = funcol.all_gather_tensor(funcol.all_gather_tensor(a, 0, group()) @ b, 0, group())
        full = full / full.square().sum().sqrt()
        rows = funcol.reduce_scatter_tensor(full, "sum", 0, group())
        return funcol.reduce_scatter_tensor(rows @ c, "sum", 0, group())

    a = replicated(8, 16)
    result, overlap = traced(between, part(a, 0), b, c)
    product = a.double() @ b.double()
    assert_near(result, part(product / product.norm() * RANKS**0.5 @ c.double(), 0) * RANKS)
    assert fused(overlap) == [AG, "", "", RS]


if __name__ == "__main__":
    main()
