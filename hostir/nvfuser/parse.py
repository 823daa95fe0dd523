"""Parse a dump of nvFuser's host IR into nodes, by recursive descent.

The body of a loop consists of the lines that are indented deeper than the loop's header. Apart from that, the ends of
lines have no meaning, because nvFuser breaks long statements into several lines.

Every syntax error, and every statement that a host program cannot express, raises one HostIRError at its position.
Options that do not matter for host programs (`mem_type`, `size`, `cache_op`, `backend`, ...) are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hostir.ir.source import HostIRError, Span, did_you_mean, error
from hostir.nvfuser.nodes import (
    AllocateNode,
    CommunicationNode,
    ComputeNode,
    DeallocateNode,
    DelayNode,
    Dump,
    Formula,
    IterDomain,
    LoopNode,
    Node,
    Operation,
    StreamNode,
    TensorNode,
    ViewNode,
    WaitNode,
)
from hostir.nvfuser.parts import TENSOR, PartParser
from hostir.nvfuser.tokens import Token

T = TypeVar("T")
_CAST = re.compile(r"__(double|float|half|bfloat)2(double|float|half|bfloat)")
CASTS = {"double": "f64", "float": "f32", "half": "f16", "bfloat": "bf16"}
INFIX = {"+": "add", "*": "mul"}
# For each nvFuser operation: the keyword of hostir's statement, and the numbers of operands that are allowed.
COMPUTE: dict[str, tuple[str, *tuple[int, ...]]] = {
    "matmul": ("matmul", 2),
    "linear": ("linear", 2, 3),
    "reduction": ("sum", 1),
    "relu": ("relu", 1),
    "gelu": ("gelu", 1),
    "silu": ("silu", 1),
    "Set": ("copy", 1),
}
RESHAPES = ("view", "reshape", "broadcast", "squeeze")  # each of them is a reshape of the same elements
OURS = ("AsPartial", "Dense")  # operations that hostir prints and nvFuser does not have
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
    """A parsed call, printed as `name(tensor, ..., key=value, ...)`."""

    name: Token
    tensors: list[TensorNode] = field(default_factory=list)
    options: dict[str, Option] = field(default_factory=dict)

    def need(self, key: str, option_type: type[T]) -> T:
        option = self.options.get(key)
        if not isinstance(option, option_type):
            raise error(f"{self.name.text} lacks '{key}='", self.name.span)
        return option

    def formula(self, key: str) -> Formula:
        formula = self.options.get(key)
        if not isinstance(formula, (Token, Operation)):
            raise error(f"{self.name.text} lacks '{key}='", self.name.span)
        return formula

    def word(self, key: str) -> str:
        word = self.options.get(key)
        return word.text if isinstance(word, Token) else ""

    def operands(self, *counts: int) -> tuple[TensorNode, ...]:
        if len(self.tensors) not in counts:
            expected = " or ".join(map(str, counts)) + ", all tensors"
            raise error(f"{self.name.text} has {len(self.tensors)} operands", self.name.span, expected=expected)
        return tuple(self.tensors)


def parse_dump(text: str, file: str) -> Dump:
    """Parse the first `%HostIrContainer` of a text, and the number of streams after it. Ignore all other text."""
    return _DumpParser(text, file).dump()


class _DumpParser(PartParser):
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
        inputs = self.listed(self.tensor, "(", ")")
        self.expect("->")
        outputs = self.listed(self.tensor, "(", ")")
        self.expect(":")
        body = self.block(0)
        self.expect("}")
        return Dump(inputs, outputs, body, self.definitions(), tuple(self.symbols))

    def definitions(self) -> int | None:
        """Read the rest of the text after the container. Return the number of streams if it is defined, else None."""
        while self.next is not self.end:
            if self.take().text == "numberOfStreams" and self.skip("="):
                span = self.next.span
                if (streams := self.integer()) < 1:
                    raise error(f"a pool of {streams} streams", span, expected="at least 1")
                return streams
        return None

    def block(self, column: int) -> tuple[Node, ...]:
        """Parse the statements of a block: all statements that start to the right of `column`."""
        body: list[Node] = []
        while self.next is not self.end and self.next.text != "}" and self.next.span.column > column:
            if not self.next.leads:
                raise self.unexpected("the end of the line")
            body.append(self.deeper(self.statement))
        return tuple(body)

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
        raise _no_meaning(head, STATEMENTS)

    def maybe_in_parentheses(self, read: Callable[[], T], word: str = "") -> T:
        """Parse the operand of a statement by a call of `read`. The operand may be in parentheses.

        Current versions of nvFuser print `Statement(x)`. Older versions print `Statement x`, or `Statement word x`,
        where `word` is the argument of this method.
        """
        if not self.skip("("):
            self.skip(word)
            return read()
        node = read()
        self.expect(")")
        return node

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
            raise _no_meaning(sign, tuple(INFIX)) if sign.text else self.unexpected("+ or *")
        self.take()
        right = self.tensor()
        self.skip(";")
        return ComputeNode(span, INFIX[sign.text], out, (left, right))

    def cast(self, span: Span, out: TensorNode) -> Node:
        """Parse a cast between float and double, which nvFuser prints as `(double)(T0..)`."""
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
            raise _no_meaning(head, CALLS)
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
            return ViewNode(span, "select", out, x, call.need("axis", IterDomain), call.formula("index"))
        if name == "ShardByStream":
            return ViewNode(span, "chunk", out, x, index=call.formula("stream_index"))
        if name == "AsPartial":
            return ViewNode(span, "as_partial", out, x, over=call.need("over", Token).text[-1:])
        return ViewNode(span, {"Dense": "dense", "Set.Permute": "permute"}.get(name, "reshape"), out, x)

    def call(self, name: Token) -> CallNode:
        """Parse the arguments in parentheses after the name of a call; return the call."""
        call = CallNode(name)
        self.listed(lambda: self.argument(call), "(", ")")
        return call

    def argument(self, call: CallNode) -> None:
        """Parse one argument, a tensor or `key=value`, and add it to `call`."""
        if TENSOR.fullmatch(self.next.text):
            call.tensors.append(self.tensor())
            return
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


def _no_meaning(head: Token, known: tuple[str, ...]) -> HostIRError:
    name = re.sub(r"\d+$", "", head.text)
    if name in UNSUPPORTED:
        return error(f"{name} has no meaning here", head.span, hint=UNSUPPORTED[name])
    expected, hint = f"one of: {', '.join(known)}", did_you_mean(head.text, known)
    return error(f"'{head.text}' has no meaning here", head.span, expected=expected, hint=hint)
