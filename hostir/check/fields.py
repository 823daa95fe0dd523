"""Check the types of the values in the fields of a program and of its statements.

The parser guarantees these types. A program that was built in Python may have values of wrong types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite, prod

from hostir.ir.op import (
    VALUE_CODECS,
    Bin,
    Codec,
    Lit,
    Phase,
    Ref,
    Statement,
    Value,
    codecs_of,
    defaults_of,
)
from hostir.ir.program import Program
from hostir.ir.sizes import Size
from hostir.ir.source import Diagnostic, described
from hostir.ir.types import DTYPES, FLAG, STREAM, Axis, Factor, Kind, Mesh, TensorType

KNOWN = "_well_formed"


def malformed(program: Program) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each field of a program or of its statements that holds a value of the wrong type."""
    parts: dict[str, tuple[bool, str]] = {
        "name": (isinstance(program.name, str), "a name"),
        "phase": (isinstance(program.phase, Phase), "a Phase"),
        "meshes": (bool(program.meshes) and _all(program.meshes, _is_mesh), "meshes, at least one"),
        "inputs": (_all(program.inputs, _is_value), "values"),
        "outputs": (_all(program.outputs, _is_value), "values"),
        "body": (isinstance(program.body, tuple), "statements"),
        "streams": (_is_int(program.streams), "an integer from 0"),
        "aliases": (isinstance(program.aliases, tuple), "pairs of names"),
    }
    for name, (holds, expected) in parts.items():
        if not holds:
            yield Diagnostic(f"field '{name}' of the program is {described(getattr(program, name))}", expected=expected)
            return
    yield from _block(program.body)


def _block(body: tuple[object, ...]) -> Iterator[Diagnostic]:
    for s in body:
        if not isinstance(s, Statement):  # a program that was built in Python may hold anything
            yield Diagnostic(f"{described(s)} stands among the statements", expected="statements")
            continue
        for name, codec in codecs_of(type(s)).items():
            held = getattr(s, name)
            left_out = held is None and defaults_of(type(s)).get(name, Codec) is None
            if not left_out and not _holds(codec, held):
                what = f"field '{name}' of '{s.keyword()}' is {described(held)}"
                yield Diagnostic(what, s.span, expected=codec.value)
            elif codec is Codec.BLOCK:
                yield from _block(held)


def _holds(codec: Codec, held: object) -> bool:
    """Return True if a value has the type that a field with this codec must have."""
    if codec in VALUE_CODECS:
        return _is_value(held)
    if codec in (Codec.STREAM, Codec.INDEX):
        return _is_expr(held)
    if codec is Codec.SIZE:
        return _is_size(held)
    if codec is Codec.INT:
        return _is_int(held)
    if codec is Codec.INTS:
        return _all(held, _is_int)
    if codec is Codec.NUMBER:
        return isinstance(held, float) and isfinite(held)
    return isinstance(held, tuple if codec is Codec.BLOCK else str)


def _all(held: object, is_one: Callable[[object], bool]) -> bool:
    return isinstance(held, tuple) and all(map(is_one, held))


def _is_int(held: object) -> bool:
    return isinstance(held, int) and not isinstance(held, bool) and held >= 0


def _is_name(held: object) -> bool:
    return isinstance(held, str)


def _is_expr(held: object) -> bool:
    if isinstance(held, Bin):
        return held.op in ("+", "-", "*", "/", "%") and _is_expr(held.left) and _is_expr(held.right)
    return _is_value(held.value) if isinstance(held, Ref) else isinstance(held, Lit) and _is_int(held.value)


def _is_size(held: object) -> bool:
    """Return True if a value is a valid `Size`: an integer of at least 1, or an expression with symbols."""
    if not isinstance(held, Size) or not (_is_int(held.num) and _is_int(held.den) and held.num and held.den):
        return False
    return held.den == 1 or bool(held.symbols)


def _is_value(held: object) -> bool:
    if not isinstance(held, Value) or not isinstance(held.name, str):
        return False
    return isinstance(held.type, Kind) or (isinstance(held.type, TensorType) and _is_tensor_type(held.type))


def _is_tensor_type(held: TensorType) -> bool:
    """Return True if a tensor type is valid.

    The answer is cached in the type, because many statements share one type.
    """
    if KNOWN not in vars(held):
        vars(held)[KNOWN] = _is_sound(held)
    return bool(vars(held)[KNOWN])


def _is_sound(held: TensorType) -> bool:
    known_dtype, known_mesh = held.dtype in (*DTYPES.values(), FLAG), held.mesh is None or _is_mesh(held.mesh)
    if not (known_dtype and known_mesh and _all(held.axes, _is_axis) and _all(held.partial, _is_name)):
        return False
    marks = [mark for axis in held.axes for mark in axis.marks if mark != STREAM] + list(held.partial)
    known = held.mesh.axes if held.mesh else ()
    return len(set(marks)) == len(marks) and all(mark in known for mark in marks)


def _is_axis(held: object) -> bool:
    return isinstance(held, Axis) and bool(held.factors) and _all(held.factors, _is_factor)


def _is_factor(held: object) -> bool:
    return isinstance(held, Factor) and _is_size(held.extent) and (held.on is None or isinstance(held.on, str))


def _is_mesh(held: object) -> bool:
    if not isinstance(held, Mesh) or not isinstance(held.name, str) or not _all(held.axes, _is_name):
        return False
    if not _all(held.shape, _is_int) or not _all(held.devices, _is_int) or not held.devices:
        return False
    fits = len(held.axes) == len(held.shape) > 0 and prod(held.shape) == len(held.devices)
    return fits and len(set(held.devices)) == len(held.devices)
