"""Choose the logical axes of each printed tensor so that all statements fit.

If extents are numbers, a printed tensor may have several readings (see `hostir.nvfuser.axes.readings`). A statement
fits only some of them: a weight has two axes, an allreduce keeps the shape, a piece has the axes of its tensor.
Readings that do not fit a statement are dropped until nothing changes. If several are left, the first printed tensor
takes its likeliest reading, then the next tensor, and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product as product_of

from hostir.ir import tensor_ops as ops
from hostir.ir.op import Value
from hostir.ir.sharding import CONTRACTED
from hostir.ir.types import STREAM, Axis, TensorType
from hostir.nvfuser.axes import LogicalAxis, readings
from hostir.nvfuser.equal_sizes import computed, maps_of
from hostir.nvfuser.nodes import CommunicationNode, ComputeNode, Dump, LoopNode, Node, TensorNode, ViewNode

UNARY: dict[str, type[ops.Unary]] = {"relu": ops.Relu, "gelu": ops.Gelu, "silu": ops.Silu, "copy": ops.DenseCopy}
BINARY: dict[str, type[ops.Binary]] = {"add": ops.Add, "mul": ops.Mul}
REDUCING = ("Allreduce", "ReduceScatter")
BETWEEN_RANKS = ("Allgather", *REDUCING, "AllToAll")


def operation(node: ComputeNode, out: Value, operands: Iterable[Value]) -> ops.TensorOp:
    """Return the statement of a computation. It must not be a sum, whose axis is not known yet."""
    first, *rest = operands
    if node.op == "matmul":
        return ops.Matmul(out, first, rest[0])
    if node.op == "linear":
        return ops.Linear(out, first, *rest)
    if node.op in BINARY:
        return BINARY[node.op](out, first, rest[0])
    return ops.Cast(out, first, node.dtype) if node.op == "cast" else UNARY[node.op](out, first)


def _splits_devices(dump: Dump) -> bool:
    """Return True if device axes come from splits.

    nvFuser either splits axes for streams and devices, and takes slices with ShardByStream or implicitly; or it has a
    separate axis for each, and takes slices with a select.
    """
    views = [node for node in dump.walk() if isinstance(node, ViewNode)]
    cut = {(n.out if n.op == "chunk" else n.x).name for n in views if n.op in ("select", "chunk")}
    return any(d.on == "stream" for t in dump.tensors() if t.name not in cut for d in t.domains)


@dataclass(frozen=True)
class Reading:
    """One reading of a tensor: its logical axes, and the axes that were not reduced."""

    groups: tuple[LogicalAxis, ...]
    axes: tuple[LogicalAxis, ...]  # without device axes that hold the parts of a partial sum
    kept: tuple[LogicalAxis, ...]

    @cached_property
    def sliced(self) -> bool:
        return any(d.on == STREAM for group in self.kept for d in group.domains)


Readings = dict[TensorNode, list[Reading]]
Chosen = dict[TensorNode, Reading]


@dataclass(frozen=True)
class Rule:
    """A constraint between the readings of two tensors."""

    tensors: tuple[TensorNode, ...]
    fits: Callable[[Reading, Reading], bool]

    def fitting(self, left: Readings) -> list[Chosen]:
        """Return the pairs of readings that fit each other."""
        a, b = self.tensors
        pairs = product_of(left[a], left[b]) if a != b else zip(left[a], left[a], strict=True)
        return [{a: one, b: other} for one, other in pairs if self.fits(one, other)]


@dataclass(frozen=True)
class Computation:
    """A constraint from a computation: matched axes have the same devices and the same slicing by loops."""

    node: ComputeNode
    looped: bool

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return self.node.tensors

    def fitting(self, left: Readings) -> list[Chosen]:
        """Return the choices of a reading for each tensor that fit each other."""
        tensors = tuple(dict.fromkeys(self.node.tensors))
        choices: list[Chosen] = []
        for ranks in product_of(*(dict.fromkeys(len(r.kept) for r in left[tensor]) for tensor in tensors)):
            rank = dict(zip(tensors, ranks, strict=True))
            meeting = self.meeting(rank)
            chosen: list[Chosen] = [{}] if meeting is not None else []
            for tensor in tensors:
                room = [reading for reading in left[tensor] if len(reading.kept) == rank[tensor]]
                pairs = [pair for pair in meeting or () if pair[0][0] == tensor or pair[1][0] == tensor]
                longer = ({**choice, tensor: reading} for choice in chosen for reading in room)
                chosen = [choice for choice in longer if all(self.meet(choice, *pair) for pair in pairs)]
            choices += chosen
        return choices

    def meeting(
        self, rank: Mapping[TensorNode, int]
    ) -> list[tuple[tuple[TensorNode, int], tuple[TensorNode, int]]] | None:
        """Return the matched pairs of axes for each tensor's number of axes; None if these numbers do not fit."""
        values = {
            Value(f"T{n}", TensorType(tensor.dtype, tuple(Axis.of(f"i{n}_{k}") for k in range(rank[tensor])))): tensor
            for n, tensor in enumerate(self.node.tensors)
        }
        *operands, out = values
        statement = operation(self.node, out, operands)
        maps = maps_of(statement)
        if [len(map) for map in maps] != [len(value.tensor.axes) for value in operands]:
            return None
        if {to for map in maps for to in map if to != CONTRACTED} != set(range(len(out.tensor.axes))):
            return None
        of: dict[object, TensorNode] = dict(list(values.items()))
        return [((of[a], j), (of[b], k)) for (_, a, j), (_, b, k) in computed(statement)]

    def meet(self, chosen: Chosen, a: tuple[TensorNode, int], b: tuple[TensorNode, int]) -> bool:
        if a[0] not in chosen or b[0] not in chosen:
            return True
        one, other = chosen[a[0]], chosen[b[0]]
        if self.node.op in BINARY and one.kept[a[1]].extent.is_one:
            return True
        moving = () if self.looped and one.sliced and other.sliced else (STREAM,)
        return _alike([one.kept[a[1]]], [other.kept[b[1]]], moving)


