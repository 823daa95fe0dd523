"""Choose the reading of each printed tensor so that all statements of a dump are valid.

A reading of a printed tensor assigns each printed axis to a logical axis. If extents are numbers, there may be several
readings (see `hostir.nvfuser.axes.readings`). A statement allows only some of them. For example, a weight has two axes,
an allreduce keeps the shape, and a slice has the same axes as its tensor.

Readings that a statement does not allow are dropped until nothing changes. Then each tensor that still has several
readings takes its likeliest reading, in the order in which tensors are printed. After each of these choices, readings
that are no longer allowed are dropped.
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
    """Return the statement for a printed computation. A sum is not supported, because it also needs an axis."""
    first, *rest = operands
    if node.op == "matmul":
        return ops.Matmul(out, first, rest[0])
    if node.op == "linear":
        return ops.Linear(out, first, *rest)
    if node.op in BINARY:
        return BINARY[node.op](out, first, rest[0])
    return ops.Cast(out, first, node.dtype) if node.op == "cast" else UNARY[node.op](out, first)


def _splits_devices(dump: Dump) -> bool:
    """Return True if the device axes of a dump come from splits of logical axes.

    nvFuser writes dumps in two ways. In the first way, it splits logical axes for streams and devices. It then takes
    slices with ShardByStream, or without printing a statement. In the second way, streams and devices have separate
    logical axes. It then takes slices with a select.
    """
    views = [node for node in dump.walk() if isinstance(node, ViewNode)]
    cut = {(n.out if n.op == "chunk" else n.x).name for n in views if n.op in ("select", "chunk")}
    return any(d.on == "stream" for t in dump.tensors() if t.name not in cut for d in t.domains)


@dataclass(frozen=True)
class Reading:
    """One way to read the printed axes of a tensor as logical axes.

    Fields:
        groups: all logical axes.
        axes: `groups` without the device axes that hold the terms of a partial sum.
        kept: `axes` without the axes that a reduction has removed.
    """

    groups: tuple[LogicalAxis, ...]
    axes: tuple[LogicalAxis, ...]
    kept: tuple[LogicalAxis, ...]

    @cached_property
    def sliced(self) -> bool:
        return any(d.on == STREAM for group in self.kept for d in group.domains)


Readings = dict[TensorNode, list[Reading]]
Chosen = dict[TensorNode, Reading]


@dataclass(frozen=True)
class Rule:
    """A constraint on the readings of two tensors. `fits` returns True for a possible pair of readings."""

    tensors: tuple[TensorNode, ...]
    fits: Callable[[Reading, Reading], bool]

    def fitting(self, left: Readings) -> list[Chosen]:
        """Return the possible pairs of readings of the two tensors.

        `left` holds the remaining readings of each tensor.
        """
        a, b = self.tensors
        pairs = product_of(left[a], left[b]) if a != b else zip(left[a], left[a], strict=True)
        return [{a: one, b: other} for one, other in pairs if self.fits(one, other)]


@dataclass(frozen=True)
class Computation:
    """A constraint on the readings of the tensors of a computation.

    A computation matches axes of its operands with axes of its result. Matched axes must lie on the same devices.
    Suppose that the computation is in a loop, and that both tensors with matched axes are sliced for streams. Then the
    matched axes must also be sliced in the same way.

    Fields:
        node: the printed computation.
        looped: True if the computation is inside a loop.
    """

    node: ComputeNode
    looped: bool

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return self.node.tensors

    def fitting(self, left: Readings) -> list[Chosen]:
        """Return the possible combinations of readings, one reading for each tensor of the computation.

        `left` holds the remaining readings of each tensor.
        """
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
        """Return the pairs of axes that the computation matches. An axis is given as its tensor and its index.

        Return None if the computation is invalid for tensors with these numbers of axes.

        Args:
            rank: the number of axes of each tensor.
        """
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
    """Chooses a reading for each printed tensor of a dump.

    Args:
        dump: the dump.
        parts: a map from the name of each partial sum to the device axes, x or y, that hold its terms.
        over: returns the device axis, x or y, along which the team of a communication lies.
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
        """Return the logical axes of a printed tensor, including device axes that hold the terms of a partial sum."""
        return self.left[tensor][0].groups

    def _readings(self, tensor: TensorNode) -> list[Reading]:
        parts, possible = self.parts.get(tensor.name, ()), []
        for groups in readings(tensor, parts, split=self.split):
            axes = tuple(g for g in groups if g.reduced or not (g.device and (g.device in parts or g.first.rfactor)))
            possible.append(Reading(groups, axes, tuple(g for g in axes if not g.reduced)))
        return possible

    def _choose(self, rules: Iterable[Rule | Computation]) -> None:
        """Choose one reading for each tensor so that all rules allow the choice.

        If a rule allows no combination of readings, the rule is ignored here. Then its statement is invalid, and
        `DumpReader` reports this.
        """
        rules = [rule for rule in rules if rule.fitting(self.left)]
        self.left = _pruned(self.left, rules, self.left) or self.left
        for tensor in self.left:
            chosen = self.left[tensor]
            trials = (_pruned({**self.left, tensor: [reading]}, rules, [tensor]) for reading in chosen)
            if len(chosen) > 1:
                self.left = next((left for left in trials if left), {**self.left, tensor: chosen[:1]})

    def _prints(self) -> Iterator[Rule]:
        """Yield rules for tensors that the dump prints in several forms: with a reduced axis, and without it.

        The readings of all forms of a tensor must have the same axes, except for the reduced axis.
        """
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
        """Return the rule of a communication: operand and result have the same shape.

        In a collective, operand and result also have the same sharding, except over the devices of the collective's
        team.
        """
        if node.type.text not in BETWEEN_RANKS:
            return Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
        over = self.over(node)

        def fits(x: Reading, out: Reading) -> bool:
            rest = [g for g in x.groups if g.device != over and g in x.kept]
            if node.type.text in REDUCING:  # x is a partial sum, or an input that holds the addends along a device axis
                return len(rest) < len(x.groups) and _alike(rest, out.kept, (STREAM, over))
            return _alike(x.kept, out.kept, (STREAM, over))

        return Rule(node.tensors, fits)


