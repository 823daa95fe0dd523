"""Parse a dump of nvFuser's host IR into nodes, by recursive descent."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from hostir.ir.sizes import Size
from hostir.ir.source import HostIRError, Span, did_you_mean, error
from hostir.ir.types import DTYPES, DType

# Tokens and nodes -----------------------------------------------------------------------------------------------------
# The syntax of nvFuser's dumps of host IR: tokens, and a node for each line.
#
# A node keeps the printed form: tensors with their IterDomains, extents with their ceilDivs, streams and indices by
# name. The spellings of several versions lead to the same nodes. The body of a loop are the lines indented deeper than
# its header. Elsewhere line ends mean nothing, because nvFuser breaks long statements.


@dataclass(frozen=True)
class Token:
    """A word, a number or a sign, and its position."""

    text: str
    span: Span
    leads: bool  # whether it is the first of its line


@dataclass(frozen=True)
class Operation:
    """`left op right` on indices."""

    op: str
    left: Formula
    right: Formula


Formula = Token | Operation  # an index expression as printed: names are not resolved yet


@dataclass(frozen=True)
class AxisExtent:
    """The size of an axis. The rest of a split, `ceilDiv(ceilDiv(whole, a), b)`, has splits (a, b), assumed exact."""

    size: Size
    splits: tuple[Size, ...] = ()


@dataclass(frozen=True)
class IterDomain:
    """An axis as printed, such as `ideviceIdx.x1{i2}`. `on` is x or y for a device axis, stream, or empty."""

    kind: str  # i: an axis, b: an axis of extent one, r: a reduced axis
    on: str
    number: int
    extent: AxisExtent
    rfactor: bool
    span: Span = field(compare=False)


@dataclass(frozen=True)
class Devices:
    """A DeviceMesh as printed: `{0 1}` is one row, `{{0 1}{2 3}}` is a grid."""

    rows: tuple[tuple[int, ...], ...]
    grid: bool


@dataclass(frozen=True)
class TensorNode:
    """A TensorView as printed."""

    name: str
    dtype: DType
    domains: tuple[IterDomain, ...]
    devices: Devices | None
    span: Span = field(compare=False)

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Node:
    """The base class of statements as printed."""

    span: Span

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return ()


@dataclass(frozen=True)
class StreamNode(Node):
    """`verb` is get, set or synchronize."""

    verb: str
    stream: Formula


@dataclass(frozen=True)
class LoopNode(Node):
    """A loop: FOR index from 0 to count."""

    index: Token
    count: AxisExtent
    body: tuple[Node, ...]


@dataclass(frozen=True)
class AllocateNode(Node):
    """ALLOCATE. With `buffer=` it does nothing if the tensor already has memory; without it, the memory is new."""

    out: TensorNode
    always: bool

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return (self.out,)


@dataclass(frozen=True)
class DeallocateNode(Node):
    """Deallocate { x }."""

    x: TensorNode

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return (self.x,)


@dataclass(frozen=True)
class ViewNode(Node):
    """A view of the same memory: `op` is select, chunk, reshape, permute, as_partial or dense."""

    op: str
    out: TensorNode
    x: TensorNode
    axis: IterDomain | None = None
    index: Formula | None = None
    over: str = ""

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return (self.x, self.out)


@dataclass(frozen=True)
class ComputeNode(Node):
    """A computation: `op` is the keyword of our statement."""

    op: str
    out: TensorNode
    operands: tuple[TensorNode, ...]
    dtype: str = ""

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return (*self.operands, self.out)


@dataclass(frozen=True)
class CommunicationNode(Node):
    """Communication number (type=..., team=(...), ...)."""

    number: str
    type: Token
    team: tuple[int, ...]
    root: Formula | None
    x: TensorNode
    out: TensorNode

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        return (self.x, self.out)


@dataclass(frozen=True)
class WaitNode(Node):
    """Wait(Communication number)."""

    number: str


@dataclass(frozen=True)
class DelayNode(Node):
    """Delay(microseconds), an extension of hostir's."""

    microseconds: int