class Axes:
    """Chooses a reading for each tensor of a dump.

    Args:
        dump: the dump.
        parts: by the name of a tensor, the device axes, x or y, that hold the parts of a partial sum.
        over: the device axis along which the team of a communication lies.
    """

    def __init__(
        self, dump: Dump, parts: Mapping[str, Collection[str]], over: Callable[[CommunicationNode], str]
    ) -> None:
        self.parts = parts
        self.over = over
        self.split = _splits_devices(dump)
        self.left = {tensor: self._readings(tensor) for tensor in (*dump.tensors(), *dump.outputs)}
        if any(len(possible) > 1 for possible in self.left.values()):
            self._choose([*self._prints(), *self._rules(dump.body, looped=False)])

    def groups(self, tensor: TensorNode) -> tuple[LogicalAxis, ...]:
        """Return the logical axes of a printed tensor, including those that hold the parts of a partial sum."""
        return self.left[tensor][0].groups

    def _readings(self, tensor: TensorNode) -> list[Reading]:
        parts, possible = self.parts.get(tensor.name, ()), []
        for groups in readings(tensor, parts, split=self.split):
            axes = tuple(g for g in groups if g.reduced or not (g.device and (g.device in parts or g.first.rfactor)))
            possible.append(Reading(groups, axes, tuple(g for g in axes if not g.reduced)))
        return possible

    def _choose(self, rules: Iterable[Rule | Computation]) -> None:
        """Choose readings that all rules allow.

        A rule without fitting readings is an error, reported when it is read.
        """
        rules = [rule for rule in rules if rule.fitting(self.left)]
        self.left = _pruned(self.left, rules, self.left) or self.left
        for tensor in self.left:
            chosen = self.left[tensor]
            trials = (_pruned({**self.left, tensor: [reading]}, rules, [tensor]) for reading in chosen)
            if len(chosen) > 1:
                self.left = next((left for left in trials if left), {**self.left, tensor: chosen[:1]})

    def _prints(self) -> Iterator[Rule]:
        """Yield rules for tensors that are printed several times, with and without a reduced axis."""
        first: dict[str, TensorNode] = {}
        for tensor in self.left:
            if first.setdefault(tensor.name, tensor) is not tensor:
                yield Rule((first[tensor.name], tensor), lambda a, b: _alike(a.kept, b.kept))

    def _rules(self, body: Iterable[Node], *, looped: bool) -> Iterator[Rule | Computation]:
        for node in body:
            match node:
                case LoopNode():
                    yield from self._rules(node.body, looped=True)
                case ComputeNode(op="sum"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.axes))
                case ComputeNode(op="copy"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
                case ComputeNode():
                    yield Computation(node, looped)
                case ViewNode(op="select"):
                    yield _selection(node)
                case ViewNode(op="chunk"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept, (STREAM,)))
                case ViewNode(op="as_partial" | "dense"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
                case ViewNode(op="permute"):
                    yield Rule(node.tensors, lambda x, out: len(x.kept) == len(out.kept))
                case CommunicationNode():
                    yield self._communication(node)

    def _communication(self, node: CommunicationNode) -> Rule:
        """Return the rule of a communication: it keeps the shape, and moves only axes over its team's devices."""
        if node.type.text not in BETWEEN_RANKS:
            return Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
        over = self.over(node)

        def fits(x: Reading, out: Reading) -> bool:
            rest = [g for g in x.groups if g.device != over and g in x.kept]
            if node.type.text in REDUCING:  # either x is a partial sum, or an input that holds summands side by side
                return len(rest) < len(x.groups) and _alike(rest, out.kept, (STREAM, over))
            return _alike(x.kept, out.kept, (STREAM, over))

        return Rule(node.tensors, fits)


def _selection(node: ViewNode) -> Rule:
    """Return the rule of a select: it removes one axis, which is not split."""

    def fits(x: Reading, out: Reading) -> bool:
        rest = [g for g in x.kept if not (node.axis and [d.number for d in g.domains] == [node.axis.number])]
        return len(rest) == len(x.kept) - 1 and _alike(rest, out.kept)

    return Rule(node.tensors, fits)


def _alike(a: Sequence[LogicalAxis], b: Sequence[LogicalAxis], moving: Collection[str] | None = None) -> bool:
    """Return True if axes may have equal extents and, given `moving`, lie on the same devices apart from those."""
    return len(a) == len(b) and all(
        (bool((ratio := one.extent / other.extent).symbols) or ratio.is_one)
        and (moving is None or _marks(one, moving) == _marks(other, moving))
        for one, other in zip(a, b, strict=True)
    )


def _marks(group: LogicalAxis, without: Collection[str]) -> list[str]:
    return [d.on for d in group.domains if d.on and d.on not in without]


def _pruned(left: Readings, rules: Sequence[Rule | Computation], changed: Collection[TensorNode]) -> Readings | None:
    """Return the readings that all rules leave after some tensors' readings changed.

    None if a tensor has no reading.
    """
    left, of = dict(left), defaultdict(list)
    for n, rule in enumerate(rules):
        for tensor in dict.fromkeys(rule.tensors):
            of[tensor].append(n)
    todo = dict.fromkeys(n for tensor in changed for n in of[tensor])
    while todo:
        rule = rules[next(iter(todo))]
        del todo[next(iter(todo))]
        fitting = rule.fitting(left)
        if not fitting:
            return None
        for tensor in fitting[0]:
            room = [r for r in left[tensor] if any(choice[tensor] is r for choice in fitting)]
            if len(room) < len(left[tensor]):
                left[tensor] = room
                todo |= dict.fromkeys(of[tensor])
    return left
