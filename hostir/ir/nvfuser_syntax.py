"""What an nvFuser dump of host IR says, before it means anything: tokens, and the nodes that the lines spell.

A node keeps what was printed: tensors with their IterDomains, extents with their ceilDivs, streams and indices by name.
The spellings of several versions lead to the same nodes. The body of a loop is what is indented deeper than its header;
elsewhere line ends mean nothing, because nvFuser breaks long statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hostir.ir.sizes import Size
from hostir.ir.source import Span
from hostir.ir.types import DType


@dataclass(frozen=True)
class Token:
    """A word, a number or a sign, and where it stands."""

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
class Extent:
    """An extent. The rest of a split, `ceilDiv(ceilDiv(whole, a), b)`, has splits (a, b), taken to be exact."""

    size: Size
    splits: tuple[Size, ...] = ()


@dataclass(frozen=True)
class IterDomain:
    """An axis as printed, such as `ideviceIdx.x1{i2}`. `on` is x or y for a device axis, stream, or empty."""

    kind: str  # i: an axis, b: an axis of extent one, r: an axis that was summed away
    on: str
    number: int
    extent: Extent
    rfactor: bool
    span: Span = field(compare=False)


@dataclass(frozen=True)
class Devices:
    """A DeviceMesh as printed: `{0 1}` is one row, `{{0 1}{2 3}}` is a grid."""

    rows: tuple[tuple[int, ...], ...]
    grid: bool


@dataclass(frozen=True)
class Tensor:
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
    """The base of statements as printed."""

    span: Span

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True)
class StreamNode(Node):
    """`verb` is get, set or synchronize."""

    verb: str
    stream: Formula


@dataclass(frozen=True)
class LoopNode(Node):
    """FOR index from 0 to count."""

    index: Token
    count: Extent
    body: tuple[Node, ...]


@dataclass(frozen=True)
class AllocateNode(Node):
    """ALLOCATE. With `buffer=` it does nothing where the tensor already has memory; without, the memory is new."""

    out: Tensor
    always: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.out,)


@dataclass(frozen=True)
class DeallocateNode(Node):
    """Deallocate { x }."""

    x: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x,)


@dataclass(frozen=True)
class ViewNode(Node):
    """The same memory seen another way: `op` is select, chunk, reshape, permute, as_partial or dense."""

    op: str
    out: Tensor
    x: Tensor
    axis: IterDomain | None = None
    index: Formula | None = None
    over: str = ""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.out)


@dataclass(frozen=True)
class ComputeNode(Node):
    """A computation: `op` is the keyword of our statement."""

    op: str
    out: Tensor
    operands: tuple[Tensor, ...]
    dtype: str = ""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.operands, self.out)


@dataclass(frozen=True)
class CommunicationNode(Node):
    """Communication number (type=..., team=(...), ...)."""

    number: str
    type: Token
    team: tuple[int, ...]
    root: Formula | None
    x: Tensor
    out: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.out)


@dataclass(frozen=True)
class WaitNode(Node):
    """Wait(Communication number)."""

    number: str


@dataclass(frozen=True)
class DelayNode(Node):
    """Delay(microseconds), ours."""

    microseconds: int


@dataclass(frozen=True)
class Dump:
    """A container: its tensors in and out, its statements, and the number of streams where the dump defines it."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    body: tuple[Node, ...]
    streams: int | None
    symbols: tuple[str, ...]  # the names of sizes, in the order in which they first appear

    def walk(self) -> Iterator[Node]:
        """Every node, outer before inner, in order."""
        return walk(self.body)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.inputs
        for node in self.walk():
            yield from node.tensors


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every node of a block, outer before inner, in order."""
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
_RANK = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:", re.ASCII)  # what mpirun puts before each line


def tokens(text: str, file: str) -> list[Token]:
    """Cuts a text into tokens; any text can be cut."""
    found: list[Token] = []
    for number, line in enumerate(text.split("\n"), 1):
        prefix = _RANK.match(line)
        leads = True
        for match in _TOKEN.finditer(line, prefix.end() if prefix else 0):
            if match["comment"] is not None:
                continue
            found.append(Token(match[0], Span(file, number, match.start() + 1, len(match[0]), line), leads))
            leads = False
    return found
