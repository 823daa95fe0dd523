"""Cases of parallel linear layers and collectives with gradients; test_operators.py starts the ranks.

All ranks hold the same inputs and take their parts. Results and gradients are compared with unsharded float64 layers.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everywhere
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hostir as hi
import hostir.torch
from hostir.call.bound import MAX_BOUND
from hostir.call.rank import RankExecutor
from hostir.machines.binding import MAX_PLANS
from hostir.torch import (
    all_gather_matmul,
    all_reduce,
    all_reduce_residual_norm,
    column_parallel_linear,
    gated_linear,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter_residual_norm,
    row_parallel_linear,
)
from hostir.torch.ops import all_gather_matmul as gathering
from hostir.torch.ops.library import OPERATORS
from hostir.torch.ops.running import OperatorCall, group_named
from tests.counting import calls_of
from tests.torch.on_ranks import (
    DEVICE,
    OPS,
    RANKS,
    assert_near,
    case,
    group,
    leaf,
    main,
    part,
    parts_of_all,
    replicated,
)

STRATEGIES = ("auto", "ring", "fused", "push")


# Gradients --------------------------------------------------------------------------------------------------------


@case
def gradients_of_gathers_match_float64() -> None:
    for of_torch, axis, return_a in itertools.product((True, False), (0, 1, 2), (True, False)):
        x, bs = replicated(8, 12, 8), [replicated(8, 4), replicated(8, 6)]
        a, mine = leaf(part(x, axis)), [leaf(b) for b in bs]
        with hi.torch.install(strict=True):
            if of_torch:
                full, products = OPS.fused_all_gather_matmul(a, mine, axis, group(), return_A=return_a)
            else:
                full, products = torch.ops.hostir.all_gather_matmul(a, mine, axis, group(), return_a)
            weights, all_of = [replicated(*c.shape) for c in products], replicated(*x.shape)
            loss = sum((c * w).sum() for c, w in zip(products, weights, strict=True))
            (loss + (full * all_of).sum() if return_a else loss).backward()
        true, exact_bs = leaf(x.double()), [leaf(b.double()) for b in bs]
        exact = sum(((true @ b) * w).sum() for b, w in zip(exact_bs, weights, strict=True))
        (exact + (true * all_of).sum() if return_a else exact).backward()
        assert_near(a.grad, RANKS * part(true.grad, axis))  # the equal losses of all ranks count
        for b, exact_b in zip(mine, exact_bs, strict=True):
            assert_near(b.grad, exact_b.grad)
    for axis in (0, 1, 2):
        x, gate, up, dy = replicated(8, 12, 8), replicated(4, 8), replicated(4, 8), replicated(8, 12, 4)
        a, mine = leaf(part(x, axis)), [leaf(gate), leaf(up)]
        (gated_linear(a, *mine, group(), gather_dim=axis) * dy).sum().backward()
        true, *exact_bs = (leaf(t.double()) for t in (x, gate, up))
        (F.silu(true @ exact_bs[0].t()) * (true @ exact_bs[1].t()) * dy).sum().backward()
        assert_near(a.grad, RANKS * part(true.grad, axis))
        for b, exact_b in zip(mine, exact_bs, strict=True):
            assert_near(b.grad, exact_b.grad)


@case
def gradients_of_scatters_match_float64() -> None:
    for of_torch, axis, reduce_op in itertools.product((True, False), (0, 1, 2), ("sum", "avg")):
        x, w = replicated(8, 4, 8 * RANKS), replicated(8 * RANKS, 8)
        a, b = leaf(part(x, 2)), leaf(part(w, 0))
        op = OPS.fused_matmul_reduce_scatter if of_torch else torch.ops.hostir.matmul_reduce_scatter
        with hi.torch.install(strict=True):
            y = op(a, b, reduce_op, axis, group())
            weights = replicated(8, 4, 8)
            (y * part(weights, axis)).sum().backward()
        true, exact = leaf(x.double()), leaf(w.double())
        ((true @ exact) * weights / (RANKS if reduce_op == "avg" else 1)).sum().backward()
        assert_near(a.grad, part(true.grad, 2))
        assert_near(b.grad, part(exact.grad, 0))


@case
def gradients_of_collectives_match_float64() -> None:
    with hi.torch.install(strict=True):
        x, w = leaf(part(replicated(8, 3), 0)), replicated(8, 3)
        (OPS._low_contention_all_gather(x, group()) * w).sum().backward()
        assert_near(x.grad, RANKS * part(w, 0))
        for reduce_op in ("sum", "avg"):
            x = leaf(replicated(8, 3))
            (OPS._low_contention_reduce_scatter(x, reduce_op, group()) * part(w, 0)).sum().backward()
            assert_near(x.grad, w / (RANKS if reduce_op == "avg" else 1))


@case
def gradients_have_the_grad_dtype_of_their_weights() -> None:
    for axis, rounded in itertools.product((0, 1), (False, True)):
        x, h = replicated(4 * RANKS, 2, 8, dtype=torch.bfloat16), replicated(4 * RANKS, 2, 6, dtype=torch.bfloat16)
        x, h = (t if axis == 0 else t.transpose(0, 1).contiguous() for t in (x, h))
        ws = [leaf(replicated(*s, dtype=torch.bfloat16)) for s in ((6, 8), (5, 8), (8, 6), (8, 6), (8, 5))]
        dys = [replicated(*x.shape[:2], n, dtype=torch.bfloat16) for n in (6, 5, 8, 6, 5)]
        for w in ws:
            w.grad_dtype = torch.bfloat16 if rounded else torch.float32
        mine, first, second, row, left, right = leaf(part(x, axis)), *ws
        products = [*column_parallel_linear(mine, [first, second], group(), gather_dim=axis)]
        products.append(row_parallel_linear(leaf(h), row, group(), scatter_dim=axis))
        products += all_gather_matmul(mine, [left, right], group(), gather_dim=axis)
        dys[2] = part(dys[2], axis)
        total = sum((y * dy).sum() for y, dy in zip(products, dys, strict=True))
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=axis == 1):  # autocast does not narrow gradients
            total.backward()
        dys[2] = torch.cat(parts_of_all(dys[2]), axis)
        x, h, *dys = (t.double().flatten(0, 1) for t in (x, h, *dys))
        exact_grads = [dys[0].t() @ x, dys[1].t() @ x, dys[2].t() @ h, x.t() @ dys[3], x.t() @ dys[4]]
        for w, true in zip(ws, exact_grads, strict=True):
            assert w.grad.dtype == w.grad_dtype
            bound = {"rtol": 2**-8, "atol": 0} if rounded else {"rtol": 0, "atol": 1e-6 * true.abs().max().item()}
            torch.testing.assert_close(w.grad.double(), true, **bound)


@case
def collectives_of_a_backward_overlap_its_matmuls() -> None:
    events: list[str] = []

    class Matmuls(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            events.extend(["matmul"] * (function is torch.ops.aten.mm.default))
            return function(*args, **(kwargs or {}))

    def start(call: OperatorCall, *program: Any) -> Any:
        events.append(f"start {call.name.partition('::')[2]}")
        outputs = call.execute(*program)
        return SimpleNamespace(wait=lambda: (events.append(f"wait for {call.name.partition('::')[2]}"), outputs)[1])

    x, w, dy = replicated(4 * RANKS, 8), replicated(8, 6), replicated(4 * RANKS, 6)
    backward = gathering.all_gather_matmul_backward.compute
    with mock.patch.object(OperatorCall, "start", start), Matmuls():
        d_x, (d_w,) = backward(part(x, 0), [dy], [w], 0, group(), False, ["float32"])
    order = ["start all_gather", "matmul", "wait for all_gather"]
    assert events == [*order, "start reduce_scatter", "matmul", "wait for reduce_scatter"], events
    assert_near(d_x, RANKS * part(dy @ w.t(), 0).double())
    assert_near(d_w, x.double().t() @ dy.double())


class TakePart(torch.autograd.Function):
    """Takes this rank's part of a replicated tensor.

    Backward divides the gathered gradient by `shared`, the number of ranks that compute the same result.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, shared: int) -> Tensor:
        ctx.axis, ctx.shared = axis, shared
        return part(x, axis).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return GatherParts.forward(ctx, dy, ctx.axis) / ctx.shared, None, None


