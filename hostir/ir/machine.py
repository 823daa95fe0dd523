"""The seam between what a statement means and what executes it.

A statement's `evaluate` speaks to a `Frame`: one rank's view of one run of a program. The frame resolves names, indices
and sizes, and hands them to a `Machine`. Machines that plan first (streams, graphs) record what they are told; machines
that are eager do it at once. The same methods serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, floordiv, mod, mul, sub
from typing import Any, Protocol, cast

from hostir.ir.op import Bin, Expr, Lit, Value
from hostir.ir.types import DType, Kind, Mesh, TensorType, bind_shape

ARITHMETIC: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv, "%": mod}
Handle = Any  # what a machine stands for a tensor, a stream or a communication in flight


@dataclass(frozen=True)
class Move:
    """One message: block `take[0]` of `take[1]` equal blocks at the source becomes block `put[0]` of `put[1]` there."""

    source: int
    target: int
    take: tuple[int, int]
    put: tuple[int, int]


@dataclass(frozen=True)
class Exchange:
    """A communication as one rank sees it: its kind, its team in order, and for kinds between meshes the messages."""

    kind: str
    team: tuple[int, ...]
    moves: tuple[Move, ...] | None = None

    def takes(self, rank: int) -> bool:
        """Whether it reads what a rank sends."""
        return self.moves is None or any(move.source == rank for move in self.moves)

    def gives(self, rank: int) -> bool:
        """Whether it writes what a rank receives."""
        return self.moves is None or any(move.target == rank for move in self.moves)


@dataclass(frozen=True)
class Ready:
    """What a product waits for while it runs: block `i` of its rows is there when flag `i` has reached `epoch`.

    The rows of its left side are `blocks` equal blocks, which it computes one after another, beginning with `first`,
    whose rows are those of `own` if that is there, and not waited for: what the left side has there may be overwritten.
    """

    flags: Handle
    epoch: int
    first: int
    blocks: int
    own: Handle | None = None

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The blocks, as they are computed."""
        return *range(self.first, self.blocks), *range(self.first)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """The blocks that it waits for, as they are computed."""
        return self.order if self.own is None else self.order[1:]


class Machine(Protocol):
    """What executes statements. `rank` is None on a machine that holds whole, unsharded tensors."""

    @property
    def rank(self) -> int | None:
        """Which rank it is."""

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> Handle:
        """A dense uninitialised tensor. A symmetric one is the same in every call; flags are 0 at first."""

    def free(self, x: Handle) -> None:
        """Ends a tensor: nothing issued later may touch it."""

    def select(self, x: Handle, axis: int, index: int) -> Handle:
        """The view of `x` at one index of an axis, which goes away."""

    def chunk(self, x: Handle, axis: int, outer: int, count: int, index: int) -> Handle:
        """Views the axis as [outer, count, inner], takes `index` of `count`, and merges outer and inner again."""

    def reshape(self, x: Handle, shape: tuple[int, ...]) -> Handle:
        """The view of `x` in another shape."""

    def permute(self, x: Handle, axes: tuple[int, ...]) -> Handle:
        """The view of `x` with its axes in another order."""

    def dense(self, x: Handle) -> Handle:
        """`x` itself where it is dense, else a dense copy, made on the current stream; it lasts as long as the call."""

    def compute(self, kind: str, out: Handle, operands: Sequence[Handle | None], options: Mapping[str, Any]) -> None:
        """Runs kernel `kind` on the current stream, writing `out`."""

    def communicate(self, exchange: Exchange, x: Handle | None, out: Handle | None) -> Handle:
        """Starts a communication after the current stream's earlier work; returns its handle."""

    def wait(self, handle: Handle) -> None:
        """The current stream waits for a communication."""

    def copy(self, x: Handle, out: Handle, source: int, target: int, sms: int = 0) -> None:
        """Copies `x` of rank `source` to `out` of rank `target`, on the current stream: so many SMs do, if not 0.

        This rank is one of the two. The other's tensor is symmetric, and named by this rank's own view of it.
        """

    def signal(self, flags: Handle, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        """Sets a flag of a peer to an epoch of this call, once the current stream gets there: an SM does, if not 0."""

    def wait_signal(self, flags: Handle, slot: int, epoch: int) -> None:
        """The current stream waits until a flag of this rank has reached an epoch of this call."""

    def barrier(self, team: tuple[int, ...]) -> None:
        """The current stream waits until every rank of the team has got to its barrier of the same number."""

    def current_stream(self) -> Handle:
        """The stream that statements are issued to now."""

    def set_stream(self, stream: Handle | int) -> None:
        """Issues what follows to a stream, or to a member of the pool."""

    def synchronize(self, stream: Handle | int) -> None:
        """The current stream waits for all that was issued on another so far; the host does not."""

    def delay(self, microseconds: int) -> None:
        """The current stream stands still for about so long, if that helps anyone on this machine."""


@dataclass
class Frame:
    """One rank's run of a program: its machine, the sizes, and what every name stands for so far."""

    machine: Machine
    sizes: Mapping[str, int]
    handles: dict[str, Handle] = field(default_factory=dict)

    def __getitem__(self, value: Value | None) -> Handle | None:
        return None if value is None else self.handles.get(value.name)

    def __setitem__(self, value: Value, handle: Handle) -> None:
        self.handles[value.name] = handle

    def here(self, *meshes: Mesh | None) -> bool:
        """Whether this rank belongs to any of the meshes."""
        rank = self.machine.rank
        return rank is None or any(mesh is None or rank in mesh.places for mesh in meshes)

    def shape(self, type: TensorType) -> tuple[int, ...]:
        """The shape that this machine gives a tensor: one rank's part, or the whole."""
        return bind_shape(type.shape if self.machine.rank is None else type.local_shape, self.sizes)

    def empty(self, value: Value) -> bool:
        """Whether a tensor has no elements, on all ranks alike: what only makes or moves such is never issued."""
        return 0 in self.sizes.values() and 0 in self.shape(value.tensor)  # only symbols can be 0

    def index(self, expr: Expr) -> int:
        if isinstance(expr, Lit):
            return expr.value
        if isinstance(expr, Bin):
            return ARITHMETIC[expr.op](self.index(expr.left), self.index(expr.right))
        return cast("int", self.handles[expr.value.name])

    def place(self, mesh: Mesh, over: str) -> int:
        """Where this rank, which belongs to a mesh, stands along one of its axes."""
        assert self.machine.rank is not None
        return mesh.coordinate(self.machine.rank, over)

    def member(self, team: tuple[int, ...], place: int) -> int:
        """The rank at a place in a team of this rank's."""
        return team[place]

    def stream(self, expr: Expr) -> Handle | int:
        """A stream operand: a stream value, or an index into the pool."""
        if not isinstance(expr, (Lit, Bin)) and expr.value.type is Kind.STREAM:
            return self.handles[expr.value.name]
        return self.index(expr)


def meshes_of(values: Iterable[Value]) -> tuple[Mesh | None, ...]:
    """The meshes of the tensors among these values."""
    return tuple(v.type.mesh for v in values if isinstance(v.type, TensorType))
