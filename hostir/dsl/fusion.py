"""Define `Fusion`, the object that collects the inputs, statements and outputs of a fusion while users build it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import replace
from types import TracebackType
from typing import Any

from hostir.dsl.mesh import NAME
from hostir.dsl.tensors import SizeLike, Tensor
from hostir.ir.op import Phase, Statement, Value
from hostir.ir.program import Names, Program, check_hosts
from hostir.ir.sizes import Size
from hostir.ir.source import Span, described, did_you_mean, error, user_span
from hostir.ir.tensor_ops import TensorOp
from hostir.ir.types import DTYPES, Axis, DType, Mesh, TensorType

TORCH_NAMES = {
    **{"torch.float64": "f64", "torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"},
    **{"torch.float8_e4m3fn": "f8e4m3", "torch.float8_e5m2": "f8e5m2", "torch.int32": "i32", "torch.int64": "i64"},
}
MAX_AXES = 64  # torch's limit for a tensor

_building: ContextVar[Fusion | None] = ContextVar("building", default=None)


class Fusion:
    """A tensor program, before lowering. Build it inside a `with` block; annotate its tensors there or later.

        with hi.Fusion("layer") as fusion:
            x = hi.tensor("x", ["M", 64])
            w = hi.tensor("w", [64, 32])
            y = x @ w
            fusion.output(y)

    A result has the name of the variable that it is assigned to. `print(fusion)` shows the program. Raises HostIRError
    for an invalid name.

    Args:
        name: letters, digits and `_`, not starting with a digit.
    """

    def __init__(self, name: str = "fusion") -> None:
        self.span = user_span()
        check_name(name, "a fusion", self.span)
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._statements: list[Statement] = []
        self._names = Names()
        self._entered: list[Token[Fusion | None]] = []

    def __enter__(self) -> Fusion:
        self._entered.append(_building.set(self))
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        _building.reset(self._entered.pop())

    def output(self, *tensors: Tensor) -> None:
        """Declare tensors as outputs. A call returns the outputs in the order in which they are declared.

        Raises HostIRError for a tensor of another fusion, for an input, and for a tensor that is already an output.
        """
        span = user_span()
        for t in tensors:
            if not isinstance(t, Tensor) or t.fusion is not self:
                hint = "build it inside this fusion's 'with'"
                raise error(f"not a tensor of fusion @{self.name}: {described(t)}", span, hint=hint)
            if t in self.inputs:
                expected = "the result of a computation"
                raise error(f"the output %{t.name} is an input, never computed", span, expected=expected)
            if t in self.outputs:
                raise error(f"%{t.name} is declared as an output twice", span)
            self.outputs.append(t)

    def program(self) -> Program:
        """Return the fusion as a program, with all annotations so far. `hi.lower` lowers this program.

        Raises HostIRError if there is no output.
        """
        if not self.outputs:
            raise error(f"fusion @{self.name} has no output", self.span, hint="fusion.output(c)")
        meshes: dict[tuple[Any, ...], Mesh] = {}
        types, hosts = {}, self._hosts()
        for t in self.tensors.values():
            mesh = None
            if t.mesh:
                key = (t.mesh.names, t.mesh.shape, t.mesh.devices)
                name = f"mesh_{len(meshes)}" if meshes else "mesh"
                mesh = meshes.setdefault(key, Mesh(name, *key, hosts))
            types[t.name] = TensorType(t.dtype, t.axes, mesh, t.partial_over)
        if hosts:
            check_hosts(meshes.values(), self.span)
        values = {t.name: Value(t.name, types[t.name], t.span) for t in self.tensors.values()}
        return Program(
            self.name,
            Phase.FUSION,
            tuple(meshes.values()) or (Mesh("mesh", ("didx",), (1,), (0,)),),
            tuple(values[t.name] for t in self.inputs),
            tuple(values[t.name] for t in self.outputs),
            tuple(s.rename(values) for s in self._statements),
        )

    def _hosts(self) -> int:
        """Return the number of hosts that meshes of tensors state; 0 if none states it."""
        stated = sorted({t.mesh.hosts for t in self.tensors.values() if t.mesh and t.mesh.hosts})
        if len(stated) > 1:
            what = f"the meshes of @{self.name} state {' and '.join(map(str, stated))} hosts"
            raise error(what, self.span, expected="one number for all")
        return stated[0] if stated else 0

    def size(self, extent: SizeLike, span: Span | None) -> Size:
        """Return `extent` as a size. Raise if it has a symbol that does not occur in the shape of any input."""
        size = Size.of(extent, span)
        known = {n for t in self.inputs for s in t.shape for n in s.names}
        if unknown := sorted(size.names - known):
            hint = did_you_mean(unknown[0], known) or "sizes get their names from the shapes of inputs"
            expected = f"one of: {', '.join(sorted(known)) or 'none'}"
            raise error(f"unknown size name '{unknown[0]}'", span, expected=expected, hint=hint)
        return size

    def _new(self, name: str, dtype: DType, shape: Sequence[Size], span: Span | None) -> Tensor:
        t = Tensor(self, self._names.fresh(name), dtype, shape, span)
        self.tensors[t.name] = t
        return t

    def __str__(self) -> str:
        return str(self.program())

    def __repr__(self) -> str:
        return f"fusion @{self.name}"

    def _repr_markdown_(self) -> str:
        return self.program()._repr_markdown_()


def check_name(name: object, what: str, span: Span | None) -> None:
    """Raise if `name` is not a valid name. `what` is the word for the named object in the message, such as "tensor"."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise error(
            f"{described(name)} cannot name {what}", span, expected="letters, digits and _, not starting with a digit"
        )


