"""One loop of a pipeline: the group's statements, on slices."""

from __future__ import annotations

from dataclasses import replace

from hostir.ir import Statement, TensorType, Value
from hostir.ir.comm_ops import AllReduce, Communication
from hostir.ir.host_ops import AsPartial, Chunk, For, Select
from hostir.ir.layout import refine
from hostir.ir.op import Codec
from hostir.ir.sizes import product
from hostir.ir.tensor_ops import Copy, Sum
from hostir.ir.types import Axis, Kind
from hostir.ir.values import Ref
from hostir.ir.view_ops import Permute, Reshape, ViewOp
from hostir.lower.host import Host
from hostir.lower.scope import Scope
from hostir.lower.sharding import result_of
from hostir.lower.slicing import Group, operand_places


class Loop(Scope):
    """Builds the loop; buffers and tensors that outlive a round belong to the host program around it."""

    def __init__(self, host: Host, group: Group) -> None:
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
        if isinstance(s, ViewOp):
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
        """The statement on slices instead of whole tensors; an axis that a slice lacks is not counted."""
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

    def viewed(self, s: ViewOp, out: Value) -> None:
        """A view inside the loop; where the value is needed outside, a copy puts it there."""
        made = self.slices[out.name] = self.fresh(out, self.group.places[out.name].slice(out.tensor))
        moved = self.sliced(s)
        assert isinstance(moved, ViewOp)
        self.view(moved)
        if self.escapes(out):
            target, _ = self.slice_of(self.whole(out), out)
            self.body.append(self.into(made, target, f"{out} is put together from views of slices"))

    def escapes(self, value: Value) -> bool:
        """Whether the loop makes a value that is needed outside it."""
        return self.host.used_outside(value, self.inside)

    def whole(self, value: Value) -> Value:
        """The tensor, outside the loop, of which the loop makes slices."""
        return self.host.destination(value)

    def fresh(self, value: Value, type: TensorType) -> Value:
        return Value(self.names.fresh(f"{value.name}_{self.index.name}"), type, value.span)

    def slice_of(self, whole: Value, value: Value) -> tuple[Value, bool]:
        """A view of this round's slice of a whole tensor, and whether it has the slice's own type.

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
        """The slice of a tensor that the loop does not make."""
        view, exact = self.slice_of(self.host.values[value.name], value)
        if exact:
            return view
        stage = self.staged(value)
        self.body.append(self.into(view, stage, f"a slice of {value} is not contiguous"))
        return stage

    def staged(self, value: Value) -> Value:
        """This round's slice of a buffer made for the loop."""
        own = value.name not in self.host.values
        if own:
            self.names.taken.discard(value.name)  # the fusion's name is free: nothing else stands for the value
        wish = value.name if own else f"{value.name}_slices"
        return self.scratch(wish, self.group.places[value.name].slice(value.tensor), value)

    def scratch(self, wish: str, type: TensorType, like: Value) -> Value:
        """The round's slice of a buffer [rounds, slice], so that rounds in flight do not share memory."""
        whole = type.with_axes([Axis.of(self.group.count), *type.axes])
        buffer = self.host.scratch(wish, whole, like)
        out = Value(self.names.fresh(f"{wish}_{self.index.name}"), type, like.span)
        self.body.append(Select(buffer, out, Ref(self.index), span=like.span))
        self.dense.add(out.name)
        return out

    def into(self, source: Value, target: Value, why: str) -> Statement:
        """A copy between a slice and a view of the same slice that has its outer blocks as an axis."""
        if len(source.tensor.axes) < len(target.tensor.axes):
            source = self.blocks(source, target.tensor)
        elif len(source.tensor.axes) > len(target.tensor.axes):
            target = self.blocks(target, source.tensor)
        return Copy(out=target, x=source, span=target.span, note=f"copy: {why}")

    def blocks(self, value: Value, type: TensorType) -> Value:
        return self.view(
            Reshape(value, Value(self.names.fresh(f"{value.name}_blocks"), type, value.span), span=value.span)
        )

    def destination(self, out: Value) -> Value:
        """Where a slice of a result goes: a slice of the whole where others need it, else of a buffer for the loop."""
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
        """What only an allreduce reads is computed where the allreduce leaves its result."""
        target = self.slices[reduce.out.name] = self.destination(reduce.out)
        if target.name not in self.dense:
            return self.staged(out)
        partial = self.fresh(out, replace(target.tensor, partial=out.tensor.partial))
        self.body.append(AsPartial(target, partial, reduce.over, span=out.span))
        self.dense.add(partial.name)
        return partial
