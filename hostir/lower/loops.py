"""Build the body of a loop that computes slice by slice; for the strategies `pipeline` and `ring`."""

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
    """Builds the body of a loop: the statements of a group for one slice of its tensors.

    Args:
        host: the host program around the loop, which holds the unsliced tensors.
        index: the index of the slice, for example the loop's index.
        suffix: the end of the names of slices.
    """

    def __init__(self, host: Host, group: SlicedGroup, index: Expr, suffix: str) -> None:
        super().__init__(host.names)
        self.host, self.group, self.index, self.suffix = host, group, index, suffix
        self.slices: dict[str, Value] = {}  # by a tensor's name in the fusion: its slice
        self.spread: dict[str, Statement] = {}  # by a tensor's name: the copy of its slice to the unsliced tensor
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
        """Return the statement with its sliced tensors replaced by their slices.

        If a slice does not have the sliced axis, the axis numbers in the statement refer to the remaining axes.
        """
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
        """Append a view of slices to the loop.

        If its result is needed outside the loop, also copy it to the unsliced tensor.
        """
        view = self.slices[out.name] = self.fresh(out, self.group.places[out.name].slice(out.tensor))
        self.add(self.sliced(s))
        if self.escapes(out):
            target, _ = self.slice_of(self.host.destination(out), out)
            self.body.append(self.into(view, target, f"{out} is put together from views of slices"))

    def escapes(self, value: Value) -> bool:
        """Return True if a value that is computed in the loop is needed outside the loop."""
        return self.host.used_outside(value, self.inside)

    def fresh(self, value: Value, type: TensorType) -> Value:
        return Value(self.names.fresh(f"{value.name}_{self.suffix}"), type, value.span)

    def slice_of(self, full: Value, value: Value) -> tuple[Value, bool]:
        """Return a view of one slice of a tensor, and True if the view has the type of a slice.

        `value` is the tensor in the fusion, and `full` is the same tensor in the host program, unsliced. A rank may
        hold several blocks of the axis outside the sliced part, so that a slice is not contiguous. Then the view has
        these blocks as a separate axis, and the second result is False.
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
        """Return the slice of a tensor that is computed outside the loop.

        If the slice is not contiguous, return a copy of it.
        """
        view, exact = self.slice_of(self.host.values[value.name], value)
        if exact:
            return view
        stage = self.staged(value)
        self.body.append(self.into(view, stage, f"a slice of {value} is not contiguous"))
        return stage

    def staged(self, value: Value) -> Value:
        """Allocate a buffer for all slices of a value, and return the slice of this round in it."""
        name = f"{value.name}_slices"
        if value.name not in self.host.values:
            name = value.name
            self.names.taken.discard(name)  # the fusion's name is free: no other value uses it
        return self.scratch(name, self.group.places[value.name].slice(value.tensor), value)

    def scratch(self, name: str, type: TensorType, like: Value) -> Value:
        """Allocate a buffer with one slice for each round, and return the slice of this round.

        So rounds that run at the same time do not share memory.
        """
        rounds = type.with_axes([Axis.of(self.group.count), *type.axes])
        buffer = self.host.scratch(name, rounds, like)
        out = Value(self.names.fresh(f"{name}_{self.suffix}"), type, like.span)
        self.body.append(Select(buffer, out, self.index, span=like.span))
        self.dense.add(out.name)
        return out

    def into(self, source: Value, target: Value, why: str) -> Statement:
        """Return the statement that copies a slice from `source` to `target`; `why` is the reason, for a comment.

        In one of the two tensors, the blocks outside the slice may be a separate axis. The other tensor is then
        reshaped to match.
        """
        if len(source.tensor.axes) < len(target.tensor.axes):
            source = self.blocks(source, target.tensor)
        elif len(source.tensor.axes) > len(target.tensor.axes):
            target = self.blocks(target, source.tensor)
        return DenseCopy(out=target, x=source, span=target.span, note=f"copy: {why}")

    def blocks(self, value: Value, type: TensorType) -> Value:
        out = Value(self.names.fresh(f"{value.name}_blocks"), type, value.span)
        return self.view(Reshape(value, out, span=value.span))

    def destination(self, out: Value) -> Value:
        """Return the memory for the slice of a result.

        If the result is needed outside the loop, this is a view of the unsliced tensor; otherwise it is a slice of a
        buffer. If the view would not be contiguous, the slice is computed in a buffer, and `spread` gets the statement
        that copies it to the unsliced tensor.
        """
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
        """Return the memory for the slice of a partial sum. An allreduce is the only reader of this sum.

        The memory is the slice of the allreduce's result, so that the allreduce works in place. But if that slice is
        not contiguous, the memory is a slice of a separate buffer.
        """
        target = self.slices[reduce.out.name] = self.destination(reduce.out)
        if target.name not in self.dense:
            return self.staged(out)
        partial = self.fresh(out, replace(target.tensor, partial=out.tensor.partial))
        self.body.append(AsPartial(target, partial, reduce.over, span=out.span))
        self.dense.add(partial.name)
        return partial