class GatherParts(torch.autograd.Function):
    """Gathers the parts of all ranks. All ranks compute the same from the gathered tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        ctx.axis = axis
        return torch.cat(parts_of_all(x), axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return part(dy, ctx.axis), None


@case
def gradcheck_accepts_the_layers() -> None:
    x, w, v = (leaf(replicated(*s, dtype=torch.float64)) for s in ((4, 3), (3, 2), (3, 2)))
    for strategy in ("sequential", "ring"):
        with hi.torch.install(strict=True, strategy=strategy):
            for layer in (
                lambda x, w, v: torch.cat(all_gather_matmul(TakePart.apply(x, 0, RANKS), [w, v], group()), dim=1),
                lambda x, w, v: gated_linear(TakePart.apply(x, 0, RANKS), w.t(), v.t(), group()),
            ):
                assert torch.autograd.gradcheck(layer, (x, w, v))
            a, b = leaf(replicated(4, RANKS, dtype=torch.float64)), leaf(replicated(RANKS, 3, dtype=torch.float64))

            def scattered(a: Tensor, b: Tensor) -> Tensor:
                y = matmul_reduce_scatter(TakePart.apply(a, 1, 1), TakePart.apply(b, 0, 1), group())
                return GatherParts.apply(y, 0)

            assert torch.autograd.gradcheck(scattered, (a, b))


@case
def second_derivatives_are_refused() -> None:
    x, w = leaf(replicated(4, 8)), leaf(replicated(6, 8))
    for y in (
        column_parallel_linear(x, w, group()),
        row_parallel_linear(x, w, group()),
        gated_linear(x, w, w, group()),
    ):
        with pytest.raises(hi.HostIRError, match=r"cannot be differentiated again(.|\n)*create_graph"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@case
def operators_pass_torchs_opcheck() -> None:
    ops, name = torch.ops.hostir, group()
    x, w, v = leaf(part(replicated(8, 4, 6), 1)), leaf(replicated(6, 8)), leaf(replicated(6, 8))
    y, out = replicated(8, 4, 6), torch.empty(8, 4 // RANKS, 8)
    with hi.torch.install(strict=True, strategy="ring"):
        for axis, widened in ((0, True), (1, False)):
            dys, bs = [replicated(8, 4, 8).movedim(1, axis)] * 2, [w.detach(), v.detach()]
            mine = part(replicated(8, 4, 6), 1).movedim(1, axis).contiguous()
            dtypes = ["float64", ""] if widened else ["", "float32"]
            torch.library.opcheck(ops.all_gather_matmul_backward, (mine, dys, bs, axis, name, False, dtypes))
        torch.library.opcheck(ops.all_gather_matmul, (x, [w, v], 0, name, True))
        torch.library.opcheck(ops.all_gather_matmul, (x, [leaf(w.t())], 1, name, False, True))
        torch.library.opcheck(ops.all_gather_gated, (x, leaf(w.t()), leaf(v.t()), 0, name, True))
        torch.library.opcheck(ops.all_gather, (x, 1, name))
        torch.library.opcheck(ops.matmul_reduce_scatter, (leaf(y), w, "avg", 1, name))
        torch.library.opcheck(ops.matmul_reduce_scatter, (leaf(y), leaf(w.t()), "sum", 0, name, True))
        torch.library.opcheck(ops.reduce_scatter, (leaf(y), "sum", 0, name))
        bare = w.detach()
        torch.library.opcheck(ops.matmul_reduce_scatter_out, (y, bare, "sum", 1, name), {"out": out})
        outputs = {"out": [torch.empty(8 * RANKS, 4 // RANKS, 8)], "gathered": None}
        torch.library.opcheck(ops.all_gather_matmul_out, (x.detach(), [bare], 0, name), outputs)


# Memory -----------------------------------------------------------------------------------------------------------
LAYERS = 80


def alive() -> int:
    """Return the bytes of all tensors, including those that other threads hold at the moment."""
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def memory_in_use() -> dict[str, int]:
    """Return the bytes that this process has allocated on the device, and the bytes of symmetric memory."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    executors = [e for c in group_named(group()).compiled.values() if not isinstance(c, str) for e in executors_of(c)]
    assert all(len(e.plans) <= MAX_PLANS and len(e.bound) <= MAX_BOUND for e in executors)
    return {
        "allocated": torch.cuda.memory_allocated() if DEVICE == "cuda" else min(alive() for _ in range(3)),
        "symmetric": hi.torch.report().symmetric_bytes[group()],
    }


