"""Group the statements that a loop can run slice by slice along an axis; for `pipeline` and `ring`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hostir.ir.comm_ops import Communication
from hostir.ir.op import Statement, Value
from hostir.ir.sharding import is_multiple, refine
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import TensorOp
from hostir.ir.types import Axis, TensorType
from hostir.ir.view_ops import Permute, Reshape, Shard
from hostir.lower.propagate import operands_of, result_of


@dataclass(frozen=True)
class SlicePlace:
    """The place of `count` slices in a tensor. The axis at position `axis` is seen as `[outer, count, inner]`.

    If each slice is one element of the axis, a slice does not have this axis, unless `keep` is True.
    """

    axis: int
    outer: Size
    count: Size
    keep: bool = False

    def drops_axis(self, type: TensorType) -> bool:
        """Return True if a slice of a tensor of this type does not have the sliced axis.

        This is true if `keep` is False, the axis is not sharded, and each slice is one element of the axis.
        """
        axis = type.host().axes[self.axis]
        return axis.extent == self.count and not axis.marks and not self.keep

    def cut(self, type: TensorType) -> Axis | None:
        """Return the sliced axis as it is in one slice; None if a slice would span several ranks."""
        parts = refine(type.host().axes[self.axis], self.outer, self.count, type.mesh)
        return None if parts is None else Axis((*parts[0], *parts[1])).normal()

    def slice(self, type: TensorType) -> TensorType:
        """Return the type of one slice."""
        host = type.host()
        if self.drops_axis(type):
            return host.with_axes(a for i, a in enumerate(host.axes) if i != self.axis)
        cut = self.cut(type)
        assert cut is not None
        return host.with_axes(cut if i == self.axis else a for i, a in enumerate(host.axes))

    def blocks_outside(self, type: TensorType) -> Size:
        """Return the number of `outer` blocks in one rank's part of the axis.

        If there is only one block, a rank's part of a slice is contiguous in the axis.
        """
        cut = refine(type.host().axes[self.axis], self.outer, self.count, type.mesh)
        assert cut is not None
        return product([type.local_factor(f) for f in cut[0]])


@dataclass
class SlicedGroup:
    """Statements that one loop runs slice by slice.

    `places` maps the name of each sliced tensor to the place of its slices.
    """

    statements: list[Statement] = field(default_factory=list)
    places: dict[str, SlicePlace] = field(default_factory=dict)
    # By the name of a communication's result: the reason why the communication stays outside the loop.
    left_out: dict[str, HostIRError] = field(default_factory=dict)

    @property
    def count(self) -> Size:
        return next(iter(self.places.values())).count

    def conflicts(self, places: dict[str, SlicePlace]) -> bool:
        """Return True if the group already slices one of these tensors, but at another place."""
        return any(self.places.get(name, at) != at for name, at in places.items())

    def add(self, s: Statement, place: SlicePlace, places: dict[str, SlicePlace]) -> None:
        """Add a statement to the group.

        `place` is the place of the slices in its result. `places` maps the names of its operands to the places of their
        slices.
        """
        self.statements.append(s)
        self.places |= {**places, result_of(s).name: place}

    def keep_axes(self) -> None:
        """Make slices keep the sliced axis, even if each slice is a single element of this axis."""
        self.places = {name: replace(at, keep=True) for name, at in self.places.items()}

    @property
    def communicates(self) -> bool:
        return any(isinstance(s, Communication) for s in self.statements)


def operand_places(s: Statement, place: SlicePlace) -> dict[str, SlicePlace]:
    """Return a map from the names of a statement's operands to the places of their slices.

    `place` is the place of the slices in the statement's result. Operands that are used unsliced are left out.
    """
    if isinstance(s, Communication):
        return {s.x.name: place}
    if isinstance(s, TensorOp):
        at = SlicePlace(0, place.outer, place.count)
        pairs = zip(s.operands, s.maps(), strict=True)
        return {v.name: replace(at, axis=k) for v, map in pairs for k, to in enumerate(map) if to == place.axis}
    if isinstance(s, Permute):
        return {s.x.name: SlicePlace(s.axes[place.axis], place.outer, place.count)}
    if isinstance(s, Reshape):
        moved = _through_reshape(s.out.tensor, s.x.tensor, place)
        return {s.x.name: moved} if moved else {}
    assert isinstance(s, Shard)
    return {s.x.name: place}


def result_place(s: Statement, operand: Value, place: SlicePlace) -> SlicePlace | None:
    """Return the place of the slices in the result of a statement, if `operand` is sliced at `place`.

    Return None if the result cannot be computed slice by slice in this way.
    """
    if isinstance(s, (Communication, Shard)):
        return place
    if isinstance(s, TensorOp):
        for value, map in zip(s.operands, s.maps(), strict=True):
            if value.name == operand.name and map[place.axis] >= 0:
                return SlicePlace(map[place.axis], place.outer, place.count)
        return None
    if isinstance(s, Permute):
        return SlicePlace(s.axes.index(place.axis), place.outer, place.count)
    assert isinstance(s, Reshape)
    return _through_reshape(s.x.tensor, s.out.tensor, place)


def _through_reshape(old: TensorType, new: TensorType, place: SlicePlace) -> SlicePlace | None:
    """Return the place in the reshaped tensor of the slices that the old tensor has at `place`.

    Return None if no axis of the reshaped tensor contains these slices.
    """
    position = product(old.shape[: place.axis]) * place.outer
    before = ONE
    for k, extent in enumerate(new.shape):
        outer = position / before
        if outer.is_integer and is_multiple(extent, outer * place.count) and not extent.is_one:
            return SlicePlace(k, outer, place.count)
        before = before * extent
    return None


def why_not(s: Statement, place: SlicePlace, places: dict[str, SlicePlace]) -> str | None:
    """Return the reason why a statement cannot run slice by slice; None if it can.

    `place` is the place of the slices in its result. `places` maps the names of its operands to the places of their
    slices.
    """
    named = {v.name: v for v in [*operands_of(s), result_of(s)]}
    for name, at in [(result_of(s).name, place), *places.items()]:
        type = named[name].tensor
        if not at.drops_axis(type) and at.cut(type) is None:
            return (
                f"a slice of {named[name]} cuts across ranks: {type.host().axes[at.axis]} in {at.count} pieces with "
                f"{at.outer} outside"
            )
    if isinstance(s, TensorOp):
        if s.operands and not places:
            return f"{s.keyword()} computes axis {place.axis} of {result_of(s)} whole"
        axes = [
            (v.name, map.index(place.axis) if place.axis in map else None)
            for v, map in zip(s.operands, s.maps(), strict=True)
        ]
        if twice := next((n for n, axis in axes for m, other in axes if n == m and axis != other), None):
            return f"it uses %{twice} in two ways, and a slice of it serves only one"
    if isinstance(s, Reshape) and not places:
        return f"the slice has no place in {s.x} before the reshape"
    return None


def schedule(body: tuple[Statement, ...], loops: list[SlicedGroup]) -> list[Statement | SlicedGroup]:
    """Return the statements and loops of a program in an order in which they can run.

    All statements of one loop become one item, which comes after everything that the loop needs. Otherwise the order of
    the program is kept.
    """
    loop_of = {result_of(s).name: g for g in loops for s in g.statements}
    results = {result_of(s).name for s in body}
    steps: list[Statement | SlicedGroup] = []
    waiting = list(body)
    ready: set[str] = set()
    while waiting:
        for s in waiting:
            group = loop_of.get(result_of(s).name)
            members = group.statements if group else [s]
            inside = {result_of(m).name for m in members}
            needs = {v.name for m in members for v in operands_of(m)} & results
            if needs <= ready | inside:
                break
        else:
            hint = "take Stream off one of the two tensors"
            raise waiting[0].fail("the loops of two Stream axes need each other's results", hint=hint)
        steps.append(group or s)
        ready |= inside
        waiting = [w for w in waiting if result_of(w).name not in inside]
    return steps
