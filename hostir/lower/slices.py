"""Slices: which statements can run slice by slice along an axis, and their sliced form; for `pipeline` and `ring`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hostir.ir.comm_ops import AllReduce, Communication
from hostir.ir.host_ops import AsPartial, Chunk, Select
from hostir.ir.op import Expr, Statement, Value
from hostir.ir.sharding import is_multiple, refine
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import DenseCopy, Sum, TensorOp
from hostir.ir.types import Axis, TensorType
from hostir.ir.view_ops import Permute, Reshape, Shard, ViewStatement
from hostir.lower.host import Host, Scope
from hostir.lower.propagate import operands_of, result_of

# Places of slices -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlicePlace:
    """The position of slices in a tensor: `count` slices of an axis, with `outer` blocks outside them.

    A slice of one element has no such axis, unless `keep` is set.
    """

    axis: int
    outer: Size
    count: Size
    keep: bool = False

    def drops_axis(self, type: TensorType) -> bool:
        """Return True if each slice is one element of an unsharded axis: then the slice does not have this axis."""
        axis = type.host().axes[self.axis]
        return axis.extent == self.count and not axis.marks and not self.keep

    def cut(self, type: TensorType) -> Axis | None:
        """Return the axis of one slice, or None if slices would cut across ranks."""
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
        """Return the number of blocks outside the slices in one rank's part of their axis."""
        cut = refine(type.host().axes[self.axis], self.outer, self.count, type.mesh)
        assert cut is not None
        return product([type.local_factor(f) for f in cut[0]])


@dataclass
class SlicedGroup:
    """Statements that one loop runs slice by slice, and the places of the slices in each sliced tensor."""

    statements: list[Statement] = field(default_factory=list)
    places: dict[str, SlicePlace] = field(default_factory=dict)
    # Why a communication has to stay out of the loop, by its result.
    left_out: dict[str, HostIRError] = field(default_factory=dict)

    @property
    def count(self) -> Size:
        return next(iter(self.places.values())).count

    def conflicts(self, places: dict[str, SlicePlace]) -> bool:
        """Return True if the group slices one of these tensors at another place."""
        return any(self.places.get(name, at) != at for name, at in places.items())

    def add(self, s: Statement, place: SlicePlace, places: dict[str, SlicePlace]) -> None:
        """Add a statement, with the place of a slice in its result and the places in its operands."""
        self.statements.append(s)
        self.places |= {**places, result_of(s).name: place}

    def keep_axes(self) -> None:
        """Make slices of one element keep the sliced axis."""
        self.places = {name: replace(at, keep=True) for name, at in self.places.items()}

    @property
    def communicates(self) -> bool:
        return any(isinstance(s, Communication) for s in self.statements)


def operand_places(s: Statement, place: SlicePlace) -> dict[str, SlicePlace]:
    """Map the place of a slice in the result to its places in the operands; operands used unsliced are left out."""
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
    """Map the place of a slice in an operand to its place in the result; None if the result cannot be sliced there."""
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
    """Return the place at the same position of the flattened tensor."""
    position = product(old.shape[: place.axis]) * place.outer
    before = ONE
    for k, extent in enumerate(new.shape):
        outer = position / before
        if outer.is_integer and is_multiple(extent, outer * place.count) and not extent.is_one:
            return SlicePlace(k, outer, place.count)
        before = before * extent
    return None


def why_not(s: Statement, place: SlicePlace, places: dict[str, SlicePlace]) -> str | None:
    """Return the reason why a statement cannot run slice by slice, or None if it can."""
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


# Statements on slices -------------------------------------------------------------------------------------------------


