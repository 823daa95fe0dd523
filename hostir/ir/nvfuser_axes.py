"""Which logical axes the printed axes of each tensor make up: those with which its statements fit.

Where extents are numbers, a printed tensor may be read in several ways (`nvfuser_layout.readings`). A statement fits
some of them: a weight has two axes, an allreduce keeps the shape, a piece has the axes of the whole. Readings that some
statement leaves no room for are dropped until nothing changes. If several are left then, the first tensor that is
printed takes its likeliest, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hostir.ir import tensor_ops as ops
from hostir.ir.nvfuser_layout import Group, readings
from hostir.ir.nvfuser_settle import computed, maps_of
from hostir.ir.nvfuser_syntax import CommunicationNode, ComputeNode, Dump, LoopNode, Node, Tensor, ViewNode
from hostir.ir.types import STREAM, Axis, TensorType
from hostir.ir.values import Value

UNARY: dict[str, type[ops.Unary]] = {"relu": ops.Relu, "gelu": ops.Gelu, "silu": ops.Silu, "copy": ops.Copy}
BINARY: dict[str, type[ops.Binary]] = {"add": ops.Add, "mul": ops.Mul}
REDUCING = ("Allreduce", "ReduceScatter")
BETWEEN_RANKS = ("Allgather", *REDUCING, "AllToAll")


def operation(node: ComputeNode, out: Value, operands: Iterable[Value]) -> ops.TensorOp:
    """The statement of a computation other than a sum, whose axis has to be found first."""
    first, *rest = operands
    if node.op == "matmul":
        return ops.Matmul(out, first, rest[0])
    if node.op == "linear":
        return ops.Linear(out, first, *rest)
    if node.op in BINARY:
        return BINARY[node.op](out, first, rest[0])
    return ops.Cast(out, first, node.dtype) if node.op == "cast" else UNARY[node.op](out, first)


def _splits_devices(dump: Dump) -> bool:
    """Whether device axes come from splits.

    nvFuser either splits axes for streams and devices, and takes slices with ShardByStream or says nothing of them, or
    it has an axis of its own for each, and takes slices with a select.
    """
    views = [node for node in dump.walk() if isinstance(node, ViewNode)]
    cut = {(n.out if n.op == "chunk" else n.x).name for n in views if n.op in ("select", "chunk")}
    return any(d.on == "stream" for t in dump.tensors() if t.name not in cut for d in t.domains)


@dataclass(frozen=True)
class Reading:
    """One way to read a tensor: its logical axes, and those among them that were not summed away."""

    groups: tuple[Group, ...]
    axes: tuple[Group, ...]  # without those on devices that hold the parts of a partial sum
    kept: tuple[Group, ...]


@dataclass(frozen=True)
class Rule:
    """What a statement asks of the readings of its tensors."""

    tensors: tuple[Tensor, ...]
    fits: Callable[..., bool]


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
        if any(len(found) > 1 for found in self.left.values()):
            self._choose([*self._prints(), *self._rules(dump.body, looped=False)])

    def groups(self, tensor: Tensor) -> tuple[Group, ...]:
        """The logical axes of a printed tensor, those included that hold the parts of a partial sum."""
        return self.left[tensor][0].groups

    def _readings(self, tensor: Tensor) -> list[Reading]:
        parts, found = self.parts.get(tensor.name, ()), []
        for groups in readings(tensor, parts, split=self.split):
            axes = tuple(g for g in groups if g.reduced or not (g.device and (g.device in parts or g.first.rfactor)))
            found.append(Reading(groups, axes, tuple(g for g in axes if not g.reduced)))
        return found

    # Choosing ----------------------------------------------------------------------------------------------------
    def _choose(self, rules: Iterable[Rule]) -> None:
        """A rule that fits no readings at all stands for a mistake, which is told where the statement is read."""
        rules = [rule for rule in rules if _fitting(rule, self.left)]
        self.left = _pruned(self.left, rules) or self.left
        for tensor in self.left:
            found = self.left[tensor]
            trials = (_pruned({**self.left, tensor: [reading]}, rules) for reading in found)
            if len(found) > 1:
                self.left = next((left for left in trials if left), {**self.left, tensor: found[:1]})

    # Rules -------------------------------------------------------------------------------------------------------
    def _prints(self) -> Iterator[Rule]:
        """A tensor that is printed with an axis that was summed away, and elsewhere without, is one tensor."""
        first: dict[str, Tensor] = {}
        for tensor in self.left:
            if first.setdefault(tensor.name, tensor) is not tensor:
                yield Rule((first[tensor.name], tensor), lambda a, b: _alike(a.kept, b.kept))

    def _rules(self, body: Iterable[Node], *, looped: bool) -> Iterator[Rule]:
        for node in body:
            match node:
                case LoopNode():
                    yield from self._rules(node.body, looped=True)
                case ComputeNode(op="sum"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.axes))
                case ComputeNode(op="copy"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
                case ComputeNode():
                    yield _computation(node, looped=looped)
                case ViewNode(op="select"):
                    yield _selection(node)
                case ViewNode(op="chunk"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept, (STREAM,)))
                case ViewNode(op="as_partial"):
                    yield Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
                case ViewNode(op="permute"):
                    yield Rule(node.tensors, lambda x, out: len(x.kept) == len(out.kept))
                case CommunicationNode():
                    yield self._communication(node)

    def _communication(self, node: CommunicationNode) -> Rule:
        """A communication keeps the shape; along a team only what lies on its devices moves."""
        if node.type.text not in BETWEEN_RANKS:
            return Rule(node.tensors, lambda x, out: _alike(x.kept, out.kept))
        over = self.over(node)

        def fits(x: Reading, out: Reading) -> bool:
            rest = [g for g in x.groups if g.device != over and g in x.kept]
            if node.type.text in REDUCING:  # either x is a partial sum, or an input that holds summands side by side
                return len(rest) < len(x.groups) and _alike(rest, out.kept, (STREAM, over))
            return _alike(x.kept, out.kept, (STREAM, over))

        return Rule(node.tensors, fits)


def _computation(node: ComputeNode, *, looped: bool) -> Rule:
    """A computation brings axes together: those lie on the same devices, and what is sliced in a loop alike."""

    def fits(*read: Reading) -> bool:
        values = [
            Value(f"T{n}", TensorType(tensor.dtype, tuple(Axis.of(g.extent) for g in reading.kept)))
            for n, (tensor, reading) in enumerate(zip(node.tensors, read, strict=True))
        ]
        statement = operation(node, values[-1], values[:-1])
        maps = maps_of(statement)
        if [len(map) for map in maps] != [len(reading.kept) for reading in read[:-1]]:
            return False
        if {to for map in maps for to in map if to != ops.CONTRACTED} != set(range(len(read[-1].kept))):
            return False
        groups: dict[object, Sequence[Group]] = {v: reading.kept for v, reading in zip(values, read, strict=True)}
        sliced = {v: looped and any(d.on == STREAM for g in kept for d in g.domains) for v, kept in groups.items()}
        return all(
            _alike([groups[a][j]], [groups[b][k]], () if sliced[a] and sliced[b] else (STREAM,))
            for (_, a, j), (_, b, k) in computed(statement)
        )

    return Rule(node.tensors, fits)


def _selection(node: ViewNode) -> Rule:
    """A select takes one axis away, which is not split."""

    def fits(x: Reading, out: Reading) -> bool:
        rest = [g for g in x.kept if not (node.axis and [d.number for d in g.domains] == [node.axis.number])]
        return len(rest) == len(x.kept) - 1 and _alike(rest, out.kept)

    return Rule(node.tensors, fits)


def _alike(a: Sequence[Group], b: Sequence[Group], moving: Collection[str] | None = None) -> bool:
    """Whether these axes may have equal extents and, if given what is moving, lie on the same devices otherwise."""
    return len(a) == len(b) and all(
        (bool((ratio := one.extent / other.extent).symbols) or ratio.is_one)
        and (moving is None or _marks(one, moving) == _marks(other, moving))
        for one, other in zip(a, b, strict=True)
    )


def _marks(group: Group, without: Collection[str]) -> list[str]:
    return [d.on for d in group.domains if d.on and d.on not in without]


Readings = dict[Tensor, list[Reading]]


def _fitting(rule: Rule, left: Readings) -> list[dict[Tensor, Reading]]:
    """The readings of a rule's tensors that fit it together."""
    tensors = tuple(dict.fromkeys(rule.tensors))
    choices = (dict(zip(tensors, chosen, strict=True)) for chosen in product(*(left[t] for t in tensors)))
    return [choice for choice in choices if rule.fits(*(choice[t] for t in rule.tensors))]


def _pruned(left: Readings, rules: Sequence[Rule]) -> Readings | None:
    """The readings that every rule leaves room for; None where one leaves none."""
    left, changed = dict(left), True
    while changed:
        changed = False
        for rule in rules:
            fitting = _fitting(rule, left)
            if not fitting:
                return None
            for tensor in fitting[0]:
                room = [r for r in left[tensor] if any(choice[tensor] is r for choice in fitting)]
                changed = changed or len(room) < len(left[tensor])
                left[tensor] = room
    return left
