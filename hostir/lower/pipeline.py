"""Passes `sequential` and `pipeline`: allocate buffers for values, and run statements whole or slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hostir.ir.comm_ops import AllReduce, Communication
from hostir.ir.host_ops import AsPartial, Chunk, For, Select
from hostir.ir.layout import is_multiple, refine
from hostir.ir.op import Codec, Ref, Statement, Value
from hostir.ir.program import Program
from hostir.ir.sizes import ONE, Size, product
from hostir.ir.source import HostIRError, error
from hostir.ir.tensor_ops import (
    Binary,
    DenseCopy,
    Linear,
    Matmul,
    Permute,
    Reshape,
    Shard,
    Sum,
    TensorOp,
    ViewStatement,
)
from hostir.ir.types import STREAM, Axis, Kind, TensorType
from hostir.lower import Pass
from hostir.lower.host import Host, Scope
from hostir.lower.propagate import result_of, stream_place

# Slices ---------------------------------------------------------------------------------------------------------------
# The statements that a Stream axis slices, and where the slices lie in each of their tensors.


@dataclass(frozen=True)
class SlicePlace:
    """The position of slices in a tensor: `count` slices of an axis, with `outer` blocks outside them.

    A slice of one element loses the axis, unless it is to `keep` it.
    """

    axis: int
    outer: Size
    count: Size
    keep: bool = False

    def whole(self, type: TensorType) -> bool:
        """Whether each slice is one element of an axis that is not sharded, so that a slice has one axis less."""
        axis = type.host().axes[self.axis]
        return axis.extent == self.count and not axis.marks and not self.keep

    def cut(self, type: TensorType) -> Axis | None:
        """Return the axis of one slice, or None if slices would cut across ranks."""
        parts = refine(type.host().axes[self.axis], self.outer, self.count, type.mesh)
        return None if parts is None else Axis((*parts[0], *parts[1])).normal()

    def slice(self, type: TensorType) -> TensorType:
        """Return the type of one slice."""
        host = type.host()
        if self.whole(type):
            return host.with_axes(a for i, a in enumerate(host.axes) if i != self.axis)
        cut = self.cut(type)
        assert cut is not None
        return host.with_axes(cut if i == self.axis else a for i, a in enumerate(host.axes))

    def blocks_outside(self, type: TensorType) -> Size:
        """Return how many blocks of one rank's part lie outside the slices, within their axis."""
        cut = refine(type.host().axes[self.axis], self.outer, self.count, type.mesh)
        assert cut is not None
        return product([type.local_factor(f) for f in cut[0]])


@dataclass
class SlicedGroup:
    """Statements that one loop runs slice by slice, and where the slices lie in each sliced tensor."""

    statements: list[Statement] = field(default_factory=list)
    places: dict[str, SlicePlace] = field(default_factory=dict)
    # By the result of each communication next to the loop: why it has to stay out.
    left_out: dict[str, HostIRError] = field(default_factory=dict)

    @property
    def count(self) -> Size:
        return next(iter(self.places.values())).count

    @property
    def communicates(self) -> bool:
        return any(isinstance(s, Communication) for s in self.statements)


def annotated(program: Program) -> Iterator[tuple[Statement | None, Value, SlicePlace]]:
    """Return every tensor with a Stream part, and the statement that defines it (None for an input)."""
    for s, value in [*((None, v) for v in program.inputs), *((s, result_of(s)) for s in program.body)]:
        found = [(k, stream_place(a)) for k, a in enumerate(value.tensor.axes)]
        places = [SlicePlace(k, *p) for k, p in found if p]
        if len(places) > 1 or sum(f.on == STREAM for a in value.tensor.axes for f in a.factors) > 1:
            raise error(f"{value} has two Stream axes", s.span if s else value.span, expected="one axis to slice")
        if places:
            yield s, value, places[0]


def operand_places(s: Statement, place: SlicePlace) -> dict[str, SlicePlace]:
    """Map the place of a slice in the result to its places in the operands; operands used whole are left out."""
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
    """Map the place of a slice in an operand to its place in the result; None if it has none."""
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
        if outer.whole and is_multiple(extent, outer * place.count) and not extent.is_one:
            return SlicePlace(k, outer, place.count)
        before = before * extent
    return None


