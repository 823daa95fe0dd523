"""The host program that a dump gives so far: scopes of names, statements, buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hostir.ir import host_ops as host
from hostir.ir.op import Ref, Statement, Value
from hostir.ir.program import Names
from hostir.ir.sizes import Size
from hostir.ir.source import Span, did_you_mean, error
from hostir.ir.types import TensorType, Type
from hostir.ir.view_ops import ViewStatement
from hostir.nvfuser.equal_sizes import equate, pairwise
from hostir.nvfuser.nodes import Dump, IterDomain, TensorNode
from hostir.nvfuser.streams import Streams
from hostir.nvfuser.types import Types


class Builder:
    """Builds a program statement by statement.

    A tensor's name may be bound again; every binding becomes a value with a different name.
    """

    def __init__(self, dump: Dump) -> None:
        self.types = Types(dump)
        self.names = Names()
        self.scope: dict[str, Value] = {}  # T4, Communication 7, Stream 0 and index i0, as printed
        self.body: list[Statement] = []
        self.loops: dict[Value, Size] = {}  # loops around this statement: each index, and its number of rounds
        self.unsliced: set[str] = set()  # the values that hold all slices of their Stream axis
        self.owned: list[dict[str, Value]] = [{}]  # for each block around this statement, the buffers not freed yet
        self.memory: dict[str, str] = {}  # the buffer behind a view
        self.streams = Streams(dump.streams)

    def define(self, key: str, name: str, type: Type, span: Span) -> Value:
        self.scope[key] = Value(self.names.fresh(name), type, span)
        return self.scope[key]

    def bind(self, tensor: TensorNode, type: TensorType) -> Value:
        value = self.define(tensor.name, tensor.name, type, tensor.span)
        if not self.loops or (_stream(tensor) and not self.sliced(tensor)):
            self.unsliced.add(value.name)
        return value

    def tensor(self, tensor: TensorNode) -> Value:
        if tensor.name not in self.scope:
            known = [n for n in self.scope if n.startswith("T")]
            hint = did_you_mean(tensor.name, known)
            expected = f"one of: {', '.join(known) or 'none'}"
            raise error(f"{tensor.name} does not exist here", tensor.span, expected=expected, hint=hint)
        return self.scope[tensor.name]

    def operand(self, tensor: TensorNode) -> Value:
        """Return the value of a tensor operand: in a loop, the round's slice if the tensor was made before the loop."""
        value = self.tensor(tensor)
        cut = self.cut(tensor, value) if self.loops else None
        return self.slice(value, *cut, tensor) if cut else value

    def slice(self, unsliced: Value, axis: int, count: Size, tensor: TensorNode) -> Value:
        """Return this round's slice of an axis if the value has all `count` slices, else the value."""
        if unsliced.name not in self.unsliced:
            return unsliced
        index = self.loop_over(count)
        if index is None:
            message = f"{tensor.name} is meant in {count} slices, and no loop around this has {count} rounds"
            raise error(message, tensor.span, hint="ShardByStream says which slice is meant")
        key = f"slice {index.name} of axis {axis} of {unsliced.name}"
        if key not in self.scope:
            chunk = host.Chunk(unsliced, self.temporary(tensor, unsliced.tensor), Ref(index), count, axis)
            chunk = replace(chunk, span=tensor.span)
            chunk = replace(chunk, out=replace(chunk.out, type=chunk.infer()))
            self.emit(chunk, tensor.span)
            self.scope[key] = chunk.out
        return self.scope[key]

    def cut(self, tensor: TensorNode, x: Value) -> tuple[int, Size] | None:
        """Return the axis of `x` with a Stream axis in its printed tensor, and the number of slices."""
        kept = [group for group in self.types.logical(tensor, x.tensor.partial)[0] if not group.reduced]
        for axis, group in enumerate(kept):
            for k, domain in enumerate(group.domains):
                if domain.on == "stream":
                    if not all(outer.on for outer in group.domains[:k]):
                        message = f"the slices of axis {axis} of {tensor.name} are not contiguous"
                        raise error(message, domain.span, expected="the streamIdx axis outside of all but device axes")
                    return axis, domain.extent.size
        return None

    def destination(self, tensor: TensorNode) -> Value:
        """Return the value that a statement writes: the tensor's memory if it has some, else new memory."""
        return self.operand(tensor) if tensor.name in self.scope else self.allocate(tensor)

    def allocate(self, tensor: TensorNode) -> Value:
        value = self.bind(tensor, self.type_of(tensor))
        self.emit(host.Allocate(value), tensor.span)
        return value

    def temporary(self, near: TensorNode, type: TensorType) -> Value:
        return Value(self.names.fresh(near.name), type, near.span)

    def type_of(self, tensor: TensorNode) -> TensorType:
        return self.types.type_of(tensor, sliced=self.sliced(tensor))

    def sliced(self, tensor: TensorNode) -> bool:
        """Return True if a result here is one round's slice: in a loop with as many rounds as the tensor has slices."""
        stream = _stream(tensor)
        return stream is not None and self.loop_over(stream.extent.size) is not None

    def loop_over(self, slices: Size) -> Value | None:
        """Return the index of the innermost enclosing loop with as many rounds."""
        resolve = self.types.sizes.resolve
        return next((i for i in reversed(self.loops) if resolve(self.loops[i]) == resolve(slices)), None)

    def emit(self, statement: Statement, span: Span | None) -> None:
        self.body.append(replace(statement, span=span))
        match statement:
            case host.Allocate(out=out):
                self.owned[-1][out.name] = out
            case ViewStatement(x=x, out=out):
                self.memory[out.name] = self.memory.get(x.name, x.name)
            case host.FreeBuffer(x=x):
                for owned in self.owned:
                    owned.pop(self.memory.get(x.name, x.name), None)

    def free_the_rest(self, kept: Iterable[Value] = ()) -> None:
        """Free the buffers of a block except `kept`. nvFuser frees what a dump does not deallocate."""
        names = {self.memory.get(value.name, value.name) for value in kept}
        for name, value in self.owned[-1].copy().items():
            if name not in names:
                self.emit(host.FreeBuffer(value), value.span)
        self.owned.pop()

    def same_shape(self, a: Value, b: Value, span: Span) -> None:
        equate(self.types.sizes, pairwise(a.tensor, a, b.tensor, b), span)


def _stream(tensor: TensorNode) -> IterDomain | None:
    return next((d for d in tensor.domains if d.on == "stream" and d.iter_type != "r"), None)
