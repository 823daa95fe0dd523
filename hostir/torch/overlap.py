"""A pass over graphs of torch.compile. It replaces a collective and the matmuls next to it by one fused operator.

It fuses all-gather + matmuls, matmul + reduce-scatter, and matmul + all-reduce. In the first two, the matmuls may also
be scaled fp8 matmuls. If few rows are summed, there is little to overlap. Then a reduce-scatter or an all-reduce is
fused with the residual and the RMS norm that follow it.

    model = torch.compile(model, options=hi.torch.overlap_pass.options())
    print(hi.torch.overlap_pass.report)

The pass treats every gathered or scattered tensor as a matrix of rows, and follows views that keep the order of the
rows. torch's functional collectives gather and scatter along axis 0 only. For another axis, a graph has a `split` and a
`cat` next to the collective, and the pass recognizes them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.nn.functional import ScalingType

from hostir import __version__
from hostir.choice.collectives import is_short
from hostir.choice.platforms import Platform
from hostir.ir.scaled_ops import BLOCK
from hostir.ir.source import counted, described, did_you_mean, error, user_span
from hostir.job.guest import registered
from hostir.torch.graphs import (
    AS_DTYPE,
    LAYOUTS,
    SPLITS,
    VIEWS,
    argument,
    depends,
    equal,
    group_of,
    insert,
    is_trivial,
    keeps_bytes,
    keeps_rows,
    lift_sizes,
    parts_of,
    shape_of,
    value,
    viewed,
    without_layout,
    without_views,
)
from hostir.torch.ops.all_gather_scaled_matmul import BLOCKS
from hostir.torch.ops.running import DTYPES
from hostir.torch.ops.scaled_operands import FP8, RESULTS
from hostir.torch.overlap_norm import residual_norm_after
from hostir.torch.overlap_report import OPERATORS, Overlaps, Visited, alone_us, operands_of, platform_of_group
from hostir.torch.reporting import LEDGER

aten, c10d, ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.hostir
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
ALL_REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
SCALED = (aten._scaled_mm.default, aten._scaled_mm_v2.default)
RECIPES = {  # the left and right recipe in a call of `_scaled_mm_v2`, by the layout of scales
    "one": (ScalingType.TensorWise, ScalingType.TensorWise),
    "rows": (ScalingType.RowWise, ScalingType.RowWise),
    "blocks": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
}
Fates = dict[Node, tuple[str, str]]  # what the report says of each collective: `fused` and `why`, as in Visited


class LeftAlone(Exception):  # noqa: N818  # no error: the graph stays the same
    """Raised for a collective that the pass does not fuse. The exception's text is the reason."""


def sources() -> tuple[str, ...]:
    """Return the paths of hostir's Python files. The key of Inductor's cache contains a hash of these files."""
    return tuple(sorted(str(path) for path in Path(__file__).parents[1].rglob("*.py")))


