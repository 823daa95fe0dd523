"""A pass over graphs of torch.compile: a collective and the matmuls before or after it become one operator.

These are all-gather + matmuls, matmul + reduce-scatter, both also of fp8 with scales, and matmul + all-reduce.

    torch._inductor.config.post_grad_custom_post_pass = hi.torch.overlap_pass
    print(hi.torch.overlap_pass.report)

Methods: rows are what counts. A gathered tensor, and one that is to be scattered, is seen as a matrix of rows; views
keep their order, and `split` with `cat` moves an axis to the front, as torch's collectives do that know axis 0 only.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import ScalingType
from torch.utils._sympy.functions import FloorDiv

from hostir import __version__
from hostir.ir.scaled_ops import BLOCK
from hostir.ir.source import counted
from hostir.torch.ops.all_gather_scaled_matmul import BLOCKS
from hostir.torch.ops.running import DTYPES
from hostir.torch.ops.scaled_operands import FP8, RESULTS
from hostir.torch.reporting import LEDGER

aten, c10d, ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.hostir
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
ALL_REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.detach.default, aten.alias.default)
SPLITS = (aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default)
SCALED = (aten._scaled_mm.default, aten._scaled_mm_v2.default)
AS_DTYPE = aten.view.dtype
LAYOUTS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.clone.default)  # may change strides alone


Fates = dict[Node, tuple[str, str]]  # of collectives: the operator, empty if left alone, and with what, or why not


class LeftAlone(Exception):  # noqa: N818  # no error: the graph stays as it is
    """Raised for a collective that is left alone; its text says why."""


# The report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visited:
    """A collective that the pass has seen.

    Fields:
        graph: the number of its graph, from 1.
        node: its name there.
        collective: such as `all_gather_into_tensor`.
        group: the name of the process group.
        fused: the operator that it is part of now; empty if it was left alone.
        why: with how many products it was fused, or what it was part of; or why it was left alone.
    """

    graph: int
    node: str
    collective: str
    group: str
    fused: str
    why: str

    def __str__(self) -> str:
        fate = f"{self.fused}, {self.why}" if self.fused else f"left alone: {self.why}"
        return f"graph {self.graph}, {self.node} ({self.collective} on group '{self.group}'): {fate}"


NOTHING_SEEN = "the pass has seen no collective: the graph has none, or Inductor took it from its cache"
OPERATORS = tuple(  # that the pass puts into graphs
    f"hostir::{name}"
    for name in (
        "all_gather_matmul",
        "all_gather_scaled_matmul",
        "matmul_reduce_scatter",
        "scaled_matmul_reduce_scatter",
        "matmul_all_reduce",
    )
)


class Overlaps(tuple[Visited, ...]):
    """The collectives that the pass has seen, and the fused operators that ran; `print` shows a line for each.

    Fields:
        ran: the number of calls since the report began, by operator and group. It includes calls from graphs of
            Inductor's cache, which the pass has not seen, and calls by name or by hostir's layers.
    """

    ran: Mapping[tuple[str, str], int] = MappingProxyType({})

    def __str__(self) -> str:
        lines = [*map(str, self)] or [NOTHING_SEEN]
        calls = [f"{op} on group '{group}', {counted(n, 'call')}" for (op, group), n in self.ran.items()]
        if calls or not self:
            lines.append(f"ran since the report began: {'; '.join(calls) or 'no fused operator'}")
        return "\n".join(lines)


def sources() -> tuple[str, ...]:
    """Return the files of hostir: what the pass makes of a graph depends on the operators that they define."""
    return tuple(sorted(str(path) for path in Path(__file__).parents[1].rglob("*.py")))


# Graphs ---------------------------------------------------------------------------------------------------------------


def value(node: Node) -> Tensor:
    """Return the tensor that a node gives, without data."""
    return node.meta["val"]


def shape_of(node: Node) -> list[Any]:
    """Return the sizes of a node's tensor."""
    return [*value(node).shape]


def made(graph: Graph, target: Any, *args: Any) -> Node:
    """Insert a call, with its tensor."""
    from torch._guards import detect_fake_mode

    node = graph.call_function(target, args)
    given = torch.fx.map_arg(args, lambda each: each.meta["val"])
    with detect_fake_mode(torch.utils._pytree.tree_leaves(given)) or contextlib.nullcontext():
        node.meta["val"] = target(*given)
    return node