class Slices(Scope):
    """Builds the statements of a group on the slices at one index; the host program holds the unsliced tensors."""

    def __init__(self, host: Host, group: SlicedGroup, index: Expr, suffix: str) -> None:
        super().__init__(host.names)
        self.host, self.group, self.index, self.suffix = host, group, index, suffix
        self.slices: dict[str, Value] = {}  # by the fusion's name: this round's slice
        self.spread: dict[str, Statement] = {}  # copies from a staged slice to its place, by the fusion's name
        self.inside = {result_of(s).name for s in group.statements}

    def statement(self, s: Statement) -> None:
        sliced = operand_places(s, self.group.places[result_of(s).name])
        for v in operands_of(s):
            if v.name in sliced and v.name not in self.slices:
                self.slices[v.name] = self.outside(v)
        out = result_of(s)
        if isinstance(s, ViewStatement):
            self.viewed(s, out)
            return
        if out.name not in self.slices:
            self.slices[out.name] = self.destination(out)
        self.add(self.sliced(s))
        if out.name in self.spread:
            self.body.append(self.spread[out.name])

    def sliced(self, s: Statement) -> Statement:
        """Return the statement on slices instead of unsliced tensors, with axis numbers adjusted for a dropped axis."""
        place = self.group.places[result_of(s).name]
        sliced = (*operand_places(s, place), result_of(s).name)
        renamed = s.rename({**self.host.values, **{name: self.slices[name] for name in sliced}})
        if not place.drops_axis(result_of(s).tensor):
            return renamed
        if isinstance(renamed, Permute) and isinstance(s, Permute):
            gone = s.axes[place.axis]
            return replace(renamed, axes=tuple(a - (a > gone) for a in s.axes if a != gone))
        if isinstance(renamed, Sum) and isinstance(s, Sum):
            return replace(renamed, axis=s.axis - (self.group.places[s.x.name].axis < s.axis))
        return renamed

    def viewed(self, s: ViewStatement, out: Value) -> None:
        """Add a view inside the loop, and a copy of it if the value is needed outside the loop."""
        view = self.slices[out.name] = self.fresh(out, self.group.places[out.name].slice(out.tensor))
        self.add(self.sliced(s))
        if self.escapes(out):
            target, _ = self.slice_of(self.host.destination(out), out)
            self.body.append(self.into(view, target, f"{out} is put together from views of slices"))

    def escapes(self, value: Value) -> bool:
        """Return True if a value of the loop is needed outside it."""
        return self.host.used_outside(value, self.inside)

    def fresh(self, value: Value, type: TensorType) -> Value:
        return Value(self.names.fresh(f"{value.name}_{self.suffix}"), type, value.span)

    def slice_of(self, full: Value, value: Value) -> tuple[Value, bool]:
        """Return a view of this round's slice of an unsliced tensor; and True if it has the type of the slice.

        If several blocks lie outside the slices on one rank, a slice is not contiguous: the view then has the blocks as
        a separate axis.
        """
        place, type, index = self.group.places[value.name], full.tensor, self.index
        k = place.axis
        if place.drops_axis(type) or place.blocks_outside(type).is_one:
            out = self.fresh(value, place.slice(type))
            if place.drops_axis(type):
                self.body.append(Select(full, out, index, k, span=value.span))
            else:
                self.body.append(Chunk(full, out, index, place.count, k, span=value.span))
            if product(type.local_shape[:k]).is_one and full.name in self.host.dense:
                self.dense.add(out.name)
            return out, True
        cut = refine(type.axes[k], place.outer, place.count, type.mesh)
        assert cut is not None
        parts = Axis(cut[0]).normal(), Axis.of(place.count), Axis(cut[1]).normal()
        split = [*type.axes[:k], *parts, *type.axes[k + 1 :]]
        view = self.fresh(value, type.with_axes(split))
        out = self.fresh(value, type.with_axes(a for i, a in enumerate(split) if i != k + 1))
        self.body.append(Reshape(full, view, span=value.span))
        self.body.append(Select(view, out, index, k + 1, span=value.span))
        return out, False

    def outside(self, value: Value) -> Value:
        """Return the slice of a tensor that is computed outside the loop."""
        view, exact = self.slice_of(self.host.values[value.name], value)
        if exact:
            return view
        stage = self.staged(value)
        self.body.append(self.into(view, stage, f"a slice of {value} is not contiguous"))
        return stage

    def staged(self, value: Value) -> Value:
        """Return this round's slice of a buffer that was allocated for the loop."""
        name = f"{value.name}_slices"
        if value.name not in self.host.values:
            name = value.name
            self.names.taken.discard(name)  # the fusion's name is free: no other value uses it
        return self.scratch(name, self.group.places[value.name].slice(value.tensor), value)

    def scratch(self, name: str, type: TensorType, like: Value) -> Value:
        """Return the round's slice of a buffer [rounds, slice], so that overlapping rounds do not share memory."""
        rounds = type.with_axes([Axis.of(self.group.count), *type.axes])
        buffer = self.host.scratch(name, rounds, like)
        out = Value(self.names.fresh(f"{name}_{self.suffix}"), type, like.span)
        self.body.append(Select(buffer, out, self.index, span=like.span))
        self.dense.add(out.name)
        return out

    def into(self, source: Value, target: Value, why: str) -> Statement:
        """Return a copy between a slice and a view of the same slice that has the outer blocks as an axis."""
        if len(source.tensor.axes) < len(target.tensor.axes):
            source = self.blocks(source, target.tensor)
        elif len(source.tensor.axes) > len(target.tensor.axes):
            target = self.blocks(target, source.tensor)
        return DenseCopy(out=target, x=source, span=target.span, note=f"copy: {why}")

    def blocks(self, value: Value, type: TensorType) -> Value:
        out = Value(self.names.fresh(f"{value.name}_blocks"), type, value.span)
        return self.view(Reshape(value, out, span=value.span))

    def destination(self, out: Value) -> Value:
        """Return the destination of a result's slice: in the unsliced tensor if used outside, else in a buffer."""
        if out.name not in self.host.values and not self.escapes(out):
            reduce = self.host.only_reduced(out)
            return self.partial_of(out, reduce) if reduce and reduce.out.name not in self.slices else self.staged(out)
        view, exact = self.slice_of(self.host.destination(out), out)
        if exact:
            return view
        stage = self.staged(out)
        self.spread[out.name] = self.into(stage, view, f"a slice of {out} is not contiguous")
        return stage

    def partial_of(self, out: Value, reduce: AllReduce) -> Value:
        """Return the allreduce's slice as the memory of a partial sum that only it reads: it is reduced in place."""
        target = self.slices[reduce.out.name] = self.destination(reduce.out)
        if target.name not in self.dense:
            return self.staged(out)
        partial = self.fresh(out, replace(target.tensor, partial=out.tensor.partial))
        self.body.append(AsPartial(target, partial, reduce.over, span=out.span))
        self.dense.add(partial.name)
        return partial


# The order of groups --------------------------------------------------------------------------------------------------


def schedule(body: tuple[Statement, ...], loops: list[SlicedGroup]) -> list[Statement | SlicedGroup]:
    """Return statements and loops in program order, except that a loop runs as one item, after everything it needs."""
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
