"""Parse the parts of a dump's statements: tensors, meshes, extents and index expressions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from hostir.ir.sizes import Size
from hostir.ir.source import error
from hostir.ir.types import DTYPES, DType
from hostir.nvfuser.nodes import AxisExtent, Devices, Formula, IterDomain, Operation, TensorNode
from hostir.nvfuser.tokens import MAX_DEPTH, Cursor, Token

TENSOR = re.compile(r"(T\d{1,18})(?:_(?:g|l|s|t|sym))?(?:_(\w+))?", re.ASCII)
_DOMAIN = re.compile(r"([a-z])([A-Z]\w*?|[a-z]+Idx(?:\.([xyz]))?|)(\d{1,18})", re.ASCII)
_STREAM_AXES = ("streamIdx", "StreamIdx", "Stream")
FLOATS = {"double": DTYPES["f64"], "float": DTYPES["f32"], "__half": DTYPES["f16"], "__bfloat": DTYPES["bf16"]}


class PartParser(Cursor):
    """Parses the parts of statements by recursive descent.

    Fields:
        symbols: the names of sizes, in the order in which they first appear.
    """

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text, file)
        self.symbols: dict[str, None] = {}

    def tensor(self) -> TensorNode:
        head = self.next
        match = TENSOR.fullmatch(head.text)
        if match is None:
            raise self.unexpected("a tensor, such as T0_g_float[iS0{i0}, iS1{i2}]")
        self.take()
        domains = self.listed(self.domain, "[", "]")
        devices = self.devices() if self.next.text == "(" and self.peek(1).text == "DeviceMesh" else None
        while self.next.text in ("ca_pos", "produce_pos"):
            self.take()
            self.expect("(")
            self.integer()
            self.expect(")")
        return TensorNode(match[1], _dtype(match[2], head), domains, devices, head.span)

    def devices(self) -> Devices:
        self.expect("(")
        span = self.expect("DeviceMesh").span
        self.expect("{")
        grid = self.next.text == "{"
        rows: list[tuple[int, ...]] = []
        while grid and self.skip("{"):
            rows.append(self.integers("}"))
        if not grid:
            rows.append(self.integers("}"))
        else:
            self.expect("}")
        self.expect(")")
        all = [d for row in rows for d in row]
        if not all or len({len(row) for row in rows}) > 1 or len(set(all)) != len(all):
            expected = "{0 1 2 3} or {{0 1}{2 3}}"
            raise error("a mesh needs devices, each once, in rows of one length", span, expected=expected)
        return Devices(tuple(rows), grid)

    def team(self) -> tuple[int, ...]:
        span = self.expect("(").span
        team = self.integers(")")
        if not team or len(set(team)) != len(team):
            raise error("a team needs devices, each once", span, expected="such as (0 1 2 3)")
        return team

    def domain(self) -> IterDomain:
        head = self.next
        match = _DOMAIN.fullmatch(head.text)
        if match is None:
            raise self.unexpected("an axis, such as iS0{i0} or ideviceIdx.x1{i2}")
        self.take()
        iter_type, parallel, device, number = match.groups()
        on = device if parallel.startswith("deviceIdx") else "stream" if parallel in _STREAM_AXES else ""
        if iter_type not in "irb" or on is None or on == "z" or not (on or parallel == "S"):
            hint = "host statements know serial, deviceIdx.x, deviceIdx.y and streamIdx axes"
            raise error(f"the axis '{head.text}' has no meaning here", head.span, hint=hint)
        self.expect("{")
        extent = self.extent()
        if self.next.text in (":", "ex"):
            message = f"the axis '{head.text}' has an offset or is expanded"
            raise error(message, self.next.span, expected="a plain extent")
        self.expect("}")
        rfactor = self.next.text.startswith("rf")
        if re.fullmatch(r"(rf)?(_[pc])*", self.next.text) and self.next is not self.end:
            self.take()
        return IterDomain(iter_type, on, int(number), extent, rfactor, head.span)

    def extent(self) -> AxisExtent:
        left = self.deeper(self.extent_atom)
        while self.next.text in ("*", "/", "+", "-", "%"):
            sign = self.take()
            if sign.text not in "*/":
                raise error(f"'{sign.text}' in a size", sign.span, expected="products and quotients")
            right = self.deeper(self.extent_atom)
            left = AxisExtent(left.size * right.size if sign.text == "*" else left.size / right.size)
        return left

    def extent_atom(self) -> AxisExtent:
        if self.next.text == "ceilDiv":
            self.take()
            self.expect("(")
            extent = self.extent()
            self.expect(",")
            part = self.extent()
            self.expect(")")
            return AxisExtent(extent.size / part.size, (*extent.splits, part.size))
        if self.skip("("):
            inner = self.extent()
            self.expect(")")
            return inner
        if self.next.text[:1].isdecimal():
            span = self.next.span
            return AxisExtent(Size.of(self.integer(), span))
        name = self.word("a size").text
        if "." in name:
            raise error(f"'{name}' is no size", self.peek(-1).span, expected="an integer or a name")
        self.symbols.setdefault(name)
        return AxisExtent(Size.of(name))

    def formula(self) -> Formula:
        left = self.deeper(self.term)
        for _ in self.signs("+", "-"):
            left = Operation(self.take().text, left, self.deeper(self.term))
        return left

    def term(self) -> Formula:
        left = self.atom()
        for _ in self.signs("*", "/", "%"):
            left = Operation(self.take().text, left, self.atom())
        return left

    def signs(self, *signs: str) -> Iterator[None]:
        """Yield as long as the next token is one of the operators `signs`.

        After each yield, the caller reads the operator and its right operand. Raise a HostIRError after MAX_DEPTH
        operators, which is more than nvFuser ever prints.
        """
        for n in itertools.count():
            if self.next.text not in signs:
                return
            if n == MAX_DEPTH:
                raise error(f"more than {MAX_DEPTH} operators in a row", self.next.span)
            yield

    def atom(self) -> Formula:
        if self.skip("("):
            inner = self.formula()
            self.expect(")")
            return inner
        if not re.fullmatch(r"0[xX][0-9a-fA-F]+|\d{1,18}|[A-Za-z_]\w*", self.next.text, re.ASCII):
            raise self.unexpected("a loop index or an integer")
        return self.take()


def _dtype(name: str | None, head: Token) -> DType:
    if name is None:  # the first versions did not print it
        return DTYPES["f32"]
    if name not in FLOATS:
        expected = f"one of: {', '.join(FLOATS)}"
        raise error(f"tensors of '{name}' have no meaning here", head.span, expected=expected)
    return FLOATS[name]
