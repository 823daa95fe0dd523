"""Define the nodes into which a dump of nvFuser's host IR is parsed: one node for each printed statement.

A node holds the printed data without interpretation: tensors with their IterDomains, extents with their ceilDivs, and
the names of streams and indices. Versions of nvFuser spell some statements differently. The nodes are the same for all
spellings.
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
    """An operation on two index expressions, printed as `left op right`."""

    op: str
    left: Formula
    right: Formula


Formula = Token | Operation  # an index expression with unresolved names


@dataclass(frozen=True)
class AxisExtent:
    """The extent of a printed axis.

    Fields:
        size: the extent. Divisions are assumed to be exact.
        splits: the factors by which the axis was split. For example, `ceilDiv(ceilDiv(N, a), b)` has (a, b).
    """

    size: Size
    splits: tuple[Size, ...] = ()


@dataclass(frozen=True)
class IterDomain:
    """A printed axis, such as `ideviceIdx.x1{i2}`.

    Fields:
        iter_type: i for a plain axis, b for an axis of extent one, r for a reduced axis.
        on: x or y for a device axis, "stream" for a stream axis; empty for other axes.
        number: the number of the axis in the dump.
        extent: the extent.
        rfactor: True if the axis is marked `rf`: it comes from an rfactor or a reshape.
    """

    iter_type: str
    on: str
    number: int
    extent: AxisExtent
    rfactor: bool
    span: Span = field(compare=False)


@dataclass(frozen=True)
class Devices:
    """A printed DeviceMesh. `{0 1}` has one row and is no grid; `{{0 1}{2 3}}` is a grid."""

    rows: tuple[tuple[int, ...], ...]
    grid: bool


@dataclass(frozen=True)
class TensorNode:
    """A printed TensorView."""

    name: str
    dtype: DType
    domains: tuple[IterDomain, ...]
    devices: Devices | None
    span: Span = field(compare=False)

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Node:
    """The base class of printed statements."""

    span: Span

    @property
    def tensors(self) -> tuple[TensorNode, ...]:
        """The tensors that the statement names: operands first, the result last."""
        fields = [getattr(self, name, ()) for name in ("x", "operands", "out")]
        return tuple(tensor for held in fields for tensor in (held if isinstance(held, tuple) else (held,)))


@dataclass(frozen=True)
class StreamNode(Node):
    """GetCurrentStream, SetCurrentStream or Synchronize; `verb` is get, set or synchronize."""

    verb: str
    stream: Formula


@dataclass(frozen=True)
class LoopNode(Node):
    """A loop, printed as `FOR index from 0 to count:`."""

    index: Token
    count: AxisExtent
    body: tuple[Node, ...]


@dataclass(frozen=True)
class AllocateNode(Node):
    """A statement that allocates a tensor, printed as ALLOCATE.

    `always` is False if the statement is printed with `buffer=`. Such a statement does nothing if the tensor already
    has memory.
    """

    out: TensorNode
    always: bool


@dataclass(frozen=True)
class DeallocateNode(Node):
    """A statement that frees a tensor, printed as `Deallocate { x }`."""

    x: TensorNode


@dataclass(frozen=True)
class ViewNode(Node):
    """A view of a tensor. `op` is the keyword of hostir's statement: select, chunk, reshape, permute, ..."""

    op: str
    out: TensorNode
    x: TensorNode
    axis: IterDomain | None = None
    index: Formula | None = None
    over: str = ""


@dataclass(frozen=True)
class ComputeNode(Node):
    """A computation. `op` is the keyword of hostir's statement, such as matmul or relu."""

    op: str
    out: TensorNode
    operands: tuple[TensorNode, ...]
    dtype: str = ""


@dataclass(frozen=True)
class CommunicationNode(Node):
    """A communication, printed as `Communication number (type=..., team=(...), ...)`."""

    number: str
    type: Token
    team: tuple[int, ...]
    root: Formula | None
    x: TensorNode
    out: TensorNode


@dataclass(frozen=True)
class WaitNode(Node):
    """A wait for the communication `number`, printed as `Wait(Communication number)`."""

    number: str


@dataclass(frozen=True)
class DelayNode(Node):
    """A delay of a stream, printed as `Delay(microseconds)`. Only hostir prints it; nvFuser has no such statement."""

    microseconds: int


@dataclass(frozen=True)
class Dump:
    """A parsed dump of one `%HostIrContainer`.

    Fields:
        inputs, outputs: the tensors of the container.
        body: the statements.
        streams: the number of streams; None if the dump does not define it.
        symbols: the names of sizes, in the order in which they first appear.
    """

    inputs: tuple[TensorNode, ...]
    outputs: tuple[TensorNode, ...]
    body: tuple[Node, ...]
    streams: int | None
    symbols: tuple[str, ...]

    def walk(self) -> Iterator[Node]:
        """Yield every node of the dump in printed order, a loop before its body."""
        return walk(self.body)

    def tensors(self) -> Iterator[TensorNode]:
        yield from self.inputs
        for node in self.walk():
            yield from node.tensors


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Yield every node of a block in printed order, a loop before its body."""
    for node in body:
        yield node
        if isinstance(node, LoopNode):
            yield from walk(node.body)