def viewed(graph: Graph, node: Node, shape: list[Any]) -> Node:
    """Return a node with this shape."""
    if equal(shape_of(node), shape):
        return node
    sizes = [size if isinstance(size, int) else size_node(graph, node, size) for size in shape]
    return made(graph, aten.reshape.default, node, sizes)


def size_node(graph: Graph, node: Node, size: Any) -> Any:
    """Return a size that is not known yet as a node; -1 where the graph has none."""
    for each in graph.nodes:
        found = each.meta.get("val")
        if isinstance(found, torch.SymInt) and found.node.expr == size.node.expr:
            return each
    return -1


def lift_sizes(graph: Graph) -> None:
    """Compute sizes of results from sizes of inputs, where they follow, so that no result is used for its size."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    sources: dict[Any, tuple[Node, int | None]] = {}
    for node in sorted(inputs, key=lambda node: isinstance(node.meta.get("val"), Tensor)):
        size = node.meta.get("val")
        for axis, each in enumerate(size.shape) if isinstance(size, Tensor) else [(None, size)]:
            if isinstance(each, torch.SymInt):
                sources.setdefault(each.node.expr, (node, axis))
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [*graph.nodes]:
        known = isinstance(node.meta.get("val"), torch.SymInt)
        if known and node.target is aten.sym_size.int and node.args[0] not in inputs:
            with graph.inserting_before(first):
                size = _size_from(graph, node.meta["val"].node.expr, sources)
            if isinstance(size, Node):
                node.replace_all_uses_with(size)
                graph.erase_node(node)


def _size_from(graph: Graph, expr: Any, sources: dict[Any, tuple[Node, int | None]]) -> Any:
    """Return an expression of sizes as an integer or a node; None if it does not follow from sizes of inputs.

    Args:
        graph: where nodes are inserted.
        expr: the expression.
        sources: for each known size an input that is this size, or one with the axis that has it.
    """
    if expr.is_Integer:
        return int(expr)
    if expr in sources:
        node, axis = sources[expr]
        return node if axis is None else made(graph, aten.sym_size.int, node, axis)
    op = operator.add if expr.is_Add else operator.mul if expr.is_Mul else operator.floordiv
    if not (expr.is_Add or expr.is_Mul or isinstance(expr, FloorDiv)):
        return None
    terms = [_size_from(graph, term, sources) for term in expr.args]
    return None if None in terms else reduce(partial(made, graph, op), terms)


def depends(node: Node, on: Node) -> bool:
    """Return whether a node needs another's result."""
    seen, todo = set(), [node]
    while todo:
        each = todo.pop()
        if each is on:
            return True
        if each not in seen:
            seen.add(each)
            todo += each.all_input_nodes
    return False


def equal(one: Any, other: Any) -> bool:
    """Return whether sizes, or lists of them, are known to be equal; this adds no guard on sizes that are free."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return statically_known_true(one == other)


def keeps_rows(node: Node) -> bool:
    """Return whether a node has the rows of its first operand, in their order."""
    if node.target in VIEWS:
        return equal(shape_of(node.args[0])[-1:], shape_of(node)[-1:])  # type: ignore[arg-type]
    if node.target is aten.slice.Tensor:  # DTensor cuts off what uneven parts are filled up with, if they were uneven
        return equal(shape_of(node.args[0]), shape_of(node))  # type: ignore[arg-type]
    return keeps_bytes(node)


def keeps_bytes(node: Node) -> bool:
    """Return whether a node has the bytes and the shape of its operand, perhaps as another dtype.

    Collectives that know no fp8 move bytes, and `cat` puts bytes together.
    """
    if node.target is AS_DTYPE:
        return value(node.args[0]).itemsize == value(node).itemsize  # type: ignore[arg-type]
    return node.target in VIEWS and equal(shape_of(node.args[0]), shape_of(node))  # type: ignore[arg-type]


def without_views(node: Any) -> Any:
    """Return the tensor of the same shape that a node is a view of, perhaps as another dtype; else the node itself."""
    while isinstance(node, Node) and keeps_bytes(node):
        node = node.args[0]
    return node


def without_layout(node: Node) -> Node:
    """Return the node of which this one is a copy with other strides; the node itself if it is no such copy."""
    source, order = node, [*range(len(shape_of(node)))]
    while node.target in LAYOUTS:
        axes = [*range(len(order))]
        if node.target is aten.permute.default:
            axes = [axis % len(axes) for axis in node.args[1]]  # type: ignore[union-attr, operator]
        elif node.target is aten.transpose.int:
            i, j = node.args[1:3]
            axes[i], axes[j] = axes[j], axes[i]  # type: ignore[index]
        elif node.target is aten.t.default:
            axes.reverse()
        node, order = node.args[0], [axes[axis] for axis in order]  # type: ignore[assignment]
        if order == sorted(order):
            source = node
    return source


def is_trivial(size: Any) -> bool:
    """Return whether an axis is known to have one element."""
    return isinstance(size, int) and size == 1


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, given by place or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def group_of(node: Node, index: int) -> str:
    """Return the name of a collective's group."""
    group = argument(node, index, "group_name")
    return group if isinstance(group, str) else group.group_name


