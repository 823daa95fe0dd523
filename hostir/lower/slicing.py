"""Which statements a Stream axis slices, and where the slice lies in each of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hostir.ir import Program, Statement, TensorType, Value
from hostir.ir.comm_ops import Communication
from hostir.ir.layout import is_multiple, refine
from hostir.ir.op import Codec
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.source import HostIRError, error
from hostir.ir.tensor_ops import Binary, Linear, Matmul, TensorOp
from hostir.ir.types import STREAM, Axis
from hostir.ir.view_ops import Permute, Reshape, Shard
from hostir.lower.sharding import result_of, stream_place


@dataclass(frozen=True)
class Place:
    """Where a slice lies in a tensor: `count` pieces of an axis, with `outer` blocks outside them.

    A slice of one element loses the axis, unless it is to `keep` it.
    """

    axis: int
    outer: Size
    count: Size
    keep: bool = False

    def whole(self, type: TensorType) -> bool:
        """Whether the pieces are the elements of an axis on no mesh axis, so that a slice has one axis less."""
        axis = type.host().axes[self.axis]
        return axis.extent == self.count and not axis.marks and not self.keep

    def cut(self, type: TensorType) -> Axis | None:
        """The axis as a slice has it, or None where the pieces cut across ranks."""
        parts = refine(type.host().axes[self.axis], self.outer, self.count, type.mesh)
        return None if parts is None else Axis((*parts[0], *parts[1])).normal()

    def slice(self, type: TensorType) -> TensorType:
        """The type of one slice."""
        host = type.host()
        if self.whole(type):
            return host.with_axes(a for i, a in enumerate(host.axes) if i != self.axis)
        cut = self.cut(type)
        assert cut is not None
        return host.with_axes(cut if i == self.axis else a for i, a in enumerate(host.axes))

    def blocks_outside(self, type: TensorType) -> Size:
        """How many blocks of one rank's part lie outside the pieces, within their axis."""
        cut = refine(type.host().axes[self.axis], self.outer, self.count, type.mesh)
        assert cut is not None
        return product([type.local_factor(f) for f in cut[0]])


@dataclass
class Group:
    """Statements that one loop runs slice by slice, and the place of the slice in every tensor that is sliced."""

    statements: list[Statement] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    # By the result of each communication next to the loop: why it has to stay out.
    left_out: dict[str, HostIRError] = field(default_factory=dict)

    @property
    def count(self) -> Size:
        return next(iter(self.places.values())).count

    @property
    def communicates(self) -> bool:
        return any(isinstance(s, Communication) for s in self.statements)


def annotated(program: Program) -> Iterator[tuple[Statement | None, Value, Place]]:
    """Every tensor with a Stream part, and the statement that defines it (None for an input)."""
    for s, value in [*((None, v) for v in program.inputs), *((s, result_of(s)) for s in program.body)]:
        found = [(k, stream_place(a)) for k, a in enumerate(value.tensor.axes)]
        places = [Place(k, *p) for k, p in found if p]
        if len(places) > 1 or sum(f.on == STREAM for a in value.tensor.axes for f in a.factors) > 1:
            raise error(f"{value} has two Stream axes", s.span if s else value.span, expected="one axis to slice")
        if places:
            yield s, value, places[0]


def operand_places(s: Statement, place: Place) -> dict[str, Place]:
    """From the place of a slice in the result to its places in the operands; operands used whole are left out."""
    if isinstance(s, Communication):
        return {s.x.name: place}
    if isinstance(s, TensorOp):
        at = Place(0, place.outer, place.count)
        pairs = zip(s.operands, s.maps(), strict=True)
        return {v.name: replace(at, axis=k) for v, map in pairs for k, to in enumerate(map) if to == place.axis}
    if isinstance(s, Permute):
        return {s.x.name: Place(s.axes[place.axis], place.outer, place.count)}
    if isinstance(s, Reshape):
        moved = _through_reshape(s.out.tensor, s.x.tensor, place)
        return {s.x.name: moved} if moved else {}
    assert isinstance(s, Shard)
    return {s.x.name: place}


def result_place(s: Statement, operand: Value, place: Place) -> Place | None:
    """From the place of a slice in an operand to its place in the result, or None where it has none."""
    if isinstance(s, (Communication, Shard)):
        return place
    if isinstance(s, TensorOp):
        for value, map in zip(s.operands, s.maps(), strict=True):
            if value.name == operand.name and map[place.axis] >= 0:
                return Place(map[place.axis], place.outer, place.count)
        return None
    if isinstance(s, Permute):
        return Place(s.axes.index(place.axis), place.outer, place.count)
    assert isinstance(s, Reshape)
    return _through_reshape(s.x.tensor, s.out.tensor, place)


def _through_reshape(old: TensorType, new: TensorType, place: Place) -> Place | None:
    """The place at the same position of the flattened tensor."""
    position = product(old.shape[: place.axis]) * place.outer
    before = ONE
    for k, extent in enumerate(new.shape):
        outer = position / before
        if outer.whole and is_multiple(extent, outer * place.count) and not extent.is_one:
            return Place(k, outer, place.count)
        before = before * extent
    return None


def why_not(s: Statement, place: Place, places: dict[str, Place]) -> str | None:
    """Why a statement cannot run slice by slice, or None."""
    named = {v.name: v for v in [*s.values(Codec.READ, Codec.ALIAS), result_of(s)]}
    for name, at in [(result_of(s).name, place), *places.items()]:
        type = named[name].tensor
        if not at.whole(type) and at.cut(type) is None:
            return (
                f"a slice of {named[name]} cuts across ranks: {type.host().axes[at.axis]} in {at.count} pieces with "
                f"{at.outer} outside"
            )
    if isinstance(s, TensorOp):
        axes = [
            (v.name, map.index(place.axis) if place.axis in map else None)
            for v, map in zip(s.operands, s.maps(), strict=True)
        ]
        if twice := next((n for n, axis in axes for m, other in axes if n == m and axis != other), None):
            return f"it uses %{twice} in two ways, and a slice of it serves only one"
    if isinstance(s, Reshape) and not places:
        return f"the slice has no place in {s.x} before the reshape"
    return None