def executors_of(executor: Any) -> list[Any]:
    return list(getattr(executor, "executors", {0: executor}).values())


@case
def new_numbers_of_tokens_need_no_more_memory() -> None:
    """Run 200 steps with new numbers of tokens through 80 layers: one layer a step, or all by `auto` on GPUs."""
    seed, width = int(replicated(1)[0] * 1e6), 16 if DEVICE == "cpu" else 1024
    draw, generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)  # the same on every rank
    shapes = (LAYERS, 2 * width, width), (LAYERS, width, 2 * width)
    up, down = (torch.randn(shape, generator=generator) / width**0.5 for shape in shapes)
    for strategy in STRATEGIES if DEVICE == "cuda" else ("auto", "push"):
        every = DEVICE == "cuda" and strategy == "auto"
        with hi.torch.install(strict=True, strategy=strategy), torch.no_grad():
            for step in range(1, 201):
                # The first steps need all programs and workspaces: of every range of sizes, and of one row a rank.
                tokens = 256 >> (step - 1) if step <= 9 else draw.randrange(1, 256)
                x = torch.randn(tokens * RANKS, width, generator=generator)
                for layer in range(LAYERS) if every else [step % LAYERS]:
                    h = column_parallel_linear(part(x, 0), part(up[layer], 0), group())
                    y = row_parallel_linear(h, part(down[layer], 1), group())
                if step % 20 == 0:
                    assert_near(y, part(x.double() @ up[layer].double().t() @ down[layer].double().t(), 0))
                del x, h, y
                if step == 20:
                    before = memory_in_use()
            assert memory_in_use() == before, (strategy, before, memory_in_use())
            assert before["symmetric"] or strategy == "auto", "one-sided strategies hold symmetric memory"


# All-reduces ------------------------------------------------------------------------------------------------------


@case
def all_reduces_give_equal_bits_on_all_ranks() -> None:
    for strategy in STRATEGIES:
        any_number = strategy in ("auto", "push")  # the others need rows that the ranks divide
        for rows in ([8 * RANKS], [2, 4 * RANKS], *(([1], [3, 5]) if any_number else ())):
            x, w, v = replicated(*rows, 2 * RANKS), replicated(2 * RANKS, 6), replicated(4, 6 * RANKS)
            a, b, bias, residual = part(x, len(rows)), part(w, 0), replicated(4), replicated(*rows, 6)
            with hi.torch.install(strict=True, strategy=strategy):
                first = matmul_all_reduce(a, b, group(), addend=residual)
                y = row_parallel_linear(first, part(v, 1), group(), bias, reduce="all")
                total = all_reduce(a, group())
            exact = x.double() @ w.double() + residual
            assert_near(first, exact)
            assert_near(y, exact @ sum(columns.double() for columns in v.chunk(RANKS, 1)).t() + bias)
            assert_near(total, sum(summand.double() for summand in parts_of_all(a)))
            for mine in (first, y, total):
                assert all(torch.equal(mine, other) for other in parts_of_all(mine))


@case
def gradients_of_all_reduces_need_no_communication() -> None:
    x, w, dy = replicated(5, 3, 4 * RANKS), replicated(4 * RANKS, 6), replicated(5, 3, 6)
    exact, true_w, true_bias, true_rest = (leaf(t.double()) for t in (x, w, replicated(6), replicated(5, 3, 6)))
    (((exact @ true_w) + true_rest + true_bias) * dy).sum().backward()
    hi.torch.report(clear=True)
    for addend in (None, true_bias, true_rest):
        for linear in (False, True):
            a, b, z = leaf(part(x, 2)), leaf(part(w, 0)), None if addend is None else leaf(addend.detach().float())
            with hi.torch.install(strict=True):
                if linear:
                    y = torch.ops.hostir.matmul_all_reduce(a, b.t(), group(), True, z)
                else:
                    y = matmul_all_reduce(a, b, group(), addend=z)
            (y * dy).sum().backward()
            assert_near(a.grad, part(exact.grad, 2))
            assert_near(b.grad, part(true_w.grad, 0))
            if addend is not None:
                assert_near(z.grad, addend.grad)
    x = leaf(part(x, 2))
    (all_reduce(x, group()) * 3).sum().backward()
    assert_near(x.grad, torch.full_like(x, 3.0))
    assert {row.operator for row in hi.torch.report()} == {"hostir::matmul_all_reduce", "hostir::all_reduce"}