def why_not(s: Statement, place: SlicePlace, places: dict[str, SlicePlace]) -> str | None:
    """Return why a statement cannot run slice by slice, or None if it can."""
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


def groups(program: Program) -> list[SlicedGroup]:
    """Return the loops that the Stream axes ask for: each annotated tensor with all that can be sliced with it."""
    producer = {result_of(s).name: s for s in program.body}
    taken: set[int] = set()
    made: list[SlicedGroup] = []
    for s, value, place in annotated(program):
        if any(value.name in g.places for g in made):
            continue
        group = SlicedGroup()
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


def _needs_axis(s: Statement, place: SlicePlace) -> bool:
    """Whether a statement needs the sliced axis whole: the columns of a matrix, or what aligns other operands."""
    if isinstance(s, (Matmul, Linear)):
        return place.axis == len(s.out.tensor.axes) - 1
    return isinstance(s, Binary) and any(
        place.axis not in map and len(map) > len(s.out.tensor.axes) - 1 - place.axis for map in s.maps()
    )


def _backward(
    s: Statement,
    place: SlicePlace,
    group: SlicedGroup,
    producer: dict[str, Statement],
    taken: set[int],
    *,
    required: bool,
) -> bool:
    """Add a statement to a group, and the statements that make its operands if they can be sliced too."""
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


def _forward(program: Program, group: SlicedGroup, taken: set[int], seed: Value) -> None:
    """Add the users of the loop's results that can be sliced and do not depend on statements outside the loop."""
    outside: set[str] = set()  # computed outside the loop from its results: not available until it has ended
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


def _untangle(program: Program, group: SlicedGroup) -> None:
    """Remove from a loop the statements that must be complete before the rest of the loop can run.

    Those are the ones that a statement inside uses whole, and those that a statement outside needs on which the loop
    depends in turn.
    """
    while True:
        inside = {result_of(s).name for s in group.statements}
        whole = {
            v.name
            for s in group.statements
            for v in s.values(Codec.READ, Codec.ALIAS)
            if v.name in inside and v.name not in operand_places(s, group.places[result_of(s).name])
        }
        feeds: dict[str, set[str]] = {}  # for each value made outside: the loop's values that it needs
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


def _joins(s: Statement, place: SlicePlace, group: SlicedGroup, taken: set[int]) -> bool:
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


# One loop -------------------------------------------------------------------------------------------------------------
# One loop of a pipeline: the group's statements, on slices.