def _selection(node: ViewNode) -> Rule:
    """Return the rule of a select: the result lacks exactly one axis of the operand, and this axis is not split."""

    def fits(x: Reading, out: Reading) -> bool:
        rest = [g for g in x.kept if not (node.axis and [d.number for d in g.domains] == [node.axis.number])]
        return len(rest) == len(x.kept) - 1 and _alike(rest, out.kept)

    return Rule(node.tensors, fits)


def _alike(a: Sequence[LogicalAxis], b: Sequence[LogicalAxis], moving: Collection[str] | None = None) -> bool:
    """Return True if the axes of two tensors may be the same axes.

    Corresponding axes must have extents that may be equal, and must lie on the same devices and streams.

    Args:
        a, b: the axes of the two tensors.
        moving: the devices and streams in which corresponding axes may differ. If it is None, only extents count.
    """
    return len(a) == len(b) and all(
        (bool((ratio := one.extent / other.extent).symbols) or ratio.is_one)
        and (moving is None or _marks(one, moving) == _marks(other, moving))
        for one, other in zip(a, b, strict=True)
    )


def _marks(group: LogicalAxis, without: Collection[str]) -> list[str]:
    return [d.on for d in group.domains if d.on and d.on not in without]


def _pruned(left: Readings, rules: Sequence[Rule | Computation], changed: Collection[TensorNode]) -> Readings | None:
    """Drop readings that a rule does not allow, until nothing changes; return the remaining readings of each tensor.

    Return None if a rule allows no combination of readings.

    Args:
        left: the readings of each tensor.
        rules: the rules.
        changed: the tensors whose readings have changed since the rules were last applied. The rules of these tensors
            are applied first.
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