@case
def all_reduces_write_to_out_and_pass_torchs_opcheck() -> None:
    x, w, z = replicated(4, 3, 4 * RANKS), replicated(4 * RANKS, 6), replicated(6)
    a, b = part(x, 2), part(w, 0)
    for out in (torch.empty(4, 3, 6), torch.empty(6, 4, 3).permute(1, 2, 0)):
        assert matmul_all_reduce(a, b, group(), addend=z, out=out) is out
        assert_near(out, x.double() @ w.double() + z)
    total = torch.empty(7)
    all_reduce(torch.ones(7), group(), out=total)
    assert torch.equal(total, torch.full((7,), float(RANKS)))
    assert_near(all_reduce(torch.tensor(2.0), group()), torch.tensor(2.0 * RANKS))
    ops, name = torch.ops.hostir, group()
    for addend in (None, leaf(z)):
        torch.library.opcheck(ops.matmul_all_reduce, (leaf(a), leaf(b), name, False, addend))
    torch.library.opcheck(ops.matmul_all_reduce, (leaf(a), leaf(b.t()), name, True))
    torch.library.opcheck(ops.all_reduce, (leaf(a), name))
    torch.library.opcheck(ops.matmul_all_reduce_out, (a, b, name), {"out": torch.empty(4, 3, 6)})
    torch.library.opcheck(ops.all_reduce_out, (a, name), {"out": torch.empty_like(a)})
    with pytest.raises(hi.HostIRError, match="the addend has shape"):
        matmul_all_reduce(a, b, group(), addend=replicated(5))
    with pytest.raises(hi.HostIRError, match="unknown reduction 'none'"):
        row_parallel_linear(a, b.t(), group(), reduce="none")


# Sums with residuals and norms ------------------------------------------------------------------------------------


@case
def sums_with_residuals_and_norms_match_separate_functions() -> None:
    for strategy, dtype in itertools.product(STRATEGIES, (torch.float32, torch.bfloat16)):
        for shape in ((4 * RANKS, 24), (2, 4 * RANKS, 16)):
            axis, weight = len(shape) - 2, replicated(shape[-1], dtype=dtype) if len(shape) == 2 else None
            x, residual = torch.randn(shape).to(dtype), replicated(*shape, dtype=dtype)
            total = sum(summand.double() for summand in parts_of_all(x))
            exact = total + residual.double()
            exact_normed = F.rms_norm(exact, shape[-1:], None if weight is None else weight.double(), 1e-5)
            with hi.torch.install(strict=True, strategy=strategy):
                normed, added = all_reduce_residual_norm(x, residual, weight, group(), eps=1e-5)
                quantized = all_reduce_residual_norm(x, residual, weight, group(), eps=1e-5, quantize=True)
                mine = part(residual, axis)
                options: dict[str, Any] = {"scatter_dim": axis, "eps": 1e-5}
                rows, added_rows = reduce_scatter_residual_norm(x, mine, weight, group(), **options)
                quantized_rows = reduce_scatter_residual_norm(x, mine, weight, group(), **options, quantize=True)
            assert_near(added, exact)
            assert_near(normed, exact_normed)
            for of_rows, of_all in ((added_rows, added), (rows, normed), *zip(quantized_rows, quantized, strict=True)):
                assert torch.equal(of_rows.float(), part(of_all.float(), axis)), "the same bits on all ranks"
            for of_all in (added, normed, *quantized):
                assert all(torch.equal(of_all.float(), other) for other in parts_of_all(of_all.float()))
            values, scales, again = quantized
            assert torch.equal(again, added)
            assert values.dtype == torch.float8_e4m3fn
            assert scales.shape == (*shape[:-1], 1)
            assert torch.equal(scales, (normed.float().abs().amax(-1, keepdim=True) / 448).clamp_min(2**-126))
            torch.testing.assert_close(values.float() * scales, normed.float(), rtol=2**-4, atol=2e-5)


@case
def gradients_of_sums_with_residuals_and_norms_match_float64() -> None:
    for scattered, weighted, used in itertools.product((False, True), (False, True), ("both", "normed", "added")):
        shape = (3, 4 * RANKS, 16)
        x, residual, w = replicated(*shape) * (1 + dist.get_rank()), replicated(*shape), replicated(16)
        d_normed, d_added = replicated(*shape), replicated(*shape)
        exact_xs = [leaf(x.double()) for x in parts_of_all(x)]
        exact_residual, exact_w = leaf(residual.double()), leaf(w.double())
        total = sum(exact_xs) + exact_residual
        norm = F.rms_norm(total, (16,), exact_w if weighted else None, 1e-6)
        loss = (norm * d_normed).sum() * (used != "added") + (total * d_added).sum() * (used != "normed")
        loss.backward()
        mine: Callable[[Tensor], Tensor] = (lambda t: part(t, 1)) if scattered else lambda t: t
        leaves = [leaf(x), leaf(mine(residual)), *([leaf(w)] if weighted else [])]
        weight = leaves[2] if weighted else None
        if scattered:
            ours = reduce_scatter_residual_norm(leaves[0], leaves[1], weight, group(), scatter_dim=1)
        else:
            ours = all_reduce_residual_norm(leaves[0], leaves[1], weight, group())
        pairs = zip(("added", "normed"), ours, (d_normed, d_added), strict=True)
        sum((y * mine(dy)).sum() for unused, y, dy in pairs if used != unused).backward()
        assert_near(leaves[0].grad, exact_xs[dist.get_rank()].grad)
        assert_near(leaves[1].grad, mine(exact_residual.grad))
        if weighted and used != "added":
            grad = leaves[2].grad
            assert_near(sum(parts_of_all(grad)) if scattered else grad, exact_w.grad)


