"""The nodes of a dump of nvFuser's host IR, one for each line.

A node keeps the printed form: tensors with their IterDomains, extents with their ceilDivs, streams and indices by name.
The spellings of several versions lead to the same nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hostir.ir.sizes import Size
from hostir.ir.source import Span
from hostir.ir.types import DType
from hostir.nvfuser.tokens import Token


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

    iter_type: str  # i: an axis, b: an axis of extent one, r: a reduced axis
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
        """The tensors that it names: operands first, the result last."""
        fields = [getattr(self, name, ()) for name in ("x", "operands", "out")]
        return tuple(tensor for held in fields for tensor in (held if isinstance(held, tuple) else (held,)))


@dataclass(frozen=True)
class StreamNode(Node):
    """GetCurrentStream, SetCurrentStream or Synchronize; `verb` is get, set or synchronize."""

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


@dataclass(frozen=True)
class DeallocateNode(Node):
    """Deallocate { x }."""

    x: TensorNode


@dataclass(frozen=True)
class ViewNode(Node):
    """A view of the same memory: `op` is select, chunk, reshape, permute, as_partial or dense."""

    op: str
    out: TensorNode
    x: TensorNode
    axis: IterDomain | None = None
    index: Formula | None = None
    over: str = ""


@dataclass(frozen=True)
class ComputeNode(Node):
    """A computation: `op` is the keyword of our statement."""

    op: str
    out: TensorNode
    operands: tuple[TensorNode, ...]
    dtype: str = ""


@dataclass(frozen=True)
class CommunicationNode(Node):
    """Communication number (type=..., team=(...), ...)."""

    number: str
    type: Token
    team: tuple[int, ...]
    root: Formula | None
    x: TensorNode
    out: TensorNode


@dataclass(frozen=True)
class WaitNode(Node):
    """A wait for the communication with this number, printed as `Wait(Communication number)`."""

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