def _refusal(s: Statement, reason: str) -> HostIRError:
    hint = (
        "put the Stream part inside the sharded one: in Python t.split(0, ranks), t.split(1, S), and Stream on axis 1; "
        "in a text as in '(4@didx 2@stream 8)'"
    )
    return s.fail(f"the pipeline cannot slice {s.keyword()}: {reason}", hint=hint)


def groups(program: Program) -> list[Group]:
    """The loops that the Stream axes ask for, each from its annotated tensor to all that can be sliced with it."""
    producer = {result_of(s).name: s for s in program.body}
    taken: set[int] = set()
    made: list[Group] = []
    for s, value, place in annotated(program):
        if any(value.name in g.places for g in made):
            continue
        group = Group()
        if s is not None:
            _backward(s, place, group, producer, taken, required=True)
        else:
            group.places[value.name] = place
        _forward(program, group, taken, seed=value)
        _untangle(program, group)
        if any(_needs_axis(s, group.places[result_of(s).name]) for s in group.statements):
            group.places = {name: replace(at, keep=True) for name, at in group.places.items()}
        order = {id(x): n for n, x in enumerate(program.body)}
        group.statements.sort(key=lambda x: order[id(x)])
        made.append(group)
    return made


def _needs_axis(s: Statement, place: Place) -> bool:
    """Whether a statement needs the axis that is sliced: the columns of a matrix, or what aligns other operands."""
    if isinstance(s, (Matmul, Linear)):
        return place.axis == len(s.out.tensor.axes) - 1
    return isinstance(s, Binary) and any(
        place.axis not in map and len(map) > len(s.out.tensor.axes) - 1 - place.axis for map in s.maps()
    )


def _backward(
    s: Statement, place: Place, group: Group, producer: dict[str, Statement], taken: set[int], *, required: bool
) -> bool:
    """Adds a statement and, where they can be sliced too, those that make its operands."""
    known = group.places.get(result_of(s).name)
    if known is not None or id(s) in taken:
        return known == place
    places = operand_places(s, place)
    if reason := why_not(s, place, places):
        refusal = _refusal(s, reason)
        if required:
            raise refusal
        group.left_out |= {s.out.name: refusal} if isinstance(s, Communication) else {}
        return False
    if any(group.places.get(n, p) != p for n, p in places.items()):
        return False
    taken.add(id(s))
    group.statements.append(s)
    group.places[result_of(s).name] = place
    for name, at in places.items():
        made_by = producer.get(name)
        if made_by is None or not _backward(made_by, at, group, producer, taken, required=False):
            group.places.setdefault(name, at)
    return True


def _forward(program: Program, group: Group, taken: set[int], seed: Value) -> None:
    """Adds the statements that use what the loop makes, where they can be sliced and nothing outside stands between."""
    outside: set[str] = set()  # made outside the loop from what the loop makes: not there until it has ended
    inside = {result_of(s).name for s in group.statements}
    for s in program.body:
        reads = [*s.values(Codec.READ, Codec.ALIAS)]
        name = result_of(s).name
        if name in inside:
            continue
        if any(v.name in outside for v in reads):
            outside.add(name)
            continue
        sliced = [v for v in reads if v.name in inside or (v.name == seed.name and not inside)]
        if not sliced:
            continue
        place = result_place(s, sliced[0], group.places[sliced[0].name])
        if place is None or id(s) in taken or not _joins(s, place, group, taken):
            if place is None and sliced[0].name == seed.name and not group.statements:
                raise s.fail(
                    f"the pipeline cannot slice {s.keyword()}: the Stream axis of {seed} is the one it sums over",
                    hint="put Stream on an axis that the result keeps",
                )
            outside.add(name)
            continue
        inside.add(name)


def _untangle(program: Program, group: Group) -> None:
    """Takes out of a loop what must be whole before the rest of it: what a statement inside uses whole, and what one
    outside needs that the loop needs in turn.
    """
    while True:
        inside = {result_of(s).name for s in group.statements}
        whole = {
            v.name
            for s in group.statements
            for v in s.values(Codec.READ, Codec.ALIAS)
            if v.name in inside and v.name not in operand_places(s, group.places[result_of(s).name])
        }
        feeds: dict[str, set[str]] = {}  # for each value made outside: what it needs of the loop
        early = set(whole)
        for s in program.body:
            name, reads = result_of(s).name, [v.name for v in s.values(Codec.READ, Codec.ALIAS)]
            if name in inside:
                early |= {need for r in reads for need in feeds.get(r, ())}
            else:
                feeds[name] = {n for r in reads for n in ({r} if r in inside else feeds.get(r, set()))}
        if not early:
            return
        group.statements = [s for s in group.statements if result_of(s).name not in early]


def _joins(s: Statement, place: Place, group: Group, taken: set[int]) -> bool:
    places = operand_places(s, place)
    if reason := why_not(s, place, places):
        group.left_out |= {s.out.name: _refusal(s, reason)} if isinstance(s, Communication) else {}
        return False
    if any(group.places.get(n, p) != p for n, p in places.items()):
        return False
    group.statements.append(s)
    taken.add(id(s))
    group.places[result_of(s).name] = place
    for name, at in places.items():
        group.places.setdefault(name, at)
    return True