class Loop(Scope):
    """Builds one loop; buffers and tensors that outlive a round belong to the host program around it."""

    def __init__(self, host: Host, group: SlicedGroup) -> None:
        super().__init__(host.names)
        self.host = host
        self.group = group
        self.index = Value(host.names.fresh("i"), Kind.INDEX)
        self.slices: dict[str, Value] = {}  # by the fusion's name: this round's slice
        self.spread: dict[str, Statement] = {}  # copies from a staged slice to its place, by the fusion's name
        self.inside = {result_of(s).name for s in group.statements}

    def build(self) -> For:
        for s in self.group.statements:
            self.statement(s)
        return For(self.index, self.group.count, tuple(self.body), span=self.group.statements[0].span)

    def statement(self, s: Statement) -> None:
        sliced = operand_places(s, self.group.places[result_of(s).name])
        for v in s.values(Codec.READ, Codec.ALIAS):
            if v.name in sliced and v.name not in self.slices:
                self.slices[v.name] = self.outside(v)
        out = result_of(s)
        if isinstance(s, ViewStatement):
            self.viewed(s, out)
            return
        if out.name not in self.slices:
            self.slices[out.name] = self.destination(out)
        moved = self.sliced(s)
        if isinstance(moved, Communication):
            self.communicate(moved)
        else:
            self.body.append(moved)
        if out.name in self.spread:
            self.body.append(self.spread[out.name])

    def sliced(self, s: Statement) -> Statement:
        """Return the statement on slices instead of whole tensors; axes that a slice lacks are not counted."""
        place = self.group.places[result_of(s).name]
        sliced = (*operand_places(s, place), result_of(s).name)
        moved = s.rename({**self.host.values, **{name: self.slices[name] for name in sliced}})
        if not place.whole(result_of(s).tensor):
            return moved
        if isinstance(moved, Permute) and isinstance(s, Permute):
            gone = s.axes[place.axis]
            return replace(moved, axes=tuple(a - (a > gone) for a in s.axes if a != gone))
        if isinstance(moved, Sum) and isinstance(s, Sum):
            return replace(moved, axis=s.axis - (self.group.places[s.x.name].axis < s.axis))
        return moved

    def viewed(self, s: ViewStatement, out: Value) -> None:
        """Add a view inside the loop, and a copy of it if the value is needed outside."""
        made = self.slices[out.name] = self.fresh(out, self.group.places[out.name].slice(out.tensor))
        moved = self.sliced(s)
        assert isinstance(moved, ViewStatement)
        self.view(moved)
        if self.escapes(out):
            target, _ = self.slice_of(self.whole(out), out)
            self.body.append(self.into(made, target, f"{out} is put together from views of slices"))

    def escapes(self, value: Value) -> bool:
        """Whether the loop makes a value that is needed outside it."""
        return self.host.used_outside(value, self.inside)

    def whole(self, value: Value) -> Value:
        """Return the whole tensor, outside the loop, that the loop fills slice by slice."""
        return self.host.destination(value)

    def fresh(self, value: Value, type: TensorType) -> Value:
        return Value(self.names.fresh(f"{value.name}_{self.index.name}"), type, value.span)

    def slice_of(self, whole: Value, value: Value) -> tuple[Value, bool]:
        """Return a view of this round's slice of a whole tensor, and whether it has the slice's own type.

        Pieces with blocks outside them on one rank lie apart: the view then has the blocks as an axis of their own.
        """
        place, type, index = self.group.places[value.name], whole.tensor, Ref(self.index)
        k = place.axis
        first = product(type.local_shape[:k]).is_one and whole.name in self.host.dense
        if place.whole(type):
            out = self.fresh(value, place.slice(type))
            self.body.append(Select(whole, out, index, k, span=value.span))
            self.dense |= {out.name} if first else set()
            return out, True
        if place.blocks_outside(type).is_one:
            out = self.fresh(value, place.slice(type))
            self.body.append(Chunk(whole, out, index, place.count, k, span=value.span))
            self.dense |= {out.name} if first else set()
            return out, True
        cut = refine(type.axes[k], place.outer, place.count, type.mesh)
        assert cut is not None
        split = [
            *type.axes[:k],
            Axis(cut[0]).normal(),
            Axis.of(place.count),
            Axis(cut[1]).normal(),
            *type.axes[k + 1 :],
        ]
        view = self.fresh(value, type.with_axes(split))
        out = self.fresh(value, type.with_axes(a for i, a in enumerate(split) if i != k + 1))
        self.body.append(Reshape(whole, view, span=value.span))
        self.body.append(Select(view, out, index, k + 1, span=value.span))
        return out, False

    def outside(self, value: Value) -> Value:
        """Return the slice of a tensor that the loop does not make."""
        view, exact = self.slice_of(self.host.values[value.name], value)
        if exact:
            return view
        stage = self.staged(value)
        self.body.append(self.into(view, stage, f"a slice of {value} is not contiguous"))
        return stage

    def staged(self, value: Value) -> Value:
        """Return this round's slice of a buffer that was allocated for the loop."""
        own = value.name not in self.host.values
        if own:
            self.names.taken.discard(value.name)  # the fusion's name is free: nothing else stands for the value
        wish = value.name if own else f"{value.name}_slices"
        return self.scratch(wish, self.group.places[value.name].slice(value.tensor), value)

    def scratch(self, wish: str, type: TensorType, like: Value) -> Value:
        """Return the round's slice of a buffer [rounds, slice], so that overlapping rounds do not share memory."""
        whole = type.with_axes([Axis.of(self.group.count), *type.axes])
        buffer = self.host.scratch(wish, whole, like)
        out = Value(self.names.fresh(f"{wish}_{self.index.name}"), type, like.span)
        self.body.append(Select(buffer, out, Ref(self.index), span=like.span))
        self.dense.add(out.name)
        return out

    def into(self, source: Value, target: Value, why: str) -> Statement:
        """Copy between a slice and a view of the same slice in which the outer blocks are an axis."""
        if len(source.tensor.axes) < len(target.tensor.axes):
            source = self.blocks(source, target.tensor)
        elif len(source.tensor.axes) > len(target.tensor.axes):
            target = self.blocks(target, source.tensor)
        return DenseCopy(out=target, x=source, span=target.span, note=f"copy: {why}")

    def blocks(self, value: Value, type: TensorType) -> Value:
        return self.view(
            Reshape(value, Value(self.names.fresh(f"{value.name}_blocks"), type, value.span), span=value.span)
        )

    def destination(self, out: Value) -> Value:
        """Return where a slice of a result goes: into the whole tensor if used outside, else into the loop's buffer."""
        if not self.escapes(out):
            reduce = self.host.only_reduced(out)
            return self.partial_of(out, reduce) if reduce and reduce.out.name not in self.slices else self.staged(out)
        view, exact = self.slice_of(self.whole(out), out)
        if exact:
            return view
        stage = self.staged(out)
        self.spread[out.name] = self.into(stage, view, f"a slice of {out} is not contiguous")
        return stage

    def partial_of(self, out: Value, reduce: AllReduce) -> Value:
        """Return the allreduce's slice for a partial sum that only the allreduce reads: it is reduced in place."""
        target = self.slices[reduce.out.name] = self.destination(reduce.out)
        if target.name not in self.dense:
            return self.staged(out)
        partial = self.fresh(out, replace(target.tensor, partial=out.tensor.partial))
        self.body.append(AsPartial(target, partial, reduce.over, span=out.span))
        self.dense.add(partial.name)
        return partial