def parts_of(pieces: list[Any], ranks: int) -> tuple[Node, int] | None:
    """Return the tensor that these pieces are equal parts of, one for each rank, and the axis that they divide."""
    sources = {(each.target, each.args[0]) for each in pieces if isinstance(each, Node) and each.op == "call_function"}
    if len(sources) != 1 or len(pieces) != ranks:
        return None
    ((target, source),) = sources
    if target is operator.getitem and isinstance(source, Node) and source.target in SPLITS:
        if [each.args[1] for each in pieces] != [*range(len(source.meta["val"]))]:
            return None
        whole: Any = source.args[0]
        axis = argument(source, 2, "dim", 0)
    elif target is aten.slice.Tensor and isinstance(source, Node):
        axes = {argument(each, 1, "dim", 0) for each in pieces}
        if len(axes) != 1 or any(len(each.args) > 4 for each in pieces):
            return None
        whole, axis = source, axes.pop()
        starts = [argument(each, 2, "start", 0) for each in pieces]
        starts = [start.meta["val"] if isinstance(start, Node) else start for start in starts]
        length = shape_of(pieces[0])[axis]
        if not equal(starts, [i * length for i in range(len(pieces))]):
            return None
    else:
        return None
    axis %= len(shape_of(whole))
    lengths = [shape_of(each)[axis] for each in pieces]
    same = equal(lengths, lengths[:1] * len(lengths)) and equal(lengths[0] * len(lengths), shape_of(whole)[axis])
    return (whole, axis) if same else None


# Scaled products ------------------------------------------------------------------------------------------------------
# `_scaled_mm` tells by the shapes of scales what they are of; `_scaled_mm_v2` has a recipe for either side.

RECIPES = {
    "one": (ScalingType.TensorWise, ScalingType.TensorWise),
    "rows": (ScalingType.RowWise, ScalingType.RowWise),
    "blocks": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
}


