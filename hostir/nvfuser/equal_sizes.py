"""Find sizes that have different names in a dump but must be equal, and give them one name in the program.

For example, a matmul forces the last axis of its first operand and the first axis of its second operand to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hostir.ir.host_ops import Chunk, For
from hostir.ir.op import Phase, Statement, Value
from hostir.ir.program import Program, rewrite
from hostir.ir.sharding import CONTRACTED
from hostir.ir.sizes import Size
from hostir.ir.source import Span, error
from hostir.ir.tensor_ops import Binary, TensorOp
from hostir.ir.types import Axis, Factor, TensorType
from hostir.ir.view_ops import ViewStatement

SizeUse = tuple[Size, object, int]  # the size of a tensor's axis, the tensor (or its name), the index of the axis


class EqualSizes:
    """The sizes that a dump forces to be equal although it gives them different names.

    Of several equal symbols, one is *canonical*. The other symbols are defined by canonical symbols and numbers.

    Fields:
        order: the position of each symbol in the order in which symbols first appear in the dump.
        known: the definition of each symbol that is not canonical.
    """

    def __init__(self, symbols: Iterable[str]) -> None:
        self.order = {name: k for k, name in enumerate(symbols)}
        self.known: dict[str, Size] = {}

    def resolve(self, size: Size) -> Size:
        result = Size(size.num, size.den)
        for name, power in size.symbols:
            meaning = self.known.get(name, Size(symbols=((name, 1),)))
            for _ in range(abs(power)):
                result = result * meaning if power > 0 else result / meaning
        return result

    def equal(self, a: Size, b: Size) -> bool:
        """Record that two sizes are equal; return False if they cannot be equal.

        The equation defines one of its symbols by the other symbols. If there is a choice, it defines the symbol that
        comes last in `order`.
        """
        ratio = self.resolve(a) / self.resolve(b)
        free = [(self.order[name], name, power) for name, power in ratio.symbols if abs(power) == 1]
        if not ratio.symbols:
            return ratio.is_one
        if not free:
            return True
        _, name, power = max(free)
        symbol = Size(symbols=((name, 1),))
        meaning = symbol / ratio if power == 1 else symbol * ratio
        if not meaning.symbols and meaning.den != 1:
            return False
        self.known[name] = meaning
        self.known = {n: self.resolve(m) for n, m in self.known.items()}
        return True

    def canonical(self, type: TensorType) -> TensorType:
        """Return the type with all sizes written in canonical symbols, and all axes in normal form."""
        return replace(type, axes=tuple(self._axis(axis) for axis in type.axes))

    def _axis(self, axis: Axis) -> Axis:
        return Axis(tuple(Factor(self.resolve(f.extent), f.on) for f in axis.factors)).normal()

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """The symbols that are not canonical, each with its definition as text, in the order of first appearance."""
        return tuple((name, str(self.known[name])) for name in self.order if name in self.known)


def equate(sizes: EqualSizes, pairs: Iterable[tuple[SizeUse, SizeUse]], span: Span | None) -> None:
    """Record that the two sizes of each pair are equal. Raise a HostIRError at `span` if they cannot be equal."""
    for (a, a_name, a_axis), (b, b_name, b_axis) in pairs:
        if not sizes.equal(a, b):
            a, b = sizes.resolve(a), sizes.resolve(b)
            message = f"sizes do not fit: {a_name} has {a} in axis {a_axis}, {b_name} has {b} in axis {b_axis}"
            raise error(message, span, expected="equal sizes")


def pairwise(a: TensorType, a_name: object, b: TensorType, b_name: object) -> Iterator[tuple[SizeUse, SizeUse]]:
    """Yield the pairs of corresponding axes of two tensors that must have equal shapes.

    Yield nothing if the tensors have different numbers of axes. Other checks report this.
    """
    if len(a.axes) == len(b.axes):
        for k, (one, other) in enumerate(zip(a.shape, b.shape, strict=True)):
            yield (one, a_name, k), (other, b_name, k)


def computed(s: TensorOp) -> Iterator[tuple[SizeUse, SizeUse]]:
    """Yield the pairs of axes that a computation matches, and that must therefore have equal sizes."""
    shape = s.out.tensor.shape
    contracted: list[SizeUse] = []
    for operand, map in zip(s.operands, maps_of(s), strict=True):
        if len(map) != len(operand.tensor.axes) or max(map, default=0) >= len(shape):
            continue
        for k, (size, to) in enumerate(zip(operand.tensor.shape, map, strict=True)):
            if to == CONTRACTED:
                contracted.append((size, operand, k))
            elif not (isinstance(s, Binary) and size.is_one):
                yield (size, operand, k), (shape[to], s.out, to)
    for place in contracted[1:]:
        yield contracted[0], place


def maps_of(s: TensorOp) -> tuple[tuple[int, ...], ...]:
    """Return a map for each operand of a computation.

    The map gives, for each axis of the operand, the matching axis of the result. Unlike `TensorOp.maps`, this function
    also works while equal sizes still have different names.
    """
    if not isinstance(s, Binary):
        return s.maps()
    axes = range(len(s.out.tensor.axes))  # `Binary.maps` requires sizes with equal names
    return tuple(tuple(axes[len(axes) - len(v.tensor.axes) :]) for v in s.operands)


def with_canonical_sizes(program: Program, sizes: EqualSizes) -> Program:
    """Return the program with all sizes written in canonical symbols. The types of views are inferred again."""
    env = {v.name: _canonical(v, sizes) for v in program.inputs}
    for s in program.walk():
        defined = s.defines(Phase.HOST)
        if defined is None:
            continue
        env[defined.name] = _canonical(defined, sizes)
        if isinstance(s, ViewStatement) and isinstance(type := _sized(s.rename(env), sizes).infer(), TensorType):
            env[defined.name] = replace(defined, type=type)
    body = rewrite((s.rename(env) for s in program.body), lambda s: [_sized(s, sizes)])
    return replace(
        program,
        inputs=tuple(env[v.name] for v in program.inputs),
        outputs=tuple(env[v.name] for v in program.outputs),
        body=body,
    )


def _canonical(value: Value, sizes: EqualSizes) -> Value:
    if not isinstance(value.type, TensorType):
        return value
    type = sizes.canonical(value.type)
    for factor in (f for axis in type.axes for f in axis.factors):
        part = type.local_factor(factor)
        if not part.symbols and part.den != 1:
            where = f" over {factor.on}" if factor.on else ""
            raise error(f"{value.name} has an axis of {factor.extent}{where}, which does not divide", value.span)
    return replace(value, type=type)


def _sized(s: Statement, sizes: EqualSizes) -> Statement:
    """Write the number of rounds of a loop, or of pieces of a chunk, in canonical symbols; return the statement.

    All other statements are returned unchanged.
    """
    return replace(s, count=sizes.resolve(s.count)) if isinstance(s, (For, Chunk)) else s
