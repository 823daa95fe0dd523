"""Functions that read and edit the nodes of an FX graph: fake tensors, sizes, views, and parts of tensors.

A node's fake tensor is `node.meta["val"]`: it has a shape and a dtype, but no data.
"""

from __future__ import annotations

import contextlib
import operator
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.detach.default, aten.alias.default)
SPLITS = (aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default)
AS_DTYPE = aten.view.dtype
LAYOUTS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.clone.default)  # change order or strides


def value(node: Node) -> Tensor:
    """Return the fake tensor of a node."""
    return node.meta["val"]


def shape_of(node: Node) -> list[Any]:
    """Return the sizes of a node's tensor."""
    return [*value(node).shape]


def insert(graph: Graph, target: Any, *args: Any) -> Node:
    """Insert a node that calls `target`, and compute its fake tensor."""
    from torch._guards import detect_fake_mode

    node = graph.call_function(target, args)
    values = torch.fx.map_arg(args, lambda each: each.meta["val"])
    with detect_fake_mode(torch.utils._pytree.tree_leaves(values)) or contextlib.nullcontext():
        node.meta["val"] = target(*values)
    return node


def viewed(graph: Graph, node: Node, shape: list[Any]) -> Node:
    """Return a node that reshapes `node` to `shape`; `node` itself if it has this shape already."""
    if equal(shape_of(node), shape):
        return node
    sizes = [size if isinstance(size, int) else size_node(graph, node, size) for size in shape]
    return insert(graph, aten.reshape.default, node, sizes)


def size_node(graph: Graph, node: Node, size: Any) -> Any:
    """Return the graph's node that computes the symbolic `size`; -1 if there is no such node."""
    for each in graph.nodes:
        known = each.meta.get("val")
        if isinstance(known, torch.SymInt) and known.node.expr == size.node.expr:
            return each
    return -1


def lift_sizes(graph: Graph) -> None:
    """Compute sizes of intermediate tensors from sizes of the graph's inputs where possible.

    The intermediate tensors then have fewer users. So the pass can fuse more of the operators that compute them.
    """
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
    """Return the value of `expr` as an integer or a node; None if it cannot be computed from sizes of inputs.

    Args:
        graph: the graph that new nodes are inserted in.
        expr: a sympy expression of symbolic sizes.
        sources: for each symbol, an input of the graph and an axis. With the axis None, the input is the size.
            Otherwise the input is a tensor that has this size on the axis.
    """
    if expr.is_Integer:
        return int(expr)
    if expr in sources:
        node, axis = sources[expr]
        return node if axis is None else insert(graph, aten.sym_size.int, node, axis)
    op = operator.add if expr.is_Add else operator.mul if expr.is_Mul else operator.floordiv
    if not (expr.is_Add or expr.is_Mul or isinstance(expr, FloorDiv)):
        return None
    terms = [_size_from(graph, term, sources) for term in expr.args]
    return None if None in terms else reduce(partial(insert, graph, op), terms)


def depends(node: Node, on: Node) -> bool:
    """Return True if `node` is `on`, or uses the result of `on` directly or through other nodes."""
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
    """Return True if two sizes, or two lists of sizes, are known to be equal. Adds no guard on symbolic sizes."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return statically_known_true(one == other)


def keeps_rows(node: Node) -> bool:
    """Return True if `node` has the same rows as its first operand, in the same order. Rows lie along the last axis."""
    if node.target in VIEWS:
        return equal(shape_of(node.args[0])[-1:], shape_of(node)[-1:])  # type: ignore[arg-type]
    if node.target is aten.slice.Tensor:  # DTensor cuts off the padding of uneven parts
        return equal(shape_of(node.args[0]), shape_of(node))  # type: ignore[arg-type]
    return keeps_bytes(node)


def keeps_bytes(node: Node) -> bool:
    """Return True if `node` views the bytes of its operand in the same shape, with the same dtype or another dtype.

    Graphs contain such views because `cat` and some collectives do not support fp8, so they get fp8 tensors as bytes.
    """
    if node.target is AS_DTYPE:
        return value(node.args[0]).itemsize == value(node).itemsize  # type: ignore[arg-type]
    return node.target in VIEWS and equal(shape_of(node.args[0]), shape_of(node))  # type: ignore[arg-type]


def without_views(node: Any) -> Any:
    """Return the node that `node` views in the same shape, through any number of views. Views may change the dtype."""
    while isinstance(node, Node) and keeps_bytes(node):
        node = node.args[0]
    return node


def without_layout(node: Node) -> Node:
    """Follow copies and transposes back from `node`; return the earliest node with the same elements and axes."""
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
    """Return True if `size`, the size of an axis, is known to be 1."""
    return isinstance(size, int) and size == 1


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """Return the argument of a call that was passed at position `index` or as `name`; otherwise `default`."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def group_of(node: Node, index: int) -> str:
    """Return the name of a collective's process group. `index` is the position of the argument `group_name`."""
    group = argument(node, index, "group_name")
    return group if isinstance(group, str) else group.group_name


def parts_of(pieces: list[Any], ranks: int) -> tuple[Node, int] | None:
    """Return the tensor that was split into `pieces`, and the axis along which it was split.

    Returns None unless `pieces` are all parts, in order, of one tensor that was split into `ranks` equal parts.
    """
    sources = {(each.target, each.args[0]) for each in pieces if isinstance(each, Node) and each.op == "call_function"}
    if len(sources) != 1 or len(pieces) != ranks:
        return None
    ((target, source),) = sources
    if target is operator.getitem and isinstance(source, Node) and source.target in SPLITS:
        if [each.args[1] for each in pieces] != [*range(len(source.meta["val"]))]:
            return None
        tensor: Any = source.args[0]
        axis = argument(source, 2, "dim", 0)
    elif target is aten.slice.Tensor and isinstance(source, Node):
        axes = {argument(each, 1, "dim", 0) for each in pieces}
        if len(axes) != 1 or any(len(each.args) > 4 for each in pieces):
            return None
        tensor, axis = source, axes.pop()
        starts = [argument(each, 2, "start", 0) for each in pieces]
        starts = [start.meta["val"] if isinstance(start, Node) else start for start in starts]
        length = shape_of(pieces[0])[axis]
        if not equal(starts, [i * length for i in range(len(pieces))]):
            return None
    else:
        return None
    axis %= len(shape_of(tensor))
    lengths = [shape_of(each)[axis] for each in pieces]
    same = equal(lengths, lengths[:1] * len(lengths)) and equal(lengths[0] * len(lengths), shape_of(tensor)[axis])
    return (tensor, axis) if same else None