@case
def sums_with_residuals_and_norms_pass_torchs_opcheck_and_refuse_what_does_not_fit() -> None:
    ops, name = torch.ops.hostir, group()
    x, residual, w = replicated(4 * RANKS, 8), replicated(4 * RANKS, 8), replicated(8)
    for quantize, weight in itertools.product((False, True), (None, w)):
        leaves = [t if quantize or t is None else leaf(t) for t in (x, residual, weight)]
        torch.library.opcheck(ops.all_reduce_residual_norm, (*leaves, 1e-6, quantize, name))
        rows = (leaves[0], part(residual, 0) if quantize else leaf(part(residual, 0)), leaves[2])
        torch.library.opcheck(ops.reduce_scatter_residual_norm, (*rows, 1e-6, quantize, 0, name))
    normed, added = all_reduce_residual_norm(x[0], residual[0], w, name)
    assert normed.shape == added.shape == (8,)
    mine = part(residual, 0)
    for message, call in (
        (r"the residual has the shape \[2\]", lambda: all_reduce_residual_norm(x, residual[0, :2], w, name)),
        (r"the weight has the shape \[7\], and a row has 8", lambda: all_reduce_residual_norm(x, x, w[:7], name)),
        ("eps is -1.0", lambda: all_reduce_residual_norm(x, residual, w, name, eps=-1)),
        ("several dtypes", lambda: all_reduce_residual_norm(x, residual.double(), w, name)),
        (
            "its rows must be complete",
            lambda: reduce_scatter_residual_norm(x, residual[:, :1], w, name, scatter_dim=1),
        ),
        (
            f"its {RANKS} ranks do not divide axis 0, which is {RANKS + 1}",
            lambda: reduce_scatter_residual_norm(x[: RANKS + 1], mine, w, name),
        ),
        (
            r"has no gradients if it quantizes[^$]*leave out quantize=True",
            lambda: all_reduce_residual_norm(leaf(x), residual, w, name, quantize=True),
        ),
    ):
        with pytest.raises(hi.HostIRError, match=message):
            call()


@case
def torch_compile_traces_sums_with_residuals_and_norms() -> None:
    torch._dynamo.reset()
    w, name = replicated(8), group()

    def layer(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        normed, residual = all_reduce_residual_norm(x.tanh(), residual, w, name)
        return *reduce_scatter_residual_norm(normed, part(residual, 0), w, name), residual

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2 * RANKS, 4 * RANKS):
        x, residual = replicated(rows, 8), replicated(rows, 8)
        ours, eager = ([leaf(x), leaf(residual), leaf(w)] for _ in range(2))
        results, exact = compiled(*ours), layer(*eager)
        for y, true in zip(results, exact, strict=True):
            torch.testing.assert_close(y, true)
        for each in (results, exact):
            sum(y.square().sum() for y in each).backward()
        for mine, true in zip(ours, eager, strict=True):
            torch.testing.assert_close(mine.grad, true.grad)
    torch._dynamo.reset()


# Groups -----------------------------------------------------------------------------------------------------------


@case
def an_unused_gathered_tensor_has_no_gradient_to_scatter() -> None:
    x, w = part(replicated(4 * RANKS, 8), 0), leaf(replicated(6, 8))
    hi.torch.report(clear=True)
    (column_parallel_linear(leaf(x), w, group()) + gated_linear(leaf(x), w, w, group())).sum().backward()
    rows = {row.operator: row.calls for row in hi.torch.report()}
    forward = {"hostir::all_gather_matmul": 1, "hostir::all_gather_gated": 1}
    assert rows == forward | {"hostir::matmul_reduce_scatter": 2}, "and no tensor is gathered again"


@case
def groups_with_different_calls_run_side_by_side() -> None:
    if RANKS != 4:
        return
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    rank, replica = tp.get_local_rank(), mesh["dp"].get_local_rank()
    for step in range(3):
        fresh = torch.Generator(DEVICE).manual_seed(step)
        w1, w2 = torch.randn(16, 8, generator=fresh), torch.randn(8, 16, generator=fresh)
        x = torch.randn(2 + 6 * replica + 4 * step, 8, generator=fresh)  # replicas have different lengths
        mine, first, second = leaf(x.chunk(2)[rank]), leaf(w1.chunk(2)[rank]), leaf(w2.chunk(2, 1)[rank])
        for _ in range(1 + replica):  # and different numbers of calls
            y = row_parallel_linear(column_parallel_linear(mine, first, tp).relu(), second, tp)
        y.sum().backward()
        true, exact_w1, exact_w2 = leaf(x.double()), leaf(w1.double()), leaf(w2.double())
        exact = (true @ exact_w1.t()).relu() @ exact_w2.t()
        exact.sum().backward()
        assert_near(y, exact.chunk(2)[rank])
        assert_near(mine.grad, true.grad.chunk(2)[rank])
        assert_near(first.grad, exact_w1.grad.chunk(2)[rank])
        assert_near(second.grad, exact_w2.grad.chunk(2, 1)[rank])
    with pytest.raises(hi.HostIRError, match="2 dimensions"):
        column_parallel_linear(mine, first, mesh)


# Calls ------------------------------------------------------------------------------------------------------------


