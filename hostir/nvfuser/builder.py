"""Build a host program while a dump is read: add statements, and keep track of names in scope and of buffers."""

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
    """Builds a host program statement by statement.

    A dump may use one name for several tensors, one after another. Each of these tensors becomes a value with a
    different name.

    Fields:
        types: the types of printed tensors.
        names: the names that the program uses.
        scope: the values in scope, by the names that the dump prints, such as T4, Communication 7, Stream 0 and i0.
        body: the statements of the current block.
        loops: a map from the index of each loop around the current statement to the number of rounds of the loop.
        unsliced: the names of values that hold all slices of a tensor with a stream axis.
        owned: the buffers that are not freed yet, by name. There is one entry for each block around the current
            statement.
        memory: a map from the name of each view to the name of its buffer.
        streams: the streams that the dump uses.
    """

    def __init__(self, dump: Dump) -> None:
        self.types = Types(dump)
        self.names = Names()
        self.scope: dict[str, Value] = {}
        self.body: list[Statement] = []
        self.loops: dict[Value, Size] = {}
        self.unsliced: set[str] = set()
        self.owned: list[dict[str, Value]] = [{}]
        self.memory: dict[str, str] = {}
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
        """Return the value for a printed operand.

        In a loop over the slices of the operand, the value is the slice of the current round.
        """
        value = self.tensor(tensor)
        cut = self.cut(tensor, value) if self.loops else None
        return self.slice(value, *cut, tensor) if cut else value

    def slice(self, unsliced: Value, axis: int, count: Size, tensor: TensorNode) -> Value:
        """Return the slice of a value for the current round of a loop. If there is no such slice yet, add a `chunk`.

        A value that is already a slice is returned unchanged.

        Args:
            unsliced: the value.
            axis: the axis that is cut into slices.
            count: the number of slices. The slices belong to the innermost loop with this number of rounds.
            tensor: the printed tensor, for names and messages.
        """
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
        """Return the index of the axis of `x` that the dump cuts into slices for streams, and the number of slices.

        `tensor` is the printed form of `x`. Return None if `tensor` has no stream axis.
        """
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
        """Return the value that a statement writes for a printed result.

        If the value does not exist yet, allocate it.
        """
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
        """Return True if the current statement computes only one slice of a printed tensor.

        It does if the number of rounds of a loop around the statement is the number of slices of the tensor.
        """
        stream = _stream(tensor)
        return stream is not None and self.loop_over(stream.extent.size) is not None

    def loop_over(self, slices: Size) -> Value | None:
        """Return the index of the innermost loop around this statement that has `slices` rounds.

        Return None if no such loop exists.
        """
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
        """End a block: free the buffers that the block allocated but did not free, except buffers of the values `kept`.

        A dump may leave buffers without a Deallocate, because nvFuser then frees them automatically.
        """
        names = {self.memory.get(value.name, value.name) for value in kept}
        for name, value in self.owned[-1].copy().items():
            if name not in names:
                self.emit(host.FreeBuffer(value), value.span)
        self.owned.pop()

    def same_shape(self, a: Value, b: Value, span: Span) -> None:
        equate(self.types.sizes, pairwise(a.tensor, a, b.tensor, b), span)


def _stream(tensor: TensorNode) -> IterDomain | None:
    return next((d for d in tensor.domains if d.on == "stream" and d.iter_type != "r"), None)
