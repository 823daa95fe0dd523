"""Define the interface between statements and the machines that execute them, and evaluate programs on a machine.

A statement's `evaluate` gets a `Frame`, the state of one rank's run of a program. It looks up names, indices and sizes
in the frame, and calls methods of the frame's `Machine`. Some machines execute a call at once; others record it, to
prove the program or to plan its run. All machines implement the same methods.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, floordiv, mod, mul, sub
from typing import TYPE_CHECKING, Any, Protocol, cast

from hostir.ir.op import Bin, Expr, Lit, Statement, Value
from hostir.ir.source import HostIRError
from hostir.ir.types import DType, Kind, Mesh, TensorType, bind_shape

if TYPE_CHECKING:
    from hostir.ir.program import Program

ARITHMETIC: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv, "%": mod}
Handle = Any  # a machine's object for a tensor, a stream or a communication in flight


@dataclass(frozen=True)
class Move:
    """One message from rank `source` to rank `target`.

    The source's tensor is split into `take[1]` equal blocks, and the target's tensor into `put[1]` equal blocks. The
    message copies block `take[0]` of the source to block `put[0]` of the target.
    """

    source: int
    target: int
    take: tuple[int, int]
    put: tuple[int, int]


@dataclass(frozen=True)
class Exchange:
    """A communication as one rank sees it.

    Fields:
        communication: the keyword of the statement.
        team: the ranks that take part, in order.
        moves: the messages that this rank sends or receives; None for a collective, in which the whole team takes part.
    """

    communication: str
    team: tuple[int, ...]
    moves: tuple[Move, ...] | None = None

    def takes(self, rank: int) -> bool:
        """Return True if the communication reads memory of `rank`."""
        return self.moves is None or any(move.source == rank for move in self.moves)

    def gives(self, rank: int) -> bool:
        """Return True if the communication writes memory of `rank`."""
        return self.moves is None or any(move.target == rank for move in self.moves)


@dataclass(frozen=True)
class Ready:
    """The flags that a computation waits for while it runs. Flag `i` says that block `i` of an operand is ready.

    The rows of the operand and the rows of the result are split into equal blocks. Block `j` of the result needs the
    operand's blocks `j`, `j + results`, `j + 2 * results`, and further blocks in the same steps. For a matmul this is
    one block. For a sum it is one block of each source.

    Fields:
        flags, epoch: block `i` is ready when flag `i` has reached `epoch`.
        first: the block of the result that is computed first.
        blocks: the number of blocks of the operand.
        own_rows: rows that replace some blocks of the operand, if any. The kernel reads them without waiting, and
            leaves the replaced blocks undefined in the operand.
        results: the number of blocks of the result.
        own_first, own_blocks: the first block that `own_rows` replaces, and the number of these blocks.
        overlapped_sms: the number of SMs that the kernel does not get, because copies directly before it on its stream
            may still run on them. A machine that plans sets it.
        reserved_sms: the number of SMs that the kernel leaves free for kernels that send signals. A machine that plans
            sets it.
        along: the positions of further operands with the same rows. A flag says that the block's rows of these
            operands are ready, too. `own_rows` does not replace them.
    """

    flags: Handle
    epoch: int
    first: int
    blocks: int
    own_rows: Handle | None = None
    results: int = 0
    own_first: int = 0
    own_blocks: int = 0
    overlapped_sms: int = 0
    reserved_sms: int = 0
    along: tuple[int, ...] = ()

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The blocks of the result in the order in which they are computed."""
        return *range(self.first, self.results), *range(self.first)

    @cached_property
    def replaced(self) -> range:
        """The operand's blocks that `own_rows` replaces."""
        return range(self.own_first, self.own_first + self.own_blocks)

    def needed(self, result: int) -> tuple[int, ...]:
        """Return the blocks of the operand that block `result` of the result waits for, in ascending order."""
        return tuple(block for block in range(result, self.blocks, self.results) if block not in self.replaced)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """All blocks of the operand that the computation waits for, in the order in which it needs them."""
        return tuple(block for result in self.order for block in self.needed(result))


