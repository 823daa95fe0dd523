"""A value of a wrong type is refused in a bounded message that describes it without its contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hostir as hi
from hostir.ir.source import Diagnostic, Span, described

LONGEST = 1500  # characters of a message with the quoted line


class WithoutRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class LongRepr:
    def __repr__(self) -> str:
        return "r\n" * 10**6


VALUES: dict[str, Any] = {
    "tensor": torch.randn(4, 8),
    "number": torch.tensor(4.5),
    "array": np.ones((3, 3)),
    "tensors": [torch.randn(3)] * 2,
    "without repr": WithoutRepr(),
    "long repr": LongRepr(),
    "text": "s-" * 10**6,
    "numbers": [-7] * 10**6,
    "integer": -(10**5000),
    "class": torch.nn.Linear,
}


def described_cases() -> Iterator[tuple[Any, str]]:
    yield torch.randn(4, 8), "a torch.Tensor of shape [4, 8], float32"
    yield torch.nn.Parameter(torch.randn(2)), "a torch.nn.parameter.Parameter of shape [2], float32"
    yield np.ones(3), "a numpy.ndarray of shape [3], float64"
    yield [torch.randn(3), 1], "[a torch.Tensor of shape [3], float32, 1]"
    yield LongRepr(), f"an object of type {__name__}.LongRepr"
    yield WithoutRepr(), f"an object of type {__name__}.WithoutRepr"
    yield "M", "'M'"
    yield 2.5, "2.5"
    yield None, "None"


@pytest.mark.parametrize(("value", "text"), list(described_cases()), ids=lambda it: it if isinstance(it, str) else "")
def test_a_value_is_described_by_its_repr_or_its_type(value: Any, text: str) -> None:
    assert described(value) == text


@pytest.fixture(autouse=True)
def _building() -> Iterator[None]:
    with hi.Fusion("f"):
        yield


def _a() -> hi.Tensor:
    return hi.tensor("a", ["M", 8])


def _fusion() -> hi.Fusion:
    with hi.Fusion("f") as fusion:
        c = hi.relu(hi.tensor("a", ["M", 8]))
        fusion.output(c)
    return fusion


def _run(**options: Any) -> Any:
    return hi.run(_fusion(), torch.randn(4, 8).bfloat16(), **options)


PLACES: dict[str, Callable[[Any], Any]] = {
    "+": lambda v: _a() + v,
    "+ on the right": lambda v: v + _a(),
    "@": lambda v: _a() @ v,
    "@ on the right": lambda v: v @ _a(),
    "linear": lambda v: hi.linear(_a(), v),
    "cast": lambda v: hi.cast(_a(), v),
    "axis": lambda v: _a().axis(v),
    "sum": lambda v: hi.sum(_a(), v),
    "reshape": lambda v: hi.reshape(_a(), v),
    "size": lambda v: hi.reshape(_a(), [v, 8]),
    "size beside -1": lambda v: hi.reshape(_a(), [-1, v]),
    "permute": lambda v: hi.permute(_a(), v),
    "order": lambda v: hi.permute(_a(), [v, 0]),
    "split": lambda v: _a().split(1, v),
    "mesh": lambda v: _a().set_device_mesh(v),
    "devices": lambda v: hi.DeviceMesh([v, 1]),
    "names of a mesh": lambda v: hi.DeviceMesh([0, 1], v),
    "name of an axis": lambda v: hi.DeviceMesh([0, 1], [v]),
    "shard": lambda v: _a().shard(1, hi.DeviceMesh([0, 1]), v),
    "dtype": lambda v: hi.tensor("x", [1], v),
    "shape": lambda v: hi.tensor("x", v),
    "output": lambda v: hi.Fusion("f").output(v),
    "lower": hi.lower,
    "strategy": lambda v: hi.lower(_fusion(), v),
    "streams": lambda v: hi.lower(_fusion(), streams=v),
    "sizes of lower": lambda v: hi.lower(_fusion(), sizes=[v]),
    "a size of lower": lambda v: hi.lower(_fusion(), sizes={"M": v}),
    "watch": lambda v: hi.lower(_fusion(), watch=[v]),
    "an option of compile": lambda v: hi.compile(_fusion(), "pipeline", foo=v),
    "a file of a trace": lambda v: hi.Trace().to_svg([v]),
    "a knob": lambda v: hi.knobs.scope(spec=v),
    "check": hi.check,
    "sizes of check": lambda v: hi.check(hi.lower(_fusion()), sizes=v),
    "a size of check": lambda v: hi.check(hi.lower(_fusion()), sizes={"M": v}),
    "compile": hi.compile,
    "strategy of compile": lambda v: hi.compile(_fusion(), v),
    "sizes of compile": lambda v: hi.compile(_fusion(), sizes={"M": v}),
    "calls": lambda v: hi.compile(_fusion(), sizes={"M": 4}, calls=v),
    "executor": hi.Executor,
    "machine": lambda v: _run(machine=v),
    "kernels": lambda v: _run(kernels=v),
    "sizes of run": lambda v: _run(sizes={"M": v}),
    "timeout": lambda v: _run(timeout=[v]),
    "input": lambda v: hi.Executor(hi.lower(_fusion()))([v]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", VALUES)
def test_a_foreign_value_is_refused_in_a_bounded_message_without_its_contents(place: str, value: str) -> None:
    with pytest.raises(hi.HostIRError) as refused:
        PLACES[place](VALUES[value])
    message = str(refused.value)
    assert len(message) < LONGEST
    assert "tensor([" not in message.splitlines()[0]
    assert "Size(" not in message


def test_sizes_and_shapes_print_as_in_a_program() -> None:
    x = _a()
    assert f"{x.shape}" == repr(x.shape) == "[M, 8]"
    assert f"{x.shape[0]} {x.shape[0] / 4!r}" == "M M/4"
    with pytest.raises(hi.HostIRError, match="not a shape: M\n"):
        hi.reshape(x, x.shape[0])  # type: ignore[arg-type]  # not a shape


LINE = 10**6
HEAD = "hostir 1\nmesh @mesh [didx] = 0 1\nprogram @p(%x: f32[4]) -> (%y) streams 1 {\n  "
LONG = {
    "name": f"%y: f32[4] = allocate copy %{'x' * LINE} -> %y }}",
    "statement": "c" * LINE,
    "letter": "é" * LINE,
    "dtype": f"%y: {'f' * LINE}[4] = allocate }}",
    "size": f"%y: f32[{'4' * LINE}] = allocate }}",
    "product": f"%y: f32[{'*'.join(['M'] * 20_000)}] = allocate }}",
    "shape": f"%y: f32[{', '.join(['4'] * 10_000)}] = allocate copy %x -> %y }}",
    "expression": f"set_stream {'1+' * 10_000}1 }}",
    "names": f"{' '.join(f'%y{n}: f32[4] = allocate' for n in range(3000))} copy %y -> %x }}",
}


@pytest.mark.parametrize("line", LONG)
def test_an_error_in_a_long_line_has_a_bounded_message(line: str) -> None:
    try:
        message = "\n".join(map(str, hi.check(hi.parse(HEAD + LONG[line], "long.hir"))))
    except hi.HostIRError as wrong:
        message = str(wrong)
    assert "long.hir:4:" in message
    assert "^" in message
    assert len(message) < 3500


def test_a_diagnostic_bounds_all_quotations() -> None:
    long = "w" * LINE
    span = Span("f.py", 3, LINE // 2, LINE, long)
    diagnostic = Diagnostic(long, span, expected=" ".join("w" * LINE), hint=long, notes=((span, long),))
    assert len(str(diagnostic)) < 6000
    assert len(repr(diagnostic)) < 8000