# The passes -----------------------------------------------------------------------------------------------------------
# Passes `sequential` and `pipeline`.
#
# `pipeline` is nvFuser's collective-based pipeline (its pull request 3606, later its StreamParallelType pass), made
# generic: whatever statements can be sliced along the Stream axis run in one loop.

NOT_OVERLAPPED = "not overlapped"  # begins the comment of a communication that stays whole


@dataclass(frozen=True)
class Sequential(Pass):
    """Runs each communication and each computation whole, in program order, on the caller's stream."""

    name = "sequential"

    def run(self, program: Program) -> Program:
        return build(program, [])


@dataclass(frozen=True)
class Pipeline(Pass):
    """Makes a loop over the Stream axis: each round selects, communicates and computes one slice."""

    name = "pipeline"

    def run(self, program: Program) -> Program:
        found = groups(program)
        for group in found:
            if group.left_out and not group.communicates:  # a loop that hides nothing is not what was asked for
                raise next(iter(group.left_out.values()))
        reasons = {name: why.diagnostics[0].message for group in found for name, why in group.left_out.items()}
        return build(with_reasons(program, reasons), [group for group in found if group.communicates])


def with_reasons(program: Program, reasons: Mapping[str, str]) -> Program:
    """Return the program with a note on each communication that cannot be overlapped; `reasons` are by its result."""
    body = (
        replace(s, note=f"{NOT_OVERLAPPED}: {reasons[name]}") if (name := result_of(s).name) in reasons else s
        for s in program.body
    )
    return program.with_body(body)


def build(program: Program, loops: list[SlicedGroup]) -> Program:
    """Build the host program that runs these loops, and the rest of the fusion whole."""
    host = Host(program)
    for step in schedule(program.body, loops):
        if isinstance(step, SlicedGroup):
            host.body.append(Loop(host, step).build())
        else:
            host.whole(step)
    return host.finished()


def schedule(body: tuple[Statement, ...], loops: list[SlicedGroup]) -> list[Statement | SlicedGroup]:
    """Return program order, except that a loop runs as one item, after all that it needs."""
    loop_of = {result_of(s).name: g for g in loops for s in g.statements}
    made = {result_of(s).name for s in body}
    steps: list[Statement | SlicedGroup] = []
    waiting = list(body)
    ready: set[str] = set()
    while waiting:
        for s in waiting:
            group = loop_of.get(result_of(s).name)
            members = group.statements if group else [s]
            inside = {result_of(m).name for m in members}
            needs = {v.name for m in members for v in m.values(Codec.READ, Codec.ALIAS)} & made
            if needs <= ready | inside:
                break
        else:
            hint = "take Stream off one of the two tensors"
            raise waiting[0].fail("the loops of two Stream axes need each other's results", hint=hint)
        steps.append(group or s)
        ready |= inside
        waiting = [w for w in waiting if result_of(w).name not in inside]
    return steps