@dataclass(frozen=True)
class ProductScales:
    """The scales of a scaled product.

    Fields:
        form: `one` of each tensor, of `rows` and columns, or of `blocks`: 1x128 of the left side, 128x128 of the right.
        left: of the left side.
        right: of the right side, as the product takes them.
        fast: whether tensor cores may accumulate.
    """

    form: str
    left: Node
    right: Node
    fast: bool

    def right_operand(self, graph: Graph, right: Node) -> Node:
        """Return the scales of a right side as operators of hostir take them: without rows that fill them up."""
        rows, columns = shape_of(right)
        if self.form == "rows":
            return viewed(graph, self.right, [1, columns])
        padded = self.form == "blocks" and not equal(shape_of(self.right)[:1], [rows // BLOCK])
        return made(graph, aten.slice.Tensor, self.right, 0, 0, rows // BLOCK) if padded else self.right


def bias_of(product: Node) -> Node | None:
    """Return what a scaled product adds."""
    bias: Node | None = argument(product, 4 if product.target is SCALED[0] else 8, "bias")
    return bias


def scales_of(product: Node) -> ProductScales:
    """Return the scales of a scaled product. Raises LeftAlone for one that hostir does not compute."""
    form, left, right, fast = (_by_shapes if product.target is SCALED[0] else _by_recipes)(product)
    b = shape_of(product.args[1])  # type: ignore[arg-type]
    if form == "blocks" and not all(isinstance(size, int) and size % BLOCK == 0 for size in b):
        raise LeftAlone(f"blocks of {BLOCK} x {BLOCK} are not known to divide the right side of {product.name}")
    if any(value(scale).dtype != torch.float32 for scale in (left, right)):
        raise LeftAlone(f"the scales of {product.name} are {value(left).dtype} and {value(right).dtype}")
    if value(product).dtype not in RESULTS:
        raise LeftAlone(f"the result of {product.name} is {value(product).dtype}")
    return ProductScales(form, without_layout(left), right, fast)


def _by_shapes(product: Node) -> tuple[str, Node, Node, bool]:
    """Return the form and the scales of a `_scaled_mm`, and whether it accumulates fast."""
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
    """Return the form and the scales of a `_scaled_mm_v2`, and whether it accumulates fast."""
    left, right = (argument(product, i, f"scale_{side}") for i, side in ((2, "a"), (5, "b")))
    recipes = [argument(product, i, f"recipe_{side}") for i, side in ((3, "a"), (6, "b"))]
    swizzled = any((*argument(product, 4, "swizzle_a"), *argument(product, 7, "swizzle_b")))
    contracted = [axis % 2 for axis in argument(product, 10, "contraction_dim", ())]
    form = next((form for form, pair in RECIPES.items() if recipes == [[recipe.value] for recipe in pair]), "")
    if not form or swizzled or contracted not in ([], [1, 0]):
        names = " and ".join(ScalingType(recipe).name for side in recipes for recipe in side)
        raise LeftAlone(
            f"the scales of {product.name} are {names}{', swizzled' * swizzled}: hostir has no such product"
        )
    return form, left[0], right[0], argument(product, 11, "use_fast_accum", False)


# All-gathers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatheredProduct:
    """A matmul of gathered rows.

    Fields:
        node: its result.
        rows: what is on its left.
        right: the matrix on its right.
        added: what is added.
        scales: of the rows and of `right`, if these are fp8.
    """

    node: Node
    rows: Node
    right: Node
    added: Node | None
    scales: ProductScales | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what products have in common that one operator computes."""
        dtypes = value(self.rows).dtype, value(self.node).dtype
        return dtypes if self.scales is None else (*dtypes, self.scales.form, self.scales.left, self.scales.fast)

    def given(self) -> list[Node]:
        """Return its operands but for the rows."""
        scales = () if self.scales is None else (self.scales.left, self.scales.right)
        return [x for x in (self.right, self.added, *scales) if x is not None]


def waited(collective: Node) -> Node:
    """Return the only wait for a collective."""
    waits = [user for user in collective.users if user.target is WAIT]
    if len(waits) != 1:
        raise LeftAlone(f"{len(waits)} nodes wait for it")
    others = [user for user in collective.users if user is not waits[0] and user.op != "output"]
    if others:
        raise LeftAlone(f"{others[0].name} uses it without a wait")
    return waits[0]


def gathered(gather: Node) -> tuple[Node, int]:
    """Return the node of the gathered tensor, and the axis that it is gathered along."""
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
    """Return the `cat`s of parts of a tensor, or of views of them. A node is the tensor, its division, or a part."""
    cats = {user for user in node.users if user.target is aten.cat.default}
    return cats.union(*(_cats(user) for user in node.users if _is_part(user)))


def _is_part(node: Node) -> bool:
    """Return whether a node divides a tensor, or is a part of one, or a view as another dtype of the same size."""
    return node.target in (*SPLITS, operator.getitem, aten.slice.Tensor) or keeps_bytes(node)


def _puts_together(cat: Node, full: Node, ranks: int) -> bool:
    """Return whether the operands of a `cat` are the ranks' parts of a gathered tensor, or views of them as bytes."""
    pieces: list[Any] = list(cat.args[0])  # type: ignore[arg-type]
    if any(value(piece).dtype != value(cat).dtype for piece in pieces):  # `cat` converts them
        return False
    divided, axis = parts_of([without_views(piece) for piece in pieces], ranks) or (None, 0)
    return without_views(divided) is full and axis == 0


def rows_of_views(full: Node) -> Iterator[Node]:
    """Yield the nodes that have the rows of a tensor in their order."""
    yield full
    for user in full.users:
        if keeps_rows(user):
            yield from rows_of_views(user)


def products_of(full: Node) -> list[GatheredProduct]:
    """Return the matmuls that have the gathered rows on their left. Raises LeftAlone if there are none."""
    found, others, right = [], [], []
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
            found += [product] if not any(depends(each, full) for each in product.given()) else []
    if found:
        return [each for each in found if each.kind == found[0].kind]
    if right:
        raise LeftAlone(f"it is the right side of {right[0].name}: a gathered weight")
    if taken := [user for user in others if user.target in SCALED]:
        raise LeftAlone(f"it has the scales of {taken[0].name}, whose rows are not gathered with them")
    why = "no matmul has its rows on the left"
    if views := [*_resized(full)]:
        raise LeftAlone(f"{why}; {views[0].name} views its elements as {value(views[0]).dtype}, of another size")
    if cats := sorted(cat.name for cat in _cats(full)):
        raise LeftAlone(f"{why}; {cats[0]} puts its parts together otherwise than rank by rank")
    uses = ", ".join(sorted({getattr(user.target, "__name__", str(user.target)) for user in others})) or "nothing"
    raise LeftAlone(f"{why}; it is used by {uses}")


def _resized(node: Node) -> Iterator[Node]:
    """Yield the views of a tensor, or of its parts, as a dtype of another size."""
    for user in node.users:
        if user.target is AS_DTYPE and not keeps_bytes(user):
            yield user
        elif _is_part(user):
            yield from _resized(user)


def gather_of_scales(graph: Graph, gather: Node, axis: int, products: list[GatheredProduct]) -> Node | None:
    """Return the all-gather of the scales of rows, if these are gathered as the rows are, and for these products."""
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
    """Raise LeftAlone unless all tensors have one dtype that hostir computes with, or each is `fp8`."""
    dtypes = {value(node).dtype for node in nodes}
    if not (dtypes <= FP8.keys() if fp8 else len(dtypes) == 1 and dtypes <= DTYPES.keys()):
        raise LeftAlone(f"its dtypes are {', '.join(sorted(map(str, dtypes)))}")


def as_dtype(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """Return a node with its bytes as numbers of a dtype."""
    if value(node).dtype == dtype:
        return node
    if node.target is AS_DTYPE and value(node.args[0]).dtype == dtype:  # type: ignore[arg-type]
        return node.args[0]  # type: ignore[return-value]
    return made(graph, AS_DTYPE, node, dtype)


def fuse_gather(graph: Graph, gather: Node) -> Fates:
    """Replace an all-gather and the matmuls of its rows. Raises LeftAlone."""
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
    text, fates = f"{len(products)} product{'s' * (len(products) > 1)}{' and the gathered tensor' * kept}", {}
    with graph.inserting_before(full.next):
        part = viewed(graph, as_dtype(graph, shard, value(products[0].rows).dtype), [*lead, shape[-1]])
        check_dtype(part, *rights, fp8=scales is not None)
        if scales is None:
            op = ops.all_gather_matmul.default
            fused = made(graph, op, part, rights, *where, kept)
        else:
            op = ops.all_gather_scaled_matmul.default
            others = gather_of_scales(graph, gather, axis, products)
            along = shape_of(scales.left)[-1:]
            if scales.form == "one":
                kind, of_rows = "one", scales.left
            elif others is None:
                rows = shape_of(full)[:-1] if lead != [-1] else lead
                kind, of_rows = "replicated", viewed(graph, scales.left, [*rows, *along])
            else:
                kind, of_rows = "sharded", viewed(graph, others.args[0], [*lead, *along])  # type: ignore[arg-type]
                fates[others] = _name(op), f"the scales of {gather.name}"
            kind += BLOCKS * (scales.form == "blocks")
            columns = [p.scales.right_operand(graph, p.right) for p in products if p.scales]
            biases, dtype = [p.added for p in products], value(products[0].node).dtype
            fused = made(graph, op, part, of_rows, rights, columns, *where, kind, biases, dtype, scales.fast)
        outputs = made(graph, operator.getitem, fused, 1 if scales is None else 2)
        for index, product in enumerate(products):
            _give_product(graph, product, made(graph, operator.getitem, outputs, index))
        if kept:
            whole = as_dtype(graph, made(graph, operator.getitem, fused, 0), value(full).dtype)
            full.replace_all_uses_with(viewed(graph, whole, shape_of(full)))
    return {gather: (_name(op), text), **fates}


def _name(op: Any) -> str:
    """Return the name of an operator, as reports have it."""
    name: str = op._schema.name
    return name


def _used_otherwise(full: Node, products: set[Node]) -> bool:
    """Return whether anything but these products needs the rows of a tensor."""
    return any(
        user not in products and (not (keeps_rows(user) or user.target in LAYOUTS) or _used_otherwise(user, products))
        for user in full.users
    )


def _give_product(graph: Graph, product: GatheredProduct, y: Node) -> None:
    """Let a product of several axes, or rows, take the place of a matmul and of views of it."""
    if product.added is not None and product.scales is None:
        if len(shape_of(product.added)) > 1:  # of rows, perhaps, where the product has several axes
            y = viewed(graph, y, shape_of(product.node))
        y = made(graph, aten.add.Tensor, y, product.added)
    for user in [*product.node.users]:
        if user.target in VIEWS and equal(shape_of(user), shape_of(y)):
            user.replace_all_uses_with(y)
    if product.node.users:
        product.node.replace_all_uses_with(viewed(graph, y, shape_of(product.node)))


# Reduce-scatters ------------------------------------------------------------------------------------------------------


def scattered(scatter: Node) -> tuple[Node, int]:
    """Return the tensor that is scattered, and the axis."""
    given: Any = scatter.args[0]
    if given.target is aten.clone.default:
        given = given.args[0]
    if given.target is not aten.cat.default or argument(given, 1, "dim", 0) != 0:
        return given, 0
    return parts_of(list(given.args[0]), argument(scatter, 2, "group_size")) or (given, 0)


def only_user(node: Node) -> None:
    """Raise LeftAlone if a tensor has more than one user."""
    if len(node.users) > 1:
        raise LeftAlone(
            f"{node.name} has {len(node.users)} users, and would have to be computed for the others as well"
        )


def products_before(node: Node, divided: bool) -> Iterator[Node]:
    """Yield the matmuls whose sum a tensor is; it may be `divided`, with a user for each part. Raises LeftAlone."""
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
    """Return whether the terms of a sum are tensors of its own shape."""
    return all(isinstance(term, Node) and equal(shape_of(term), shape_of(node)) for term in node.args)


def fuse_scatter(graph: Graph, scatter: Node) -> Fates:
    """Replace a reduce-scatter and the matmul before it. Raises LeftAlone."""
    wait = waited(scatter)
    given, axis = scattered(scatter)
    shape = shape_of(given)
    reduce_op = argument(scatter, 1, "reduce_op")
    if reduce_op not in ("sum", "avg"):
        raise LeftAlone(f"its sum is {reduce_op!r}")
    if len(shape) < 2:
        raise LeftAlone(f"it scatters a tensor of {len(shape)} axes")
    products, columns = [*products_before(given, divided=given is not scatter.args[0])], axis == len(shape) - 1
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
                if scales.form != "one":
                    of_left = viewed(graph, of_left, [*shape[:-1], *shape_of(of_left)[-1:]])
            operands = left, of_left, right, scales.right_operand(graph, right)
            fused = made(graph, op, *operands, *where, value(given).dtype, bias_of(products[0]), scales.fast)
        else:
            op = ops.matmul_reduce_scatter.default
            left, right = one_product(graph, products, shape[:-1] if moved else None)
            fused = made(graph, op, left, right, *where)
        _give_sum(graph, scatter, wait, fused)
    return {scatter: (_name(op), _amount(products))}


def one_scaled(products: list[Node]) -> tuple[Node, Node, ProductScales]:
    """Return the operands of the only product, of fp8, and their scales."""
    if len(products) > 1:
        raise LeftAlone(f"it is a sum of {len(products)} products, of which some are scaled")
    left, right, *_ = products[0].args
    check_dtype(left, right, fp8=True)  # type: ignore[arg-type]
    return left, right, scales_of(products[0])  # type: ignore[return-value]


def one_product(graph: Graph, products: list[Node], lead: list[Any] | None = None) -> tuple[Node, Node]:
    """Return what is multiplied for a sum of products: their operands, side by side; the left one with `lead` axes."""
    lefts, rights = zip(*(product.args for product in products), strict=True)
    check_dtype(*lefts, *rights)
    rows = [left if lead is None else _as_axes(graph, left, [*lead, shape_of(left)[-1]]) for left in lefts]
    if len(rows) == 1:
        return rows[0], rights[0]
    return made(graph, aten.cat.default, rows, -1), made(graph, aten.cat.default, [*rights], 0)


def _give_sum(graph: Graph, collective: Node, wait: Node, fused: Node) -> None:
    """Let a product that is summed over the ranks take the place of a collective."""
    result = viewed(graph, fused, shape_of(wait))
    for node in (wait, collective):  # the collective's own result is an output where it is saved for the backward graph
        node.replace_all_uses_with(result, lambda user: user is not wait)


def _amount(products: list[Node]) -> str:
    return "1 product" if len(products) == 1 else f"a sum of {len(products)} products, made one"


def _as_axes(graph: Graph, left: Node, shape: list[Any]) -> Node:
    """Return the rows of a matmul with all axes; the tensor that they are a view of, if it has them."""
    source = left.args[0] if left.target in VIEWS else None
    return source if isinstance(source, Node) and equal(shape_of(source), shape) else viewed(graph, left, shape)


# All-reduces ----------------------------------------------------------------------------------------------------------


def fuse_all_reduce(graph: Graph, reduce: Node) -> Fates:
    """Replace an all-reduce and the matmul before it. Raises LeftAlone."""
    wait, given, reduce_op = waited(reduce), reduce.args[0], argument(reduce, 1, "reduce_op")
    assert isinstance(given, Node)
    if reduce_op != "sum":
        raise LeftAlone(f"its sum is {reduce_op!r}")
    products = [*products_before(given, divided=False)]
    if scaled := [product for product in products if product.target in SCALED]:
        raise LeftAlone(f"{scaled[0].name} is a scaled matmul, and those are not summed on all ranks")
    op = ops.matmul_all_reduce.default
    with graph.inserting_before(wait):
        _give_sum(graph, reduce, wait, made(graph, op, *one_product(graph, products), group_of(reduce, 2)))
    return {reduce: (_name(op), _amount(products))}


# The pass -------------------------------------------------------------------------------------------------------------

FUSIONS: dict[Any, Callable[[Graph, Node], Fates]] = {
    GATHER: fuse_gather,
    SCATTER: fuse_scatter,
    ALL_REDUCE: fuse_all_reduce,
}


class OverlapPass(CustomGraphPass):
    """Replaces collectives and matmuls in a graph by operators of hostir; the report says which, and why not others.

    For `torch._inductor.config.post_grad_custom_post_pass`, or any graph of ATen operators with functional
    collectives, forward or backward. Inductor does not call the pass for a graph that it takes from its cache: the
    report lists the operators of such a graph when they run.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the report anew."""
        self.graphs, self._visits, self._calls = 0, list[Visited](), LEDGER.calls()

    @property
    def report(self) -> Overlaps:
        """The collectives of all graphs that the pass has seen, and the calls of fused operators."""
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
        for node in sorted(collectives, key=lambda node: value(node.args[0]).itemsize > 1):
            if node not in fates:  # scales follow the bytes that they are of
                fates |= self._fate(graph, node)
        visits = [self._visited(node, *fates[node]) for node in collectives]
        self._visits += visits
        if not any(visit.fused for visit in visits):
            return
        from torch._inductor.pattern_matcher import stable_topological_sort

        for node in graph.nodes:
            if node.target is aten.view.default:
                node.target = aten.reshape.default  # results of operators have other strides
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

    def _visited(self, node: Node, fused: str, why: str) -> Visited:
        packet = node.target._overloadpacket.__name__  # type: ignore[union-attr]
        group = str(node.args[-1] if isinstance(node.args[-1], str) else getattr(node.args[-1], "group_name", "?"))
        return Visited(self.graphs, node.name, packet, group, fused, why)


def _is_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not WAIT


def _is_impure(node: Node) -> bool:
    """Collectives without users are of no use; everything else is as torch says."""
    return node.is_impure() and not (node.target is WAIT or node.target in FUSIONS)


overlap_pass = OverlapPass()
