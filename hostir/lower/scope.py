"""A place that host statements are written to, with what is needed to write them: names, scratch buffers, layouts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from hostir.ir import Statement, TensorType, Value
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Wait
from hostir.ir.program import Names
from hostir.ir.tensor_ops import Copy
from hostir.ir.types import Kind
from hostir.ir.view_ops import Permute, Reshape, ViewOp
from hostir.lower.layout import Front, fronts
from hostir.lower.sharding import keeps_dense, splits_only


class Scope:
    """The program's top level, or the body of a loop."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.body: list[Statement] = []
        self.dense: set[str] = set()  # values whose parts lie in one piece

    @abstractmethod
    def scratch(self, wish: str, type: TensorType, like: Value) -> Value:
        """A dense buffer."""

    def view(self, s: ViewOp) -> Value:
        """Adds a view, with a copy before a reshape that strides cannot express; of dense parts it is mostly dense."""
        if isinstance(s, Reshape) and s.x.name not in self.dense and not splits_only(s):
            dense = self.scratch(f"{s.x.name}_dense", s.x.tensor, s.x)
            note = f"copy: {s.x} does not lie in one piece, as a reshape that merges axes needs it to"
            self.body.append(Copy(out=dense, x=s.x, span=s.span, note=note))
            s = replace(s, x=dense)
        self.body.append(s)
        if s.x.name in self.dense and keeps_dense(s):
            self.dense.add(s.out.name)
        return s.out

    def see(self, value: Value, front: Front) -> Value:
        """The value with what a communication moves brought to the front."""
        if front.split.axes != value.tensor.axes:
            split = Value(self.names.fresh(f"{value.name}_split"), front.split, value.span)
            value = self.view(Reshape(value, split, span=value.span))
        if front.order != tuple(range(len(front.order))):
            turned = Value(self.names.fresh(f"{value.name}_front"), front.type, value.span)
            value = self.view(Permute(value, turned, front.order, span=value.span))
        return value

    def communicate(self, s: Communication) -> None:
        """A communication with the layout it needs, and the wait for it."""
        x, out = s.x, s.out
        if seen := fronts(s, x.tensor, out.tensor):
            x, out = self.see(x, seen[0]), self.see(out, seen[1])
        x = self.packed(x, s)
        target = out if out.name in self.dense else self.scratch(f"{s.out.name}_packed", out.tensor, out)
        handle = Value(self.names.fresh(f"{s.out.name}_ready"), Kind.HANDLE, s.span)
        self.body += [replace(s, x=x, out=target, handle=handle), Wait(handle, span=s.span)]
        if target is not out:
            self.body.append(Copy(out=out, x=target, span=s.span, note=_why(s, s.out)))

    def packed(self, x: Value, s: Communication) -> Value:
        """What a communication sends, seen as `x`, in one piece."""
        if x.name in self.dense:
            return x
        dense = self.scratch(f"{s.x.name}_packed", x.tensor, x)
        self.body.append(Copy(out=dense, x=x, span=s.span, note=_why(s, s.x)))
        return dense


def _why(s: Communication, operand: Value) -> str:
    return f"copy: {s.keyword()} moves dense buffers, and {operand} does not lie so"
