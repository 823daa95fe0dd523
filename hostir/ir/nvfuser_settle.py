"""The sizes that statements force to be equal, and the program in which equal sizes have one name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hostir.ir.host_ops import Chunk, For
from hostir.ir.nvfuser_layout import Sizes
from hostir.ir.op import Phase, Statement
from hostir.ir.program import Program, rewrite
from hostir.ir.sizes import Size
from hostir.ir.source import Span, error
from hostir.ir.tensor_ops import CONTRACTED, Binary, TensorOp
from hostir.ir.types import TensorType
from hostir.ir.values import Value
from hostir.ir.view_ops import ViewOp

Place = tuple[Size, object, int]  # a size, the tensor that has it, and in which axis


def equate(sizes: Sizes, pairs: Iterable[tuple[Place, Place]], span: Span | None) -> None:
    """Makes the sizes of each pair equal; raises where they cannot be."""
    for (a, a_name, a_axis), (b, b_name, b_axis) in pairs:
        if not sizes.equal(a, b):
            a, b = sizes.resolve(a), sizes.resolve(b)
            message = f"sizes do not fit: {a_name} has {a} in axis {a_axis}, {b_name} has {b} in axis {b_axis}"
            raise error(message, span, expected="equal sizes")


def pairwise(a: TensorType, a_name: object, b: TensorType, b_name: object) -> Iterator[tuple[Place, Place]]:
    """The axes of two tensors of one shape. Unequal numbers of axes are left to the checks of the program."""
    if len(a.axes) == len(b.axes):
        for k, (one, other) in enumerate(zip(a.shape, b.shape, strict=True)):
            yield (one, a_name, k), (other, b_name, k)


def computed(s: TensorOp) -> Iterator[tuple[Place, Place]]:
    """The sizes that a computation forces to be equal: those that its maps bring together."""
    shape = s.out.tensor.shape
    contracted: list[Place] = []
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
    """The maps of a computation whose sizes may still have several names."""
    if not isinstance(s, Binary):
        return s.maps()
    axes = range(len(s.out.tensor.axes))  # its own maps ask for sizes that are known to align
    return tuple(tuple(axes[len(axes) - len(v.tensor.axes) :]) for v in s.operands)


def settled(program: Program, sizes: Sizes) -> Program:
    """The same program in symbols that stand for themselves; what views give is inferred anew."""
    env = {v.name: _settle(v, sizes) for v in program.inputs}
    for s in program.walk():
        defined = s.defines(Phase.HOST)
        if defined is None:
            continue
        env[defined.name] = _settle(defined, sizes)
        if isinstance(s, ViewOp) and isinstance(type := _sized(s.rename(env), sizes).infer(), TensorType):
            env[defined.name] = replace(defined, type=type)
    body = rewrite((s.rename(env) for s in program.body), lambda s: [_sized(s, sizes)])
    return replace(
        program,
        inputs=tuple(env[v.name] for v in program.inputs),
        outputs=tuple(env[v.name] for v in program.outputs),
        body=body,
    )


def _settle(value: Value, sizes: Sizes) -> Value:
    if not isinstance(value.type, TensorType):
        return value
    type = sizes.settle(value.type)
    for factor in (f for axis in type.axes for f in axis.factors):
        part = type.local_factor(factor)
        if not part.symbols and part.den != 1:
            where = f" over {factor.on}" if factor.on else ""
            raise error(f"{value.name} has an axis of {factor.extent}{where}, which does not divide", value.span)
    return replace(value, type=type)


def _sized(s: Statement, sizes: Sizes) -> Statement:
    """A statement with its own sizes settled."""
    return replace(s, count=sizes.resolve(s.count)) if isinstance(s, (For, Chunk)) else s