@dataclass(frozen=True)
class Dump:
    """A container: its input and output tensors, its statements, and the number of streams if the dump defines it."""

    inputs: tuple[TensorNode, ...]
    outputs: tuple[TensorNode, ...]
    body: tuple[Node, ...]
    streams: int | None
    symbols: tuple[str, ...]  # the names of sizes, in the order in which they first appear

    def walk(self) -> Iterator[Node]:
        """Yield every node, outer before inner, in order."""
        return walk(self.body)

    def tensors(self) -> Iterator[TensorNode]:
        yield from self.inputs
        for node in self.walk():
            yield from node.tensors


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Yield every node of a block, outer before inner, in order."""
    for node in body:
        yield node
        if isinstance(node, LoopNode):
            yield from walk(node.body)


# Tokens -----------------------------------------------------------------------------------------------------------
_TOKEN = re.compile(
    r"(?P<comment>//.*)"
    r"|%HostIrContainer|->"
    r"|0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
    r"|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
    r"|\S",
    re.ASCII,
)
_RANK = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:", re.ASCII)  # the prefix that mpirun adds to each line


def tokens(text: str, file: str) -> list[Token]:
    """Split a text into tokens; any text can be split."""
    result: list[Token] = []
    for number, line in enumerate(text.split("\n"), 1):
        prefix = _RANK.match(line)
        leads = True
        for match in _TOKEN.finditer(line, prefix.end() if prefix else 0):
            if match["comment"] is not None:
                continue
            result.append(Token(match[0], Span(file, number, match.start() + 1, len(match[0]), line), leads))
            leads = False
    return result


# The parts of statements ----------------------------------------------------------------------------------------------
# Reads the parts of statements of an nvFuser dump: tensors, meshes, extents, index expressions.

TENSOR = re.compile(r"(T\d{1,18})(?:_(?:g|l|s|t|sym))?(?:_(\w+))?", re.ASCII)
_DOMAIN = re.compile(r"([a-z])([A-Z]\w*?|[a-z]+Idx(?:\.([xyz]))?|)(\d{1,18})", re.ASCII)
_STREAM_AXES = ("streamIdx", "StreamIdx", "Stream")
_MAX_DEPTH = 60  # the deepest nesting of loops, parentheses and operators
FLOATS = {"double": DTYPES["f64"], "float": DTYPES["f32"], "__half": DTYPES["f16"], "__bfloat": DTYPES["bf16"]}

T = TypeVar("T")


class Scanner:
    """Walks over the tokens of a text. Every mistake raises a HostIRError at its place."""

    def __init__(self, text: str, file: str) -> None:
        self.tokens = tokens(text, file)
        last = self.tokens[-1].span if self.tokens else Span(file, 1)
        self.end = Token("", Span(file, last.line, last.column + last.width, 1, last.text), True)
        self.at = 0
        self.depth = 0
        self.symbols: dict[str, None] = {}  # the names of sizes, in the order in which they first appear

    # Tokens ------------------------------------------------------------------------------------------------------
    @property
    def next(self) -> Token:
        return self.peek(0)

    def peek(self, n: int) -> Token:
        return self.tokens[self.at + n] if self.at + n < len(self.tokens) else self.end

    def take(self) -> Token:
        token = self.next
        self.at += 1
        return token

    def skip(self, text: str) -> bool:
        """Take the next token if it is `text`; return True if it was."""
        if self.next.text != text:
            return False
        self.at += 1
        return True

    def expect(self, *texts: str) -> Token:
        if self.next.text not in texts:
            raise self.unexpected(" or ".join(f"'{t}'" for t in texts))
        return self.take()

    def unexpected(self, expected: str) -> HostIRError:
        if self.next is self.end:
            return error("the dump ends too early", self.end.span, expected=expected)
        return error(f"unexpected '{self.next.text}'", self.next.span, expected=expected)

    def deeper(self, read: Callable[[], T]) -> T:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise error(f"more than {_MAX_DEPTH} levels of nesting", self.next.span)
        result = read()
        self.depth -= 1
        return result

    def step_over(self) -> None:
        """Skip the value of an option that has no meaning here."""
        open = 0
        while self.next is not self.end and (open or self.next.text not in (",", ")")):
            open += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(self.take().text, 0)

    def integer(self) -> int:
        if not re.fullmatch(r"\d{1,18}", self.next.text, re.ASCII):
            raise self.unexpected("an integer")
        return int(self.take().text)

    # Tensors -----------------------------------------------------------------------------------------------------
    def tensor(self) -> TensorNode:
        head = self.next
        match = TENSOR.fullmatch(head.text)
        if match is None:
            raise self.unexpected("a tensor, such as T0_g_float[iS0{i0}, iS1{i2}]")
        self.take()
        self.expect("[")
        domains: list[IterDomain] = []
        while not self.skip("]"):
            domains.append(self.domain())
            if self.next.text != "]":
                self.expect(",")
        devices = self.devices() if self.next.text == "(" and self.peek(1).text == "DeviceMesh" else None
        while self.next.text in ("ca_pos", "produce_pos"):
            self.take()
            self.expect("(")
            self.integer()
            self.expect(")")
        return TensorNode(match[1], self.dtype(match[2], head), tuple(domains), devices, head.span)

    def dtype(self, name: str | None, head: Token) -> DType:
        if name is None:  # the first versions did not print it
            return DTYPES["f32"]
        if name not in FLOATS:
            expected = f"one of: {', '.join(FLOATS)}"
            raise error(f"tensors of '{name}' have no meaning here", head.span, expected=expected)
        return FLOATS[name]

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

    def integers(self, end: str) -> tuple[int, ...]:
        numbers: list[int] = []
        while not self.skip(end):
            numbers.append(self.integer())
        return tuple(numbers)

    def team(self) -> tuple[int, ...]:
        span = self.expect("(").span
        team = self.integers(")")
        if not team or len(set(team)) != len(team):
            raise error("a team needs devices, each once", span, expected="such as (0 1 2 3)")
        return team

    def word(self, expected: str) -> Token:
        if not re.fullmatch(r"[A-Za-z_][\w.]*", self.next.text, re.ASCII):
            raise self.unexpected(expected)
        return self.take()

    def domain(self) -> IterDomain:
        head = self.next
        match = _DOMAIN.fullmatch(head.text)
        if match is None:
            raise self.unexpected("an axis, such as iS0{i0} or ideviceIdx.x1{i2}")
        self.take()
        kind, parallel, device, number = match.groups()
        on = device if parallel.startswith("deviceIdx") else "stream" if parallel in _STREAM_AXES else ""
        if kind not in "irb" or on is None or on == "z" or not (on or parallel == "S"):
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
        return IterDomain(kind, on, int(number), extent, rfactor, head.span)

    # Extents and indices -----------------------------------------------------------------------------------------
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
        """Yield while one of these signs is next; raise after more in a row than nvFuser ever prints."""
        for n in itertools.count():
            if self.next.text not in signs:
                return
            if n == _MAX_DEPTH:
                raise error(f"more than {_MAX_DEPTH} operators in a row", self.next.span)
            yield

    def atom(self) -> Formula:
        if self.skip("("):
            inner = self.formula()
            self.expect(")")
            return inner
        if not re.fullmatch(r"0[xX][0-9a-fA-F]+|\d{1,18}|[A-Za-z_]\w*", self.next.text, re.ASCII):
            raise self.unexpected("a loop index or an integer")
        return self.take()


# Statements -----------------------------------------------------------------------------------------------------------
# Every mistake, and every node that host programs cannot express, raises one HostIRError at its place. Options without
# meaning here (`mem_type`, `size`, `cache_op`, `backend`, `initial value`, ...) are skipped.

_CAST = re.compile(r"__(double|float|half|bfloat)2(double|float|half|bfloat)")
CASTS = {"double": "f64", "float": "f32", "half": "f16", "bfloat": "bf16"}
INFIX = {"+": "add", "*": "mul"}
COMPUTE: dict[str, tuple[str, *tuple[int, ...]]] = {  # what it is here, and how many operands it may have
    "matmul": ("matmul", 2),
    "linear": ("linear", 2, 3),
    "reduction": ("sum", 1),
    "relu": ("relu", 1),
    "gelu": ("gelu", 1),
    "silu": ("silu", 1),
    "Set": ("copy", 1),
}
RESHAPES = ("view", "reshape", "broadcast", "squeeze")  # all of them only change how the same elements are counted
OURS = ("AsPartial", "Dense")  # which nvFuser does not print
CALLS = (*COMPUTE, *RESHAPES, "ALLOCATE", "select", "HirAliasSelect", "ShardByStream", "Set.Permute", *OURS)
STATEMENTS = (
    "GetCurrentStream",
    "SetCurrentStream",
    "Synchronize",
    "Stream",
    "Wait",
    "Delay",
    "Communication",
    "FOR",
    "Deallocate",
)

_RANKS = "the dump shows device 0 only, and here every rank runs one and the same program"
_P2P = "use a pipeline made of collectives: in nvFuser, the Stream axis outermost and the device axis inside it"
_MOE = "mixture-of-experts routing depends on data that only the device knows"
UNSUPPORTED = {
    "PostOnStream": "it posts a fused kernel; schedule the kernel's operations as host statements",
    "LaunchKernel": "it launches a compiled kernel that is not in the dump; dump before kernels are compiled",
    "HostUnit": "it is a fused kernel; schedule the kernel's operations as host statements",
    "IF": _RANKS,
    "ELSE": _RANKS,
    "P2PCommunication": _P2P,
    "CollectivePermute": _P2P,
    "ShareMemHandles": _P2P,
    "StartCoalescing": _P2P,
    "EndCoalescing": _P2P,
    "SymmetricContiguousView": "use an allgather where the whole tensor is read",
    "Dispatch": _MOE,
    "Combine": _MOE,
}

Option = TensorNode | IterDomain | Formula | tuple[int, ...]


@dataclass
class CallNode:
    """`name(tensor, ..., key=value, ...)`."""

    name: Token
    tensors: list[TensorNode] = field(default_factory=list)
    options: dict[str, Option] = field(default_factory=dict)

    def need(self, key: str, kind: type[T]) -> T:
        found = self.options.get(key)
        if not isinstance(found, kind):
            raise error(f"{self.name.text} lacks '{key}='", self.name.span)
        return found

    def word(self, key: str) -> str:
        word = self.options.get(key)
        return word.text if isinstance(word, Token) else ""

    def operands(self, *counts: int) -> tuple[TensorNode, ...]:
        if len(self.tensors) not in counts:
            expected = " or ".join(map(str, counts)) + ", all tensors"
            raise error(f"{self.name.text} has {len(self.tensors)} operands", self.name.span, expected=expected)
        return tuple(self.tensors)


def parse_dump(text: str, file: str) -> Dump:
    """Parse the `%HostIrContainer` of a text; text before it, and nearly all text after it, is ignored."""
    return _DumpParser(text, file).dump()


class _DumpParser(Scanner):
    def __init__(self, text: str, file: str) -> None:
        super().__init__(text, file)
        self.options: dict[str, Callable[[], Option]] = {
            "buffer": self.tensor,
            "input": self.tensor,
            "output": self.tensor,
            "axis": self.domain,
            "index": self.formula,
            "stream_index": self.formula,
            "root": self.formula,
            "team": self.team,
            "type": self.take,
            "op": self.take,
            "over": self.take,
            "zero_init": self.take,
            "resets_to_zero": self.take,
        }

    # The container -----------------------------------------------------------------------------------------------
    def dump(self) -> Dump:
        while self.next is not self.end and self.next.text != "%HostIrContainer":
            self.at += 1
        if self.next is self.end:
            start = self.tokens[0].span if self.tokens else self.end.span
            expected = "%HostIrContainer { (...) -> (...) :"
            hint = "make one with NVFUSER_DUMP=host_ir; a hostir program starts with 'hostir 1'"
            raise error("this is no dump of nvFuser's host IR", start, expected=expected, hint=hint)
        self.take()
        self.expect("{")
        while self.next.text in ("HOST", "IRS", "FUSION", ":"):  # the first versions wrote a title
            self.at += 1
        inputs = self.tensors()
        self.expect("->")
        outputs = self.tensors()
        self.expect(":")
        body = self.block(0)
        self.expect("}")
        return Dump(inputs, outputs, body, self.definitions(), tuple(self.symbols))

    def definitions(self) -> int | None:
        """Read the index definitions after the container; return the number of streams if they define it."""
        while self.next is not self.end:
            if self.take().text == "numberOfStreams" and self.skip("="):
                span = self.next.span
                if (streams := self.integer()) < 1:
                    raise error(f"a pool of {streams} streams", span, expected="at least 1")
                return streams
        return None

    def tensors(self) -> tuple[TensorNode, ...]:
        self.expect("(")
        found: list[TensorNode] = []
        while not self.skip(")"):
            found.append(self.tensor())
            if self.next.text != ")":
                self.expect(",")
        return tuple(found)

    def block(self, column: int) -> tuple[Node, ...]:
        """Return the statements of a block: they start right of a column."""
        body: list[Node] = []
        while self.next is not self.end and self.next.text != "}" and self.next.span.column > column:
            if not self.next.leads:
                raise self.unexpected("the end of the line")
            body.append(self.deeper(self.statement))
        return tuple(body)

    # Statements --------------------------------------------------------------------------------------------------
    def statement(self) -> Node:
        head = self.next
        if TENSOR.fullmatch(head.text):
            return self.assignment()
        self.take()
        match head.text:
            case "FOR":
                return self.loop(head)
            case "GetCurrentStream":
                self.expect("into")
                return StreamNode(head.span, "get", self.stream())
            case "Stream":
                self.at -= 1
                stream = self.stream()
                self.expect("=")
                self.expect("GetCurrentStream")
                self.expect("(")
                self.expect(")")
                return StreamNode(head.span, "get", stream)
            case "SetCurrentStream":
                return StreamNode(head.span, "set", self.maybe_in_parentheses(self.stream, "to"))
            case "Synchronize":
                return StreamNode(head.span, "synchronize", self.maybe_in_parentheses(self.stream))
            case "Wait":
                return WaitNode(head.span, self.maybe_in_parentheses(self.communication_number))
            case "Delay":
                return DelayNode(head.span, self.maybe_in_parentheses(self.integer))
            case "Communication":
                return self.communication(head)
            case "Deallocate":
                self.expect("{")
                x = self.tensor()
                self.expect("}")
                return DeallocateNode(head.span, x)
        raise self.no_meaning(head, STATEMENTS)

    def no_meaning(self, head: Token, known: tuple[str, ...]) -> HostIRError:
        name = re.sub(r"\d+$", "", head.text)
        if name in UNSUPPORTED:
            return error(f"{name} has no meaning here", head.span, hint=UNSUPPORTED[name])
        expected, hint = f"one of: {', '.join(known)}", did_you_mean(head.text, known)
        return error(f"'{head.text}' has no meaning here", head.span, expected=expected, hint=hint)

    def maybe_in_parentheses(self, read: Callable[[], T], word: str = "") -> T:
        """Read `Verb(x)` as printed today, or `Verb x` or `Verb word x` as printed by older versions."""
        if not self.skip("("):
            self.skip(word)
            return read()
        found = read()
        self.expect(")")
        return found

    def communication_number(self) -> str:
        self.expect("Communication")
        return str(self.integer())

    def stream(self) -> Formula:
        self.expect("Stream")
        return self.deeper(self.atom)

    def loop(self, head: Token) -> LoopNode:
        index = self.word("a loop index")
        if self.expect("in", "from").text == "in":
            count = self.domain().extent
        else:
            if (start := self.take()).text != "0":
                raise error(f"a loop that starts at '{start.text}'", start.span, expected="FOR ... from 0 to ...")
            self.expect("to")
            count = self.extent()
        self.expect(":")
        return LoopNode(head.span, index, count, self.block(head.span.column))

    def communication(self, head: Token) -> CommunicationNode:
        number = str(self.integer())
        call = self.call(head)
        type, team, root = call.need("type", Token), call.need("team", tuple), call.options.get("root")
        x, out = call.need("input", TensorNode), call.need("output", TensorNode)
        root = root if isinstance(root, (Token, Operation)) else None
        return CommunicationNode(head.span, number, type, team, root, x, out)

    def assignment(self) -> Node:
        span = self.next.span
        out = self.tensor()
        self.expect("=")
        if not TENSOR.fullmatch(self.next.text):
            return self.called(span, out)
        left = self.tensor()
        sign = self.next
        if sign.text not in INFIX:
            raise self.no_meaning(sign, tuple(INFIX)) if sign.text else self.unexpected("+ or *")
        self.take()
        right = self.tensor()
        self.skip(";")
        return ComputeNode(span, INFIX[sign.text], out, (left, right))

    def cast(self, span: Span, out: TensorNode) -> Node:
        """Read `(double)(T0..)`, as nvFuser casts between float and double."""
        self.expect("(")
        to = self.expect("double", "float")
        self.expect(")")
        call = self.call(to)
        self.skip(";")
        return ComputeNode(span, "cast", out, call.operands(1), CASTS[to.text])

    def called(self, span: Span, out: TensorNode) -> Node:
        if self.next.text == "(":
            return self.cast(span, out)
        head = self.word("what gives the tensor")
        cast = _CAST.fullmatch(head.text)
        if head.text not in CALLS and not cast:
            raise self.no_meaning(head, CALLS)
        call = self.call(head)
        self.skip(";")
        name = head.text
        if cast:
            return ComputeNode(span, "cast", out, call.operands(1), CASTS[cast[2]])
        if name == "ALLOCATE":
            if "true" in (call.word("zero_init"), call.word("resets_to_zero")):
                raise error("a buffer filled with zeros has no meaning here", head.span, expected="zero_init=false")
            return AllocateNode(span, out, "buffer" not in call.options)
        if name == "reduction" and call.word("op") not in ("add", ""):
            raise error(f"a reduction by '{call.word('op')}' has no meaning here", head.span, expected="op = add")
        if name in COMPUTE:
            op, *counts = COMPUTE[name]
            return ComputeNode(span, str(op), out, call.operands(*counts))
        x = call.operands(1)[0]
        if name in ("select", "HirAliasSelect"):
            return ViewNode(span, "select", out, x, call.need("axis", IterDomain), self.formula_of(call, "index"))
        if name == "ShardByStream":
            return ViewNode(span, "chunk", out, x, index=self.formula_of(call, "stream_index"))
        if name == "AsPartial":
            return ViewNode(span, "as_partial", out, x, over=call.need("over", Token).text[-1:])
        if name == "Dense":
            return ViewNode(span, "dense", out, x)
        return ViewNode(span, "permute" if name == "Set.Permute" else "reshape", out, x)

    def formula_of(self, call: CallNode, key: str) -> Formula:
        found = call.options.get(key)
        if not isinstance(found, (Token, Operation)):
            raise error(f"{call.name.text} lacks '{key}='", call.name.span)
        return found

    def call(self, name: Token) -> CallNode:
        """Read the parenthesised arguments after a name."""
        call = CallNode(name)
        self.expect("(")
        while not self.skip(")"):
            if TENSOR.fullmatch(self.next.text):
                call.tensors.append(self.tensor())
            else:
                self.option(call)
            if self.next.text != ")":
                self.expect(",")
        return call

    def option(self, call: CallNode) -> None:
        words = 0
        while self.peek(words).text.isidentifier():
            words += 1
        key = self.peek(words - 1).text.lower() if words else ""
        if self.peek(words).text != "=":
            raise self.unexpected("a tensor, or key=value")
        self.at += words + 1
        if key in self.options:
            call.options[key] = self.options[key]()
        else:
            self.step_over()