@dataclass(frozen=True)
class ProductScales:
    """The scales of a scaled matmul.

    Fields:
        layout: `one` if each operand has one scale. `rows` if each row of the left operand and each column of the right
            operand has a scale. `blocks` if each 1x128 block of the left operand and each 128x128 block of the right
            operand has a scale.
        left: the node of the left operand's scales.
        right: the node of the right operand's scales, as torch's scaled matmul takes them.
        fast: True if tensor cores may accumulate with less precision (torch's `use_fast_accum`).
    """

    layout: str
    left: Node
    right: Node
    fast: bool

    def right_operand(self, graph: Graph, right: Node) -> Node:
        """Return a node with the scales of the right operand `right`, in the shape that hostir's operators take."""
        rows, columns = shape_of(right)
        if self.layout == "rows":
            return viewed(graph, self.right, [1, columns])
        padded = self.layout == "blocks" and not equal(shape_of(self.right)[:1], [rows // BLOCK])
        return insert(graph, aten.slice.Tensor, self.right, 0, 0, rows // BLOCK) if padded else self.right


def bias_of(product: Node) -> Node | None:
    """Return the bias of a scaled matmul, or None."""
    bias: Node | None = argument(product, 4 if product.target is SCALED[0] else 8, "bias")
    return bias


def scales_of(product: Node) -> ProductScales:
    """Return the scales of a scaled matmul. Raises LeftAlone if hostir cannot compute the matmul."""
    layout, left, right, fast = (_by_shapes if product.target is SCALED[0] else _by_recipes)(product)
    b = shape_of(product.args[1])  # type: ignore[arg-type]
    if layout == "blocks" and not all(isinstance(size, int) and size % BLOCK == 0 for size in b):
        raise LeftAlone(f"blocks of {BLOCK} x {BLOCK} are not known to divide the right side of {product.name}")
    if any(value(scale).dtype != torch.float32 for scale in (left, right)):
        raise LeftAlone(f"the scales of {product.name} are {value(left).dtype} and {value(right).dtype}")
    if value(product).dtype not in RESULTS:
        raise LeftAlone(f"the result of {product.name} is {value(product).dtype}")
    return ProductScales(layout, without_layout(left), right, fast)


def _by_shapes(product: Node) -> tuple[str, Node, Node, bool]:
    """Return the layout, the left and right scales, and `use_fast_accum` of a `_scaled_mm`.

    Raises LeftAlone if hostir does not support the scales.
    """
    (rows, K), (_, columns) = map(shape_of, product.args[:2])  # type: ignore[arg-type]
    left, right = argument(product, 2, "scale_a"), argument(product, 3, "scale_b")
    of_left, of_right = shape_of(left), shape_of(right)
    if argument(product, 5, "scale_result") is not None:
        raise LeftAlone(f"{product.name} scales its result")
    fast = argument(product, 7, "use_fast_accum", False)
    if all(map(is_trivial, (*of_left, *of_right))):
        return "one", left, right, fast
    if equal(of_left, [rows, 1]) and equal(of_right, [1, columns]):
        return "rows", left, right, fast
    along, across = ((size + BLOCK - 1) // BLOCK for size in (K, columns))
    if equal(of_left, [rows, along]) and equal(of_right, [along, across]):
        return "blocks", left, right, fast
    raise LeftAlone(
        f"the scales of {product.name} are neither of tensors, nor of rows and columns, nor of 1x128 and 128x128 blocks"
    )


def _by_recipes(product: Node) -> tuple[str, Node, Node, bool]:
    """Return the layout, the left and right scales, and `use_fast_accum` of a `_scaled_mm_v2`.

    Raises LeftAlone if hostir does not support the scales.
    """
    left, right = (argument(product, i, f"scale_{side}") for i, side in ((2, "a"), (5, "b")))
    recipes = [argument(product, i, f"recipe_{side}") for i, side in ((3, "a"), (6, "b"))]
    swizzled = any((*argument(product, 4, "swizzle_a"), *argument(product, 7, "swizzle_b")))
    contracted = [axis % 2 for axis in argument(product, 10, "contraction_dim", ())]
    layout = next((name for name, pair in RECIPES.items() if recipes == [[recipe.value] for recipe in pair]), "")
    if not layout or swizzled or contracted not in ([], [1, 0]):
        names = " and ".join(ScalingType(recipe).name for side in recipes for recipe in side)
        raise LeftAlone(
            f"the scales of {product.name} are {names}{', swizzled' * swizzled}: hostir has no such product"
        )
    return layout, left[0], right[0], argument(product, 11, "use_fast_accum", False)


@dataclass(frozen=True)
class GatheredProduct:
    """A matmul with a gathered tensor as its left operand.

    Fields:
        node: the node of the matmul.
        rows: the left operand: the gathered tensor, or a view of it.
        right: the right operand.
        added: the bias, or None.
        scales: the scales of both operands, if this is a scaled fp8 matmul; otherwise None.
    """

    node: Node
    rows: Node
    right: Node
    added: Node | None
    scales: ProductScales | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """A tuple of the dtypes and of the scales of the gathered rows.

        Matmuls with equal signatures can be fused into one operator.
        """
        dtypes = value(self.rows).dtype, value(self.node).dtype
        return dtypes if self.scales is None else (*dtypes, self.scales.layout, self.scales.left, self.scales.fast)

    def other_operands(self) -> list[Node]:
        """Return all operands of the matmul except the gathered rows."""
        scales = () if self.scales is None else (self.scales.left, self.scales.right)
        return [x for x in (self.right, self.added, *scales) if x is not None]


def waited(collective: Node) -> Node:
    """Return the node that waits for a collective.

    Raises LeftAlone unless there is exactly one wait, or if a node other than the wait and the graph's output uses the
    collective.
    """
    waits = [user for user in collective.users if user.target is WAIT]
    if len(waits) != 1:
        raise LeftAlone(f"{len(waits)} nodes wait for it")
    others = [user for user in collective.users if user is not waits[0] and user.op != "output"]
    if others:
        raise LeftAlone(f"{others[0].name} uses it without a wait")
    return waits[0]


def gathered(gather: Node) -> tuple[Node, int]:
    """Return the node of the tensor that an all-gather produces, and the axis along which the tensor is gathered.

    For an axis other than 0, this node is the `cat` that follows the all-gather.
    """
    wait, shard = waited(gather), gather.args[0]
    assert isinstance(shard, Node)
    cats = _cats(wait)
    for cat in cats:
        axis = argument(cat, 1, "dim", 0) % len(shape_of(cat))
        if axis and _puts_together(cat, wait, argument(gather, 1, "group_size")):
            if len(cats) > 1 or any(cat not in _cats(user) for user in wait.users):
                raise LeftAlone("its result is used in several orders of axes")
            return cat, axis
    return wait, 0


def _cats(node: Node) -> set[Node]:
    """Return the `cat` nodes that concatenate parts of the tensor `node`, or views of the parts."""
    cats = {user for user in node.users if user.target is aten.cat.default}
    return cats.union(*(_cats(user) for user in node.users if _is_part(user)))


def _is_part(node: Node) -> bool:
    """Return True if `node` splits a tensor, takes a part of a tensor, or views a tensor's bytes in the same shape."""
    return node.target in (*SPLITS, operator.getitem, aten.slice.Tensor) or keeps_bytes(node)


def _puts_together(cat: Node, full: Node, ranks: int) -> bool:
    """Return True if `cat` concatenates the parts that `full` has from each rank, in the order of the ranks.

    Args:
        cat: the `cat` node.
        full: the result of an all-gather along axis 0.
        ranks: the number of ranks.
    """
    pieces: list[Any] = list(cat.args[0])  # type: ignore[arg-type]
    if any(value(piece).dtype != value(cat).dtype for piece in pieces):  # `cat` converts their dtype
        return False
    divided, axis = parts_of([without_views(piece) for piece in pieces], ranks) or (None, 0)
    return without_views(divided) is full and axis == 0


def rows_of_views(full: Node) -> Iterator[Node]:
    """Yield `full`, and then all views of `full` that have the same rows in the same order."""
    yield full
    for user in full.users:
        if keeps_rows(user):
            yield from rows_of_views(user)


def products_of(full: Node) -> list[GatheredProduct]:
    """Return the matmuls that have the gathered tensor `full` on the left and can be fused into one operator.

    Raises LeftAlone if there is no such matmul.
    """
    products, others, right = [], [], []
    for rows in rows_of_views(full):
        for user in rows.users:
            if user.target is aten.mm.default and user.args[0] is rows:
                product = GatheredProduct(user, rows, user.args[1], None)  # type: ignore[arg-type]
            elif user.target is aten.addmm.default and user.args[1] is rows and not user.kwargs:
                product = GatheredProduct(user, rows, user.args[2], user.args[0])  # type: ignore[arg-type]
            elif user.target in SCALED and user.args[0] is rows:
                product = GatheredProduct(user, rows, user.args[1], bias_of(user), scales_of(user))  # type: ignore[arg-type]
            else:
                others += [user] if not keeps_rows(user) else []
                right += [user] if user.target in (aten.mm.default, aten.addmm.default) else []
                continue
            products += [product] if not any(depends(each, full) for each in product.other_operands()) else []
    if products:
        return [each for each in products if each.signature == products[0].signature]
    if right:
        raise LeftAlone(f"it is the right side of {right[0].name}: a gathered weight")
    if scaled := [user for user in others if user.target in SCALED]:
        raise LeftAlone(f"it has the scales of {scaled[0].name}, whose rows are not gathered with them")
    why = "no matmul has its rows on the left"
    if views := [*_resized(full)]:
        raise LeftAlone(f"{why}; {views[0].name} views its elements as {value(views[0]).dtype}, of another size")
    if cats := sorted(cat.name for cat in _cats(full)):
        raise LeftAlone(f"{why}; {cats[0]} puts its parts together otherwise than rank by rank")
    uses = ", ".join(sorted({getattr(user.target, "__name__", str(user.target)) for user in others})) or "nothing"
    raise LeftAlone(f"{why}; it is used by {uses}")


def _resized(node: Node) -> Iterator[Node]:
    """Yield the views of a tensor, or of its parts, in a dtype with another element size."""
    for user in node.users:
        if user.target is AS_DTYPE and not keeps_bytes(user):
            yield user
        elif _is_part(user):
            yield from _resized(user)


def gather_of_scales(graph: Graph, gather: Node, axis: int, products: list[GatheredProduct]) -> Node | None:
    """Return the all-gather of the rows' scales; None if no such all-gather can be replaced by the fused operator.

    `gather` gathers the rows along `axis`. The all-gather of the scales must have the same group and axis, and only
    `products` may use its result.
    """
    assert products[0].scales
    scale, nodes = products[0].scales.left, {product.node for product in products}
    expected = [*shape_of(gather.args[0])[:-1], *shape_of(scale)[-1:]]  # type: ignore[arg-type]
    for other in graph.nodes:
        if other.target is not GATHER or group_of(other, 2) != group_of(gather, 2):
            continue
        with contextlib.suppress(LeftAlone):
            full, its_axis = gathered(other)
            fits = its_axis == axis and equal(shape_of(other.args[0]), expected) and scale in {*rows_of_views(full)}
            if fits and not _used_otherwise(full, nodes):
                return other
    return None


def check_dtype(*nodes: Node, fp8: bool = False) -> None:
    """Raise LeftAlone unless all tensors have the same dtype, and hostir's operators support it.

    With `fp8`, each tensor must have an fp8 dtype. The tensors may have different fp8 dtypes.
    """
    dtypes = {value(node).dtype for node in nodes}
    if not (dtypes <= FP8.keys() if fp8 else len(dtypes) == 1 and dtypes <= DTYPES.keys()):
        raise LeftAlone(f"its dtypes are {', '.join(sorted(map(str, dtypes)))}")


def as_dtype(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """Return a node that views the bytes of `node` as `dtype`."""
    if value(node).dtype == dtype:
        return node
    if node.target is AS_DTYPE and value(node.args[0]).dtype == dtype:  # type: ignore[arg-type]
        return node.args[0]  # type: ignore[return-value]
    return insert(graph, AS_DTYPE, node, dtype)


def fuse_gather(graph: Graph, gather: Node) -> Fates:
    """Replace an all-gather, and the matmuls that read the gathered rows, by one operator.

    Returns the fields `fused` and `why` of the report for each all-gather that was replaced.

    Raises LeftAlone if the all-gather cannot be fused.
    """
    full, axis = gathered(gather)
    shard: Any = gather.args[0]
    shape = shape_of(shard)
    if len(shape) < 2:
        raise LeftAlone(f"it gathers a tensor of {len(shape)} axes")
    if axis == len(shape) - 1:
        raise LeftAlone("it gathers the axis that the products sum over")
    products = products_of(full)
    kept = _used_otherwise(full, {product.node for product in products})
    moved = not all(is_trivial(size) for size in shape[:axis])
    lead = shape[:-1] if moved or len(shape) == 2 else [-1]
    where = axis if moved else 0, group_of(gather, 2)
    rights, scales = [product.right for product in products], products[0].scales
    text, fates = counted(len(products), "product") + " and the gathered tensor" * kept, {}
    with graph.inserting_before(full.next):
        part = viewed(graph, as_dtype(graph, shard, value(products[0].rows).dtype), [*lead, shape[-1]])
        check_dtype(part, *rights, fp8=scales is not None)
        if scales is None:
            op = ops.all_gather_matmul.default
            fused = insert(graph, op, part, rights, *where, kept)
        else:
            op = ops.all_gather_scaled_matmul.default
            others = gather_of_scales(graph, gather, axis, products)
            along = shape_of(scales.left)[-1:]
            if scales.layout == "one":
                layout, of_rows = "one", scales.left
            elif others is None:
                rows = shape_of(full)[:-1] if lead != [-1] else lead
                layout, of_rows = "replicated", viewed(graph, scales.left, [*rows, *along])
            else:
                layout, of_rows = "sharded", viewed(graph, others.args[0], [*lead, *along])  # type: ignore[arg-type]
                fates[others] = _name(op), f"the scales of {gather.name}"
            layout += BLOCKS * (scales.layout == "blocks")
            columns = [p.scales.right_operand(graph, p.right) for p in products if p.scales]
            biases, dtype = [p.added for p in products], value(products[0].node).dtype
            fused = insert(graph, op, part, of_rows, rights, columns, *where, layout, biases, dtype, scales.fast)
        outputs = insert(graph, operator.getitem, fused, 1 if scales is None else 2)
        for index, product in enumerate(products):
            _replace_product(graph, product, insert(graph, operator.getitem, outputs, index))
        if kept:
            gathered_rows = as_dtype(graph, insert(graph, operator.getitem, fused, 0), value(full).dtype)
            full.replace_all_uses_with(viewed(graph, gathered_rows, shape_of(full)))
    return {gather: (_name(op), text), **fates}


def _name(op: Any) -> str:
    """Return the name of an operator with its namespace, for reports."""
    name: str = op._schema.name
    return name


def _used_otherwise(full: Node, products: set[Node]) -> bool:
    """Return True if a node other than `products` uses the tensor `full`, directly or through views and copies."""
    return any(
        user not in products and (not (keeps_rows(user) or user.target in LAYOUTS) or _used_otherwise(user, products))
        for user in full.users
    )


def _replace_product(graph: Graph, product: GatheredProduct, y: Node) -> None:
    """Replace a matmul and its views by `y`. `y` is the output of the fused operator for this matmul.

    `y` may have more axes than the matmul's result. Views in the shape of `y` are replaced by `y` itself. The other
    users of the matmul get a view of `y` in the shape of the matmul's result.
    """
    if product.added is not None and product.scales is None:
        if len(shape_of(product.added)) > 1:  # the added tensor is a matrix; `y` may have more axes
            y = viewed(graph, y, shape_of(product.node))
        y = insert(graph, aten.add.Tensor, y, product.added)
    for user in [*product.node.users]:
        if user.target in VIEWS and equal(shape_of(user), shape_of(y)):
            user.replace_all_uses_with(y)
    if product.node.users:
        product.node.replace_all_uses_with(viewed(graph, y, shape_of(product.node)))


def scattered(scatter: Node) -> tuple[Node, int]:
    """Return the node of the tensor that a reduce-scatter sums and scatters, and the axis along which it scatters.

    For an axis other than 0, this is the tensor before the `split` and the `cat` that precede the reduce-scatter.
    """
    addend: Any = scatter.args[0]
    if addend.target is aten.clone.default:
        addend = addend.args[0]
    if addend.target is not aten.cat.default or argument(addend, 1, "dim", 0) != 0:
        return addend, 0
    return parts_of(list(addend.args[0]), argument(scatter, 2, "group_size")) or (addend, 0)


def only_user(node: Node) -> None:
    """Raise LeftAlone if `node` has more than one user."""
    if len(node.users) > 1:
        raise LeftAlone(
            f"{node.name} has {len(node.users)} users, and would have to be computed for the others as well"
        )


def products_before(node: Node, divided: bool) -> Iterator[Node]:
    """Yield the matmuls that compute `node`: one matmul, or several matmuls that are added.

    Raises LeftAlone if `node` is computed in another way, or if another node needs an intermediate result. If `divided`
    is True, a reduce-scatter reads parts of `node`, and `node` may have a user for each part.
    """
    if not divided:
        only_user(node)
    if keeps_rows(node) and node.target is not AS_DTYPE:
        yield from products_before(node.args[0], False)  # type: ignore[arg-type]
    elif node.target is aten.add.Tensor and not node.kwargs and _alike(node):
        for term in node.args:
            yield from products_before(term, False)  # type: ignore[arg-type]
    elif node.target in (aten.mm.default, *SCALED):
        yield node
    else:
        raise LeftAlone(f"{node.name} before it is {getattr(node.target, '__name__', node.op)}, not a matmul")


def _alike(node: Node) -> bool:
    """Return True if all terms of a sum are tensors with the shape of the sum, without broadcasting."""
    return all(isinstance(term, Node) and equal(shape_of(term), shape_of(node)) for term in node.args)


def fuse_norm(graph: Graph, collective: Node, group: str) -> Fates:
    """Replace a sum over ranks of few rows, and the residual and the norm that follow it, by one operator.

    Returns the fields `fused` and `why` of the report for the collective. Returns nothing if the graph stays the same.

    Args:
        graph: the graph.
        collective: an all-reduce, or a reduce-scatter along axis 0, that sums.
        group: the name of the process group.
    """
    addend: Any = collective.args[0]
    wait, scatters = waited(collective), collective.target is SCATTER
    norm = residual_norm_after(wait)
    is_output = any(user.op == "output" for user in collective.users)
    if norm is None or is_output or not _is_short(addend, group, scatters):
        return {}
    rows = shape_of(norm.added)
    op: Any = ops.reduce_scatter_residual_norm.default if scatters else ops.all_reduce_residual_norm.default
    if scatters and (len(rows) < 2 or not equal(rows, shape_of(wait))):
        return {}
    with graph.inserting_before(norm.added):
        operands = addend if scatters else viewed(graph, addend, rows), norm.residual, norm.weight, norm.eps, False
        results = insert(graph, op, *operands, *([0] if scatters else []), group)
        normed, added = (insert(graph, operator.getitem, results, n) for n in range(2))
    norm.normed.replace_all_uses_with(normed)
    norm.added.replace_all_uses_with(added)
    return {collective: (_name(op), "the residual and the norm after it")}


def _is_short(addend: Node, group: str, scatters: bool) -> bool:
    """Return True if a sum is so short that a matmul could hide little of it.

    Symbolic sizes count as their values in the call for which the graph was traced.
    """
    members = registered(group)
    size: Any = value(addend).numel() * value(addend).itemsize
    known = size.node.hint if isinstance(size, torch.SymInt) else size
    if members is None or known is None:
        return False
    return is_short("reduce_scatter" if scatters else "allreduce", int(known), members.size())


def fuse_scatter(graph: Graph, scatter: Node) -> Fates:
    """Replace a reduce-scatter, and the matmuls before it or the residual and norm after it, by one operator.

    Returns the fields `fused` and `why` of the report for the reduce-scatter.

    Raises LeftAlone if the reduce-scatter cannot be fused.
    """
    wait = waited(scatter)
    addend, axis = scattered(scatter)
    shape = shape_of(addend)
    reduce_op = argument(scatter, 1, "reduce_op")
    if reduce_op not in ("sum", "avg"):
        raise LeftAlone(f"its sum is {reduce_op!r}")
    if reduce_op == "sum" and axis == 0 and (fates := fuse_norm(graph, scatter, group_of(scatter, 3))):
        return fates
    if len(shape) < 2:
        raise LeftAlone(f"it scatters a tensor of {len(shape)} axes")
    products, columns = [*products_before(addend, divided=addend is not scatter.args[0])], axis == len(shape) - 1
    moved = columns or not all(is_trivial(size) for size in shape[:axis])
    where = reduce_op, axis if moved else 0, group_of(scatter, 3)
    with graph.inserting_before(wait):
        if any(product.target in SCALED for product in products):
            if columns:
                raise LeftAlone("it scatters columns of a scaled product")
            op, (left, right, scales) = ops.scaled_matmul_reduce_scatter.default, one_scaled(products)
            of_left = scales.left
            if moved:
                left = _as_axes(graph, left, [*shape[:-1], shape_of(left)[-1]])
                if scales.layout != "one":
                    of_left = viewed(graph, of_left, [*shape[:-1], *shape_of(of_left)[-1:]])
            operands = left, of_left, right, scales.right_operand(graph, right)
            fused = insert(graph, op, *operands, *where, value(addend).dtype, bias_of(products[0]), scales.fast)
        else:
            op = ops.matmul_reduce_scatter.default
            left, right = one_product(graph, products, shape[:-1] if moved else None)
            fused = insert(graph, op, left, right, *where)
        _replace_sum(graph, scatter, wait, fused)
    return {scatter: (_name(op), _amount(products))}


def one_scaled(products: list[Node]) -> tuple[Node, Node, ProductScales]:
    """Return the left and right operands of a single scaled matmul, and their scales.

    Raises LeftAlone if there are several products.
    """
    if len(products) > 1:
        raise LeftAlone(f"it is a sum of {len(products)} products, of which some are scaled")
    left, right, *_ = products[0].args
    check_dtype(left, right, fp8=True)  # type: ignore[arg-type]
    return left, right, scales_of(products[0])  # type: ignore[return-value]


def one_product(graph: Graph, products: list[Node], lead: list[Any] | None = None) -> tuple[Node, Node]:
    """Return the left and right operands of one matmul that computes the sum of `products`.

    The operands of several products are concatenated along K. Unless `lead` is None, the left operand is viewed in the
    shape `[*lead, K]`.
    """
    lefts, rights = zip(*(product.args for product in products), strict=True)
    check_dtype(*lefts, *rights)
    rows = [left if lead is None else _as_axes(graph, left, [*lead, shape_of(left)[-1]]) for left in lefts]
    if len(rows) == 1:
        return rows[0], rights[0]
    return insert(graph, aten.cat.default, rows, -1), insert(graph, aten.cat.default, [*rights], 0)


def _replace_sum(graph: Graph, collective: Node, wait: Node, fused: Node) -> None:
    """Replace a collective and its wait by `fused`, the output of the fused operator."""
    result = viewed(graph, fused, shape_of(wait))
    for node in (wait, collective):  # the collective is an output if the backward graph needs it
        node.replace_all_uses_with(result, lambda user: user is not wait)


def _amount(products: list[Node]) -> str:
    return "1 product" if len(products) == 1 else f"a sum of {len(products)} products, combined into one"


def _as_axes(graph: Graph, left: Node, shape: list[Any]) -> Node:
    """Return a node that has the elements of `left` in `shape`.

    If `left` is a view of a tensor of this shape, that tensor is returned. Otherwise a new view is inserted.
    """
    source = left.args[0] if left.target in VIEWS else None
    return source if isinstance(source, Node) and equal(shape_of(source), shape) else viewed(graph, left, shape)


def fuse_all_reduce(graph: Graph, reduce: Node) -> Fates:
    """Replace an all-reduce, and the matmuls before it or the residual and norm after it, by one operator.

    Returns the fields `fused` and `why` of the report for the all-reduce.

    Raises LeftAlone if the all-reduce cannot be fused.
    """
    wait, addend, reduce_op = waited(reduce), reduce.args[0], argument(reduce, 1, "reduce_op")
    assert isinstance(addend, Node)
    if reduce_op != "sum":
        raise LeftAlone(f"its sum is {reduce_op!r}")
    if fates := fuse_norm(graph, reduce, group_of(reduce, 2)):
        return fates
    products = [*products_before(addend, divided=False)]
    if scaled := [product for product in products if product.target in SCALED]:
        raise LeftAlone(f"{scaled[0].name} is a scaled matmul, and those are not summed on all ranks")
    op = ops.matmul_all_reduce.default
    with graph.inserting_before(wait):
        _replace_sum(graph, reduce, wait, insert(graph, op, *one_product(graph, products), group_of(reduce, 2)))
    return {reduce: (_name(op), _amount(products))}


FUSIONS: dict[Any, Callable[[Graph, Node], Fates]] = {
    GATHER: fuse_gather,
    SCATTER: fuse_scatter,
    ALL_REDUCE: fuse_all_reduce,
}


class OverlapPass(CustomGraphPass):
    """A graph pass that replaces collectives and their matmuls by fused operators of hostir.

    Pass `options()` to `torch.compile`, and Inductor calls the pass. Or call it with any forward or backward graph of
    ATen operators and functional collectives. `report` says which collectives were fused, and why the others were not.

    Inductor does not call the pass for a graph from its cache. Such a graph is not in the report, but the report counts
    the calls of the graph's fused operators.
    """

    def __init__(self) -> None:
        self.clear()

    def options(self, mode: str = "default") -> dict[str, Any]:
        """Return options for `torch.compile(model, options=...)`, with which Inductor runs this pass.

        They apply to the forward and the backward graphs of that model, whenever and on whichever thread these are
        compiled. `torch.compile` takes no `mode` beside options. So name the mode here.

        Args:
            mode: a mode of `torch.compile`, such as `reduce-overhead`.
        """
        modes = list_mode_options()
        if mode not in modes:
            expected = f"one of {', '.join(modes)}"
            raise error(f"mode={described(mode)}", user_span(), expected=expected, hint=did_you_mean(str(mode), modes))
        return {**modes[mode], "post_grad_custom_post_pass": self}

    def clear(self) -> None:
        """Start a new report."""
        self.graphs, self._visits, self._calls = 0, list[Visited](), LEDGER.calls()

    @property
    def report(self) -> Overlaps:
        """The collectives of all graphs that the pass has seen since `clear`, and the calls of fused operators."""
        calls = LEDGER.calls() - self._calls
        report = Overlaps(self._visits)
        report.ran = {(op, group): n for (op, group), n in calls.items() if op in OPERATORS}
        return report

    def uuid(self) -> Any:
        return get_hash_for_files(sources(), __version__)

    def __call__(self, graph: Graph) -> None:
        self.graphs += 1
        fates: Fates = {}
        collectives = [node for node in graph.nodes if _is_collective(node)]
        if collectives:
            lift_sizes(graph)
        for node in sorted(collectives, key=_moves_wide_elements):
            if node not in fates:  # gathers of fp8 rows come first: they are fused with the gathers of their scales
                fates |= self._fate(graph, node)
        platforms = cache(platform_of_group)
        visits = [self._visited(node, *fates[node], platforms) for node in collectives]
        self._visits += visits
        if not any(visit.fused for visit in visits):
            return
        from torch._inductor.pattern_matcher import stable_topological_sort

        for node in graph.nodes:
            if node.target is aten.view.default:
                node.target = aten.reshape.default  # results of hostir's operators may have other strides
        stable_topological_sort(graph)
        graph.eliminate_dead_code(_is_impure)
        graph.lint()

    def _fate(self, graph: Graph, node: Node) -> Fates:
        fuse = FUSIONS.get(node.target)
        if fuse is None:
            return {node: ("", "only all-gathers, reduce-scatters and all-reduces are fused")}
        try:
            return fuse(graph, node)
        except LeftAlone as why:
            return {node: ("", str(why))}

    def _visited(self, node: Node, fused: str, why: str, platforms: Callable[..., Platform | None]) -> Visited:
        packet = node.target._overloadpacket.__name__  # type: ignore[union-attr]
        group = str(node.args[-1] if isinstance(node.args[-1], str) else getattr(node.args[-1], "group_name", "?"))
        platform = platforms(group, operands_of(node)[0].device)
        us = None if platform is None else alone_us(node, packet, platform)
        return Visited(self.graphs, node.name, packet, group, fused, why, us, str(platform or ""))


def _is_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not WAIT


def _moves_wide_elements(collective: Node) -> bool:
    """Return False if a collective moves a tensor with elements of one byte, such as fp8 numbers."""
    return all(x.itemsize > 1 for x in operands_of(collective))


def _is_impure(node: Node) -> bool:
    """Return True if dead-code elimination must keep `node`.

    It must keep impure nodes, except collectives and the waits for them.
    """
    return node.is_impure() and not (node.target is WAIT or node.target in FUSIONS)


overlap_pass = OverlapPass()
