"""Build the body of a loop, with statements on slices; for `pipeline` and `ring`."""

from __future__ import annotations

from dataclasses import replace

from hostir.ir.comm_ops import AllReduce
from hostir.ir.host_ops import AsPartial, Chunk, Select
from hostir.ir.op import Expr, Statement, Value
from hostir.ir.sharding import refine
from hostir.ir.sizes import product
from hostir.ir.tensor_ops import DenseCopy, Sum
from hostir.ir.types import Axis, TensorType
from hostir.ir.view_ops import Permute, Reshape, ViewStatement
from hostir.lower.host import Host, Scope
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.slices import SlicedGroup, operand_places


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