@case
def results_are_written_to_out() -> None:
    for strategy in STRATEGIES:
        with hi.torch.install(strict=True, strategy=strategy):
            x, bs = replicated(4 * RANKS, 8), [replicated(8, 6), replicated(8, 4)]
            outs = [torch.full((4 * RANKS, n), torch.nan) for n in (6, 4)]
            full, products = all_gather_matmul(part(x, 0), bs, group(), return_a=True, out=outs)
            assert torch.equal(full, x)
            for out, y, b in zip(outs, products, bs, strict=True):
                assert out is y
                assert_near(out, x @ b)
            for axis in (0, 1) if strategy != "push" else (0,):
                x3, b = replicated(2 * RANKS, 3 * RANKS, 8), replicated(8, 4)
                result = x3 @ b
                for order in itertools.permutations(range(3)):  # the axes of `out` in any order in memory
                    inverse = sorted(range(3), key=order.__getitem__)
                    out = torch.full([result.shape[k] for k in order], torch.nan).permute(inverse)
                    assert all_gather_matmul(part(x3, axis), b, group(), gather_dim=axis, out=out) is out
                    assert_near(out, result)
            for axis, shape in ((0, (3 * RANKS, 8)), (1, (5, 2 * RANKS, 8))):
                a, b = replicated(*shape), replicated(8, 4)
                result = part(a.double() @ b.double() * RANKS, axis)
                for out in (torch.full(result.shape, torch.nan), torch.full(result.shape[::-1], torch.nan)):
                    out = out if out.shape == result.shape else out.permute(*range(out.ndim)[::-1])
                    assert matmul_reduce_scatter(a, b, group(), scatter_dim=axis, out=out) is out
                    assert_near(out, result)
                assert_near(matmul_reduce_scatter(a, b, group(), scatter_dim=axis, reduce_op="avg"), result / RANKS)
            for axis in (0, 1) if strategy != "push" else (0,):
                y = gated_linear(part(x, axis), bs[0].t(), 2 * bs[0].t(), group(), gather_dim=axis)
                assert_near(y, F.silu(x @ bs[0]) * (2 * x @ bs[0]))
    for call in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce):
        with pytest.raises(hi.HostIRError, match="out= has shape"):
            call(x, bs[0], group(), out=torch.empty(6, 4 * RANKS * (RANKS if call is all_gather_matmul else 1)))
    with pytest.raises(hi.HostIRError, match="out= has shape"):
        all_reduce(x, group(), out=torch.empty(8, 4))
    for out in (torch.empty(6, 4 * RANKS, 2).permute(2, 1, 0), torch.empty(2, 2 * RANKS, 6)):
        with pytest.raises(hi.HostIRError, match="out= has shape"):  # too many axes
            all_gather_matmul(part(x, 0), bs[0], group(), out=out)
    with pytest.raises(hi.HostIRError, match="float64"):
        all_gather_matmul(part(x, 0), bs[0], group(), out=torch.empty(6, 4 * RANKS, dtype=torch.float64).t())
    w = leaf(bs[0])
    with pytest.raises(hi.HostIRError, match=r"has no gradients[^$]*leave out out="):
        all_gather_matmul(part(x, 0), w, group(), out=outs[0])


def block(x: Tensor, first: Tensor, gate: Tensor, second: Tensor) -> Tensor:
    """Return a result of all layers and products, each used once."""
    h = column_parallel_linear(x, first, group()) + gated_linear(x, first, gate, group())
    h = torch.tanh(h + all_gather_matmul(x, gate.t(), group()))
    return row_parallel_linear(h, second, group()) * matmul_reduce_scatter(h, second.t(), group())


@case
def modes_of_torch_do_not_change_results() -> None:
    x = part(replicated(16 * RANKS, 8), 0)
    ws = replicated(6, 8) / 4, replicated(6, 8) / 4, replicated(8, 6)  # small: tanh is not saturated
    plain, leaves = block(x, *ws), [leaf(t) for t in (x, *ws)]
    with torch.inference_mode():
        y = block(x, *ws)
        assert torch.equal(y, plain)
        assert y.is_inference()
    with torch.no_grad():
        assert not block(*leaves).requires_grad
    y = block(*leaves)
    assert torch.equal(y, plain)
    true = torch.autograd.grad(y.sum(), leaves)
    for reentrant in (False, True):
        again = checkpoint(block, *leaves, use_reentrant=reentrant)
        again.sum().backward()
        assert all(torch.equal(t.grad, g) for t, g in zip(leaves, true, strict=True)), "the same programs run again"
        for t in leaves:
            t.grad = None
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = block(*leaves)
        z = column_parallel_linear(x, ws[0], group(), ws[1][:, 0])
    assert y.dtype == z.dtype == torch.bfloat16
    assert_near(z, torch.cat(parts_of_all(x)).double() @ ws[0].double().t() + ws[1][:, 0].double())
    y.sum().backward()
    for t, g in zip(leaves, true, strict=True):
        assert t.grad.dtype == torch.float32
        assert (t.grad - g).norm() <= 0.03 * g.norm()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        double = column_parallel_linear(x.double(), ws[0].double(), group())
    assert double.dtype == torch.float64, "as with torch.nn.functional.linear"


