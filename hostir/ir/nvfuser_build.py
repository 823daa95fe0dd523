"""What reading an nvFuser dump keeps: scopes of names, the statements so far, and what streams and indices mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hostir.ir import host_ops as host
from hostir.ir.nvfuser_settle import equate, pairwise
from hostir.ir.nvfuser_syntax import Dump, Formula, IterDomain, StreamNode, Tensor, Token
from hostir.ir.nvfuser_types import Types
from hostir.ir.op import Statement
from hostir.ir.program import Names
from hostir.ir.sizes import Size
from hostir.ir.source import Span, did_you_mean, error
from hostir.ir.types import Kind, TensorType, Type
from hostir.ir.values import Bin, Expr, Lit, Ref, Value
from hostir.ir.view_ops import ViewOp

STREAMS = 4  # nvFuser's default number of streams


class Builder:
    """Builds a program statement by statement.

    A tensor's name may be bound anew; every binding becomes a value with a name of its own.
    """

    def __init__(self, dump: Dump) -> None:
        self.types = Types(dump)
        self.names = Names()
        self.scope: dict[str, Value] = {}  # T4, Communication 7, Stream 0 and index i0, as printed
        self.body: list[Statement] = []
        self.loops: dict[Value, Size] = {}  # those around this statement: each index, and how many rounds there are
        self.whole: set[str] = set()  # the values that hold all slices of their Stream axis
        self.owned: list[dict[str, Value]] = [{}]  # for each block around this statement, the buffers not freed yet
        self.memory: dict[str, str] = {}  # the buffer behind a view
        self.pool = STREAMS if dump.streams is None else dump.streams
        self.uses_pool = dump.streams is not None
        self.lone_streams: dict[str, int] = {}

    # Names and scopes --------------------------------------------------------------------------------------------
    def define(self, key: str, name: str, type: Type, span: Span) -> Value:
        self.scope[key] = Value(self.names.fresh(name), type, span)
        return self.scope[key]

    def bind(self, tensor: Tensor, type: TensorType) -> Value:
        value = self.define(tensor.name, tensor.name, type, tensor.span)
        if not self.loops or (_stream(tensor) and not self.sliced(tensor)):
            self.whole.add(value.name)
        return value

    def tensor(self, tensor: Tensor) -> Value:
        if tensor.name not in self.scope:
            known = [n for n in self.scope if n.startswith("T")]
            hint = did_you_mean(tensor.name, known)
            expected = f"one of: {', '.join(known) or 'none'}"
            raise error(f"{tensor.name} does not exist here", tensor.span, expected=expected, hint=hint)
        return self.scope[tensor.name]

    def operand(self, tensor: Tensor) -> Value:
        """What a tensor stands for in a statement: in a loop, the round's slice of one that was there before it."""
        value = self.tensor(tensor)
        cut = self.cut(tensor, value) if self.loops else None
        return self.slice(value, *cut, tensor) if cut else value

    def slice(self, whole: Value, axis: int, count: Size, tensor: Tensor) -> Value:
        """This round's of so many slices of an axis, where the value has all of them."""
        if whole.name not in self.whole:
            return whole
        index = self.loop_over(count)
        if index is None:
            message = f"{tensor.name} is meant in {count} slices, and no loop around this has {count} rounds"
            raise error(message, tensor.span, hint="ShardByStream says which slice is meant")
        key = f"slice {index.name} of axis {axis} of {whole.name}"
        if key not in self.scope:
            chunk = host.Chunk(whole, self.temporary(tensor, whole.tensor), Ref(index), count, axis)
            chunk = replace(chunk, span=tensor.span)
            chunk = replace(chunk, out=replace(chunk.out, type=chunk.infer()))
            self.emit(chunk, tensor.span)
            self.scope[key] = chunk.out
        return self.scope[key]

    def cut(self, tensor: Tensor, x: Value) -> tuple[int, Size] | None:
        """The axis of `x` that has a Stream axis in it, as a tensor is printed, and the number of slices."""
        kept = [group for group in self.types.logical(tensor, x.tensor.partial)[0] if not group.reduced]
        for axis, group in enumerate(kept):
            for k, domain in enumerate(group.domains):
                if domain.on == "stream":
                    if not all(outer.on for outer in group.domains[:k]):
                        message = f"the slices of axis {axis} of {tensor.name} are not contiguous"
                        raise error(message, domain.span, expected="the streamIdx axis outside of all but device axes")
                    return axis, domain.extent.size
        return None

    def destination(self, tensor: Tensor) -> Value:
        """What a statement writes: memory that the tensor already stands for, or else new memory."""
        return self.operand(tensor) if tensor.name in self.scope else self.allocate(tensor)

    def allocate(self, tensor: Tensor) -> Value:
        value = self.bind(tensor, self.type_of(tensor))
        self.emit(host.Allocate(value), tensor.span)
        return value

    def temporary(self, near: Tensor, type: TensorType) -> Value:
        return Value(self.names.fresh(near.name), type, near.span)

    def type_of(self, tensor: Tensor) -> TensorType:
        return self.types.type_of(tensor, sliced=self.sliced(tensor))

    def sliced(self, tensor: Tensor) -> bool:
        """Whether what is made here is one round's slice: in a loop with as many rounds as the tensor has slices."""
        stream = _stream(tensor)
        return stream is not None and self.loop_over(stream.extent.size) is not None

    def loop_over(self, slices: Size) -> Value | None:
        """The index of the innermost loop around this with as many rounds."""
        resolve = self.types.sizes.resolve
        return next((i for i in reversed(self.loops) if resolve(self.loops[i]) == resolve(slices)), None)

    def emit(self, statement: Statement, span: Span | None) -> None:
        self.body.append(replace(statement, span=span))
        match statement:
            case host.Allocate(out=out):
                self.owned[-1][out.name] = out
            case ViewOp(x=x, out=out):
                self.memory[out.name] = self.memory.get(x.name, x.name)
            case host.FreeBuffer(x=x):
                for owned in self.owned:
                    owned.pop(self.memory.get(x.name, x.name), None)

    def free_the_rest(self, kept: Iterable[Value] = ()) -> None:
        """Ends a block: its buffers are freed but for what is kept. nvFuser frees what a dump does not deallocate."""
        names = {self.memory.get(value.name, value.name) for value in kept}
        for name, value in self.owned[-1].copy().items():
            if name not in names:
                self.emit(host.FreeBuffer(value), value.span)
        self.owned.pop()

    def same_shape(self, a: Value, b: Value, span: Span) -> None:
        equate(self.types.sizes, pairwise(a.tensor, a, b.tensor, b), span)

    # Streams and indices -----------------------------------------------------------------------------------------
    def stream_node(self, node: StreamNode) -> None:
        if node.verb == "get":
            if not isinstance(node.stream, Token):
                raise error("the current stream needs a name", node.span, expected="such as Stream 0")
            value = self.define(f"Stream {node.stream.text}", "stream", Kind.STREAM, node.span)
            self.emit(host.CurrentStream(value), node.span)
            return
        stream = self.stream(node.stream)
        self.emit(host.SetStream(stream) if node.verb == "set" else host.Synchronize(stream), node.span)

    def stream(self, formula: Formula) -> Expr:
        """A stream: one that was got, or a member of the pool by index.

        In nvFuser every index has a stream of its own; the pool has so many, and an index beyond it begins again at 0.
        One that was made elsewhere, `Stream 0x1f`, becomes one more member of the pool.
        """
        if isinstance(formula, Token):
            if (got := self.scope.get(f"Stream {formula.text}")) is not None:
                return Ref(got)
            if formula.text[:2].lower() == "0x":
                self.uses_pool = True
                return Lit(self.pool + self.lone_streams.setdefault(formula.text, len(self.lone_streams)))
        self.uses_pool = True
        index = self.index(formula)
        if isinstance(index, Lit):
            return Lit(index.value % self.pool)
        return index if self.in_pool(index) else Bin("%", index, Lit(self.pool))

    def in_pool(self, index: Expr) -> bool:
        """Whether an index is known to stay inside the pool."""
        if isinstance(index, Ref):
            rounds = self.loops[index.value].value
            return rounds is not None and rounds <= self.pool
        right = index.right if isinstance(index, Bin) and index.op == "%" else None
        return isinstance(right, Lit) and right.value <= self.pool

    def index(self, formula: Formula) -> Expr:
        if not isinstance(formula, Token):
            left, right = self.index(formula.left), self.index(formula.right)
            if formula.op in "/%" and right == Lit(0):
                raise error("an index is divided by zero", self.first(formula).span)
            return Bin(formula.op, left, right)
        if formula.text.isdecimal():
            return Lit(int(formula.text))
        if formula.text == "numberOfStreams":
            return Lit(self.pool)
        found = self.scope.get(f"index {formula.text}")
        if found is None:
            known = [n.removeprefix("index ") for n in self.scope if n.startswith("index ")]
            hint = "an index that is not a loop's, such as a rank, has no meaning here: every rank runs one program"
            message, expected = f"'{formula.text}' is no loop index here", f"one of: {', '.join(known) or 'none'}"
            raise error(message, formula.span, expected=expected, hint=did_you_mean(formula.text, known) or hint)
        return Ref(found)

    def first(self, formula: Formula) -> Token:
        return formula if isinstance(formula, Token) else self.first(formula.left)


def _stream(tensor: Tensor) -> IterDomain | None:
    return next((d for d in tensor.domains if d.on == "stream" and d.kind != "r"), None)