def building(span: Span | None) -> Fusion:
    """Return the fusion of the innermost `with` block; raise outside such a block."""
    fusion = _building.get()
    if fusion is None:
        raise error("no fusion is being built", span, hint="with hi.Fusion('name') as fusion: ...")
    return fusion


def sizes(shape: Any, span: Span | None, fusion: Fusion | None = None) -> list[Size]:
    """Return the sizes of a shape.

    If `fusion` is given, raise for a symbol that does not occur in the shape of any of its inputs.
    """
    if isinstance(shape, str | bytes) or not isinstance(shape, Sequence):
        raise error(f"not a shape: {described(shape)}", span, expected="a list of sizes, such as [4, 'M', 128]")
    if len(shape) > MAX_AXES:
        raise error(f"a shape of {len(shape)} axes", span, expected=f"at most {MAX_AXES}")
    return [fusion.size(s, span) if fusion else Size.of(s, span) for s in shape]


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, such as `bf16` for `torch.bfloat16`. Return a description of any other value."""
    name = dtype if isinstance(dtype, str) else described(dtype)
    return TORCH_NAMES.get(name, name)


def operand(t: Any, span: Span | None) -> Value:
    """Return the value that stands for a tensor in statements.

    Raise if the tensor does not belong to the fusion being built.
    """
    fusion = building(span)
    if not isinstance(t, Tensor):
        raise error(f"not a tensor: {described(t)}", span, expected="a tensor of this fusion")
    if t.fusion is not fusion:
        whose = f"%{t.name} belongs to fusion @{t.fusion.name}, not to @{fusion.name}"
        raise error(whose, span, hint="declare it as an input here: hi.tensor(...)")
    return Value(t.name, TensorType(t.dtype, tuple(Axis.of(s) for s in t.shape)), t.span)


def apply(cls: type[Any], shape: Sequence[Size] | None = None, name: str = "", **fields: Any) -> Tensor:
    """Append a statement of class `cls` to the fusion being built, and return the result of the statement.

    Args:
        cls: the class of the statement.
        shape: the shape of the result; None to infer it from the operands.
        name: the name of the result; empty to use the name of the variable that the user's line assigns it to.
        fields: the fields of the statement, except its result.
    """
    span = user_span()
    fusion = building(span)
    unknown = Value("out", TensorType(DTYPES["f32"], ()))
    draft = cls(out=unknown, span=span, **fields)
    if isinstance(draft, TensorOp):
        dtype, shape = draft.result()
    elif shape is None:
        dtype, shape = draft.infer().dtype, draft.infer().shape
    else:
        dtype = draft.x.tensor.dtype
    t = fusion._new(name or _assigned(span, cls.keyword()), dtype, shape, span)
    statement = replace(draft, out=Value(t.name, TensorType(dtype, tuple(Axis.of(s) for s in shape)), span))
    statement.verify()
    fusion._statements.append(statement)
    return t


def _assigned(span: Span | None, otherwise: str) -> str:
    """Return the name of the variable to which the user's line assigns the result of the call at `span`.

    If the line does not assign this result to a variable, return `otherwise`.
    """
    if span is None or not span.column:
        return otherwise
    before, after = span.text[: span.column - 1], span.text[span.column - 1 + span.width :]
    match = re.search(r"([A-Za-z_]\w*)\s*(?::[^=]*)?=\s*$", before)
    return match[1] if match and re.match(r"\s*([#;]|$)", after) else otherwise