@case
def transforms_and_invalid_arguments_are_refused() -> None:
    x, w = part(replicated(4 * RANKS, 8), 0), replicated(6, 8)
    layers: tuple[tuple[Callable[[Tensor], Tensor], Tensor], ...] = (
        (lambda x: column_parallel_linear(x, w, group()), x),
        (lambda x: gated_linear(x, w, w, group()), x),
        (lambda h: row_parallel_linear(h, w.t(), group()), replicated(4 * RANKS, 6)),
    )
    for function, argument in layers:
        for transform in (
            lambda f, x: torch.vmap(f)(x[None]),
            lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
            lambda f, x: torch.func.jvp(f, (x,), (x,)),
        ):
            with pytest.raises(hi.HostIRError, match=r"torch\.func"):
                transform(function, argument)
        with forward_ad.dual_level(), pytest.raises(hi.HostIRError, match="forward-mode"):
            function(forward_ad.make_dual(argument, argument))

    def operator(x: Tensor) -> Tensor:
        summed: Tensor = torch.ops.hostir.all_reduce(x, group())
        return summed

    with pytest.raises(hi.HostIRError, match=r"torch\.func"):
        torch.func.grad(lambda x: operator(x).sum())(x)
    with pytest.raises(hi.HostIRError, match="forward-mode"):
        torch.func.jvp(operator, (x,), (x,))
    for layer, argument in layers:
        with pytest.raises(
            hi.HostIRError, match=r"layer_cases\.py:\d+.*a tensor is on meta[^$]*of: cpu, cuda"
        ) as refused:
            layer(argument.to("meta"))
        assert "FakeTensorMode" in str(refused.value)
    with pytest.raises(hi.HostIRError, match="a tensor is on meta"):
        all_reduce(x.to("meta"), group())
    with pytest.raises(hi.HostIRError, match="gather_dim=2"):
        column_parallel_linear(x, w, group(), gather_dim=2)
    with pytest.raises(hi.HostIRError, match="no group 'nobody'"):
        column_parallel_linear(x, w, "nobody")