@dataclass(frozen=True)
class Done:
    """The flags of this rank that a computation sets while it runs.

    The rows of the result are split into `blocks` equal blocks, one for each flag. The computation sets flag `i` to
    `epoch` when it has written block `i`. It computes block `first` first. `along` has the same meaning as in `Ready`.
    """

    flags: Handle
    epoch: int
    first: int
    blocks: int
    along: tuple[int, ...] = ()

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The blocks in the order in which they are computed."""
        return *range(self.first, self.blocks), *range(self.first)


class OptionalMethods(Protocol):
    """The methods that a machine need not define, because they access no memory and order nothing."""

    def delay(self, microseconds: int) -> None:
        """Delay the current stream for about this long, if that helps on this machine."""
        return


class Machine(OptionalMethods, Protocol):
    """The interface of a machine that executes statements. `rank` is None on a machine that holds unsharded tensors.

    A handle is the machine's object for a tensor, a stream or a communication.
    """

    @property
    def rank(self) -> int | None:
        """The rank that this machine runs as."""

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> Handle:
        """Allocate a dense uninitialised tensor.

        A symmetric tensor persists from call to call; its flags start at 0.
        """

    def free(self, x: Handle) -> None:
        """Free a tensor: nothing issued later may touch it."""

    def select(self, x: Handle, axis: int, index: int) -> Handle:
        """Return the view of `x` at one index of an axis, without that axis."""

    def chunk(self, x: Handle, axis: int, outer: int, count: int, index: int) -> Handle:
        """Return the view of piece `index` of the `count` equal pieces of an axis.

        The axis is seen as [outer, count, inner]. The view has `outer` and `inner`, merged into one axis.
        """

    def reshape(self, x: Handle, shape: tuple[int, ...]) -> Handle:
        """Return the view of `x` in another shape."""

    def permute(self, x: Handle, axes: tuple[int, ...]) -> Handle:
        """Return the view of `x` with its axes in another order."""

    def dense(self, x: Handle) -> Handle:
        """Return `x` if it is dense, else a dense copy, made on the current stream and freed at the end of the call."""

    def compute(
        self,
        computation: str,
        out: Handle,
        operands: Sequence[Handle | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        """Run the kernel of `computation` on the current stream. The kernel writes `out`.

        With `ready`, the kernel works on blocks of rows, and waits for a flag before each block. With `done`, it sets a
        flag after each block.
        """

    def communicate(self, exchange: Exchange, x: Handle | None, out: Handle | None) -> Handle:
        """Start a communication after the current stream's earlier work; return its handle."""

    def wait(self, handle: Handle) -> None:
        """Make the current stream wait for a communication."""

    def copy(self, x: Handle, out: Handle, source: int, target: int, sms: int = 0) -> None:
        """Copy `x` of rank `source` to `out` of rank `target` on the current stream: by `sms` SMs, if not 0.

        This rank is `source` or `target`. The tensor on the other rank is symmetric. The argument for this tensor is
        the same view of the symmetric tensor on this rank.
        """

    def signal(self, flags: Handle, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        """Set a flag of a peer to an epoch of this call, in stream order; by a kernel if `sms` is not 0."""

    def wait_signal(self, flags: Handle, slot: int, epoch: int) -> None:
        """Make the current stream wait until a flag of this rank has reached an epoch of this call."""

    def barrier(self, team: tuple[int, ...]) -> None:
        """Make the current stream wait until every rank of the team has reached this barrier.

        The n-th barriers of the ranks of a team are one barrier.
        """

    def current_stream(self) -> Handle:
        """Return the current stream, to which statements are issued."""

    def set_stream(self, stream: Handle | int) -> None:
        """Make a stream, or the worker stream with this index, the current stream."""

    def synchronize(self, stream: Handle | int) -> None:
        """Make the current stream wait for all work issued to another stream so far; the host does not wait."""


@dataclass
class Frame:
    """The state of one rank's run of a program: its machine, the sizes, and the handle of each name defined so far."""

    machine: Machine
    sizes: Mapping[str, int]
    handles: dict[str, Handle] = field(default_factory=dict)

    def __getitem__(self, value: Value | None) -> Handle | None:
        return None if value is None else self.handles.get(value.name)

    def __setitem__(self, value: Value, handle: Handle) -> None:
        self.handles[value.name] = handle

    def here(self, *meshes: Mesh | None) -> bool:
        """Return True if this rank belongs to any of the meshes."""
        rank = self.machine.rank
        return rank is None or any(mesh is None or rank in mesh.places for mesh in meshes)

    def shape(self, type: TensorType) -> tuple[int, ...]:
        """Return the shape of a tensor on this machine: of one rank's part, or of the unsharded tensor."""
        return bind_shape(type.shape if self.machine.rank is None else type.local_shape, self.sizes)

    def empty(self, value: Value) -> bool:
        """Return True if a tensor has no elements on any rank. Statements that only compute or move it are skipped."""
        return 0 in self.sizes.values() and 0 in self.shape(value.tensor)  # only symbols can be 0

    def index(self, expr: Expr) -> int:
        if isinstance(expr, Lit):
            return expr.value
        if isinstance(expr, Bin):
            return ARITHMETIC[expr.op](self.index(expr.left), self.index(expr.right))
        return cast("int", self.handles[expr.value.name])

    def place(self, mesh: Mesh, over: str) -> int:
        """Return the position of this rank along a mesh axis; the rank must belong to the mesh."""
        assert self.machine.rank is not None
        return mesh.coordinate(self.machine.rank, over)

    def member(self, team: tuple[int, ...], place: int) -> int:
        """Return the rank at a position in a team to which this rank belongs."""
        return team[place]

    def stream(self, expr: Expr) -> Handle | int:
        """Return a stream operand: a stream value, or an index into the pool."""
        if not isinstance(expr, (Lit, Bin)) and expr.value.type is Kind.STREAM:
            return self.handles[expr.value.name]
        return self.index(expr)


def meshes_of(values: Iterable[Value]) -> tuple[Mesh | None, ...]:
    """Return the meshes of the tensors among these values."""
    return tuple(v.type.mesh for v in values if isinstance(v.type, TensorType))


MAX_UNROLLED = 1_000_000  # statements with loops unrolled; planning more takes minutes and much memory


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection within a context: unrolling a program creates millions of objects and drops few.

    Collections would visit all objects again and again, and take as long as the unrolling itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Observer:
    """Receives each statement before it is evaluated, so that traces and errors can name it."""

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        """Record the statement to evaluate next, and the indices of the loops around it, outermost first."""


def interpret(
    program: Program,
    machine: Machine,
    sizes: Mapping[str, int],
    inputs: Sequence[Handle | None],
    observer: Observer | None = None,
    frames: type[Frame] = Frame,
) -> tuple[Handle | None, ...]:
    """Evaluate every statement on a machine in program order, with loops unrolled; return the outputs' handles.

    `inputs` are the handles of this rank's parts, or of unsharded tensors if the machine's rank is None. An input is
    None if the rank holds no part of it. Raises HostIRError at the loop that makes the program longer than
    `MAX_UNROLLED` statements.
    """
    unrolled_length(program.body, sizes)
    frame = frames(machine, sizes)
    for value, handle in zip(program.inputs, inputs, strict=True):
        frame[value] = handle
    _run(program.body, frame, observer or Observer(), ())
    return tuple(frame[value] for value in program.outputs)


def unrolled_length(body: tuple[Statement, ...], sizes: Mapping[str, int]) -> int:
    """Return the number of statements of a body with its loops unrolled. Each round counts as one more statement.

    Raise HostIRError at the loop that makes the body longer than `MAX_UNROLLED` statements.
    """
    total = 0
    for statement in body:
        if not statement.bodies:
            total += 1
            continue
        total += statement.repeats.bind(sizes) * (1 + sum(unrolled_length(inner, sizes) for inner in statement.bodies))
        if total > MAX_UNROLLED:
            raise statement.fail(
                f"with this loop the program has {total} statements and rounds when unrolled",
                expected=f"at most {MAX_UNROLLED}",
                hint="choose fewer rounds, each with more work",
            )
    return total


def _rounds(statement: Statement, frame: Frame) -> Iterator[tuple[int, ...]]:
    """Yield the rounds of a statement; turn any exception into an error that points at the statement."""
    try:
        yield from statement.rounds(frame)
    except HostIRError:
        raise
    except Exception as problem:
        raise statement.fail(f"{type(problem).__name__}: {problem}") from problem


def _run(statements: tuple[Statement, ...], frame: Frame, observer: Observer, rounds: tuple[int, ...]) -> None:
    for statement in statements:
        if statement.bodies:
            for index in _rounds(statement, frame):
                for body in statement.bodies:
                    _run(body, frame, observer, (*rounds, *index))
            continue
        observer.at(statement, rounds)
        try:
            statement.evaluate(frame)
        except HostIRError:
            raise
        except Exception as problem:
            raise statement.fail(f"{type(problem).__name__}: {problem}") from problem