def cuda_graphs_hold_forward_and_backward() -> None:
    """Capture both in one graph, by each strategy, and replay it on other data."""
    for strategy in STRATEGIES:
        with hi.torch.install(strict=True, strategy=strategy):
            weights = [replicated(*shape) for shape in ((32, 64), (32, 64), (64, 32))]
            leaves = [leaf(t) for t in (part(replicated(64 * RANKS, 64), 0), *weights)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    torch.autograd.grad(block(*leaves).sum(), leaves)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                y = block(*leaves)
                grads = torch.autograd.grad(y.sum(), leaves)
            for seed in range(3):
                with torch.no_grad():
                    for t in leaves:
                        t.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
                for t in (y, *grads):
                    t.detach().fill_(torch.nan)
                torch.cuda.synchronize()
                dist.barrier()
                graph.replay()
                torch.cuda.synchronize()
                exact = block(*leaves)
                torch.testing.assert_close(y, exact)
                for grad, true in zip(grads, torch.autograd.grad(exact.sum(), leaves), strict=True):
                    torch.testing.assert_close(grad, true)
            del graph
            torch.cuda.synchronize()
            dist.barrier()


if DEVICE == "cuda":
    case(cuda_graphs_hold_forward_and_backward)


@case
def calls_bypass_the_dispatcher_if_no_mode_needs_it() -> None:
    x, w = part(replicated(4 * RANKS, 8), 0), replicated(6, 8)
    calls: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    def dispatched(*args: Any) -> Any:
        calls.append("dispatched")
        return packet(*args)

    packet = gathering.all_gather_matmul.packet
    assert gathering.all_gather_matmul.group_index == 3
    with mock.patch.object(gathering.all_gather_matmul, "packet", dispatched):
        for _ in range(2):  # also calls that are remembered
            for weight in (w, nn.Parameter(w, requires_grad=False)):
                y = column_parallel_linear(x, weight, group())
                assert not y._is_view(), "it may be changed in place"
            with torch.no_grad(), torch.inference_mode():
                column_parallel_linear(x, leaf(w), group())
            assert column_parallel_linear(x, leaf(w), group()).requires_grad
            assert calls == []
        with torch.profiler.profile() as seen:
            column_parallel_linear(x, w, group())
        assert "hostir::all_gather_matmul" in {event.name for event in seen.events()}
        assert calls == ["dispatched"]
        with Seen():
            column_parallel_linear(x, w, group())
    assert calls[1:] == ["dispatched", "hostir.all_gather_matmul.default"]


class Twice(torch.autograd.Function):
    """A function of two tensors. Its backward pass makes the calls that autograd itself makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        ctx.gradients = x.detach(), weight.detach()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (*ctx.gradients, None)


@case
def remembered_calls_take_few_calls_of_functions() -> None:
    """A call of an executor counts as one; tests/machines/cuda/test_taped.py counts its 20 calls of functions."""
    call, name = RankExecutor.__call__.__code__, group()
    x, w, a, v = part(replicated(4 * RANKS, 8), 0), replicated(6, 8), replicated(4 * RANKS, 8), replicated(6, 8)
    layers: tuple[Callable[..., Tensor], ...] = (
        lambda x, w: column_parallel_linear(x, w, name),
        lambda x, w: row_parallel_linear(x, w, name),
        lambda x, w: OPS.fused_all_gather_matmul(x, [w.t()], 0, name)[1][0],
        lambda x, w: OPS.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, name),
    )
    with hi.torch.install(strict=True):
        for layer, operands in zip(layers, itertools.cycle([(x, w), (a, v)]), strict=False):
            leaves = [leaf(t) for t in operands]
            y = layer(*leaves)
            dy = torch.randn_like(y)

            def backward(y: Tensor, leaves: list[Tensor] = leaves, dy: Tensor = dy) -> None:
                torch.autograd.grad(y, leaves, dy, retain_graph=True)

            plain = Twice.apply(*leaves, y.detach())
            for _ in range(3):
                layer(*leaves)
                backward(y)
                with torch.no_grad():
                    layer(*operands)
            with torch.no_grad():
                assert calls_of(partial(layer, *operands), call) <= 35
            assert calls_of(partial(layer, *leaves), call) <= 50
            assert calls_of(partial(backward, y), call) - calls_of(partial(backward, plain)) <= 45
    with torch.no_grad():  # as in a graph that inductor has compiled
        gather, scatter = (
            getattr(torch.ops.hostir, each).default for each in ("all_gather_matmul", "matmul_reduce_scatter")
        )
        for work in (partial(gather, x, [w], 0, name, False, True), partial(scatter, a, v.t(), "sum", 0, name)):
            for _ in range(3):
                work()
            assert calls_of(work, call) <= 15


AG, RS, AR = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


@case
def comm_debug_mode_counts_the_collective_of_each_operator() -> None:
    x, rows, b = part(replicated(4 * RANKS, 16), 0), replicated(16, 16), replicated(16, 16)
    a = replicated(4 * RANKS, 16)
    mine, every, summed = torch.empty(4, 16), torch.empty(4 * RANKS, 16), torch.empty(4 * RANKS, 16)
    calls: list[tuple[Callable[..., Any], tuple[Tensor, ...], list[str], list[str]]] = [
        (lambda x, b: all_gather_matmul(x, b, group()), (x, b), [AG], [AG, RS]),  # backward gathers x again
        (lambda x, b: all_gather_matmul(x, [b, b], group(), return_a=True)[1][1], (x, b), [AG], [RS]),
        (lambda a, b: matmul_reduce_scatter(a, b, group()), (a, b), [RS], [AG]),
        (lambda a, b: matmul_all_reduce(a, b, group()), (a, b), [AR], []),
        (lambda a: all_reduce(a, group()), (a,), [AR], []),
        (lambda x, w: column_parallel_linear(x, w, group()), (x, rows), [AG], [RS]),
        (lambda x, w: column_parallel_linear(x, w, group(), gather_dim=None), (a, rows), [], [AR]),
        (lambda x, w: column_parallel_linear(x, w, group(), fp8=True), (x, rows), [AG], [RS]),
        (lambda a, w: row_parallel_linear(a, w, group()), (a, rows), [RS], [AG]),
        (lambda a, w: row_parallel_linear(a, w, group(), reduce="all"), (a, rows), [AR], []),
        (lambda a, w: row_parallel_linear(a, w, group(), fp8=True), (a, rows), [RS], [AG]),
        (lambda x, w: gated_linear(x, w, w, group()), (x, rows), [AG], [RS]),
        (lambda x, w: all_reduce_residual_norm(x, a, w, group())[0], (a, rows[0]), [AR], []),
        (lambda y, w: reduce_scatter_residual_norm(y, x, w, group())[0], (a, rows[0]), [RS], [AG]),
        (lambda x: all_gather_matmul(x, b, group(), out=every), (x,), [AG], []),
        (lambda a: matmul_reduce_scatter(a, b, group(), out=mine), (a,), [RS], []),
        (lambda a: matmul_all_reduce(a, b, group(), out=summed), (a,), [AR], []),
        (lambda a: all_reduce(a, group(), out=summed), (a,), [AR], []),
    ]
    for index, (function, tensors, forward, backward) in enumerate(calls):
        for strategy in ("sequential", "ring", "push"):
            leaves = [leaf(tensor) if index < len(calls) - 4 else tensor for tensor in tensors]
            with hi.torch.install(strategy=strategy):
                with CommDebugMode() as mode:
                    y = function(*leaves)
                assert counted(mode) == forward, (index, strategy)
                torch.testing.assert_close(y, function(*leaves), rtol=0, atol=0)
                if not y.requires_grad:
                    continue
                with CommDebugMode() as mode:
                    grads = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
                assert sorted(counted(mode)) == backward, (index, strategy)
                assert all(map(torch.equal, grads, torch.autograd.grad(y.sum(), leaves))), (index, strategy)


def counted(mode: CommDebugMode) -> list[str]:
    """Return the names of the collectives that a mode has counted, with repetitions."""
    assert all(op in vars(torch.ops.c10d_functional).values() for op in mode.get_comm_counts())
    return [str(op).rpartition(".")[2] for op, n in mode.get_comm_counts().items() for _ in range(n)]


@case
def every_operator_that_communicates_stands_for_a_collective() -> None:
    alone = {"replicated_linear", "all_gather_matmul_backward"}  # its backward communicates; a rule counts two
    for operator in OPERATORS:
        communicates = "str group_name" in str(operator.packet.default._schema) and operator.short_name not in alone
        assert (operator.packet in CommDebugMode().comm_registry) == communicates, operator.name


@case
def torch_compile_has_no_graph_breaks() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = DeviceMesh(DEVICE, list(range(RANKS)))
    w1, w2, gate, b = (replicated(*shape) for shape in ((6, 8), (8, 6), (6, 8), (8, 6)))

    def layers(x: Tensor, w1: Tensor, w2: Tensor, gate: Tensor, b: Tensor) -> Tensor:
        h = column_parallel_linear(x, w1, mesh).relu() + gated_linear(x, gate, w1, group())
        _, (c,) = OPS.fused_all_gather_matmul(x, [w1.t()], 0, group())
        h = h + c + all_gather_matmul(x, b, mesh)
        return row_parallel_linear(h, w2, dist.group.WORLD) + matmul_reduce_scatter(h, w2.t(), mesh)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, fullgraph=True, backend=counter, dynamic=True)
    with hi.torch.install(strict=True):
        for rows in (4, 6, 10, 2):
            x = part(replicated(rows * RANKS, 8), 0)
            compiled_leaves, eager_leaves = ([leaf(x), leaf(w1), leaf(w2), leaf(gate), leaf(b)] for _ in range(2))
            y, true = compiled(*compiled_leaves), layers(*eager_leaves)
            torch.testing.assert_close(y, true)
            y.sum().backward()
            true.sum().backward()
            for ours, eager in zip(compiled_leaves, eager_leaves, strict=True):
                torch.testing.assert_close(ours.grad, eager.grad)
    assert counter.frame_count == 1
    torch._dynamo.reset()


if __name__ == "__main__":
    main()
