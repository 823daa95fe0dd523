"""Define the interface between statements and the machines that execute them, and evaluate programs on a machine.

A `Frame` is the state of one rank's run of a program. A statement's `evaluate` looks up names, indices and sizes in a
frame, and calls methods of the frame's `Machine`. All machines have the same methods. Some machines execute a method
call at once. Others record it, to check the program or to plan a run.
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
    """The role of one rank in a communication.

    Fields:
        communication: the keyword of the statement.
        team: the ranks that take part, in order.
        moves: the messages that this rank sends or receives; None for a collective.
        by: the implementation of a collective, as in `hostir.ir.comm_ops.Implemented`.
    """

    communication: str
    team: tuple[int, ...]
    moves: tuple[Move, ...] | None = None
    by: str = ""

    @property
    def named(self) -> tuple[str, str]:
        """The keyword and the implementation, which are the same on all ranks of the team."""
        return self.communication, self.by

    def takes(self, rank: int) -> bool:
        """Return True if `rank` sends data. Then the communication reads memory of `rank`."""
        return self.moves is None or any(move.source == rank for move in self.moves)

    def gives(self, rank: int) -> bool:
        """Return True if `rank` receives data. Then the communication writes memory of `rank`."""
        return self.moves is None or any(move.target == rank for move in self.moves)


@dataclass(frozen=True)
class Ready:
    """The flags that a computation waits for while it runs. Flag `i` says that block `i` of an operand is ready.

    The rows of the operand and the rows of the result are split into equal blocks. Block `j` of the result needs the
    operand's blocks `j`, `j + results`, `j + 2 * results`, and so on. For a matmul, this is only block `j`. For a sum,
    it is one block of each source.

    Fields:
        flags, epoch: the row of flags, and the epoch. Block `i` is ready when flag `i` has reached `epoch`.
        first: the block of the result that is computed first.
        blocks: the number of blocks of the operand.
        own_rows: rows that replace some blocks of the operand; None if no block is replaced. The kernel reads these
            rows without waiting. The contents of the replaced blocks are undefined.
        results: the number of blocks of the result.
        own_first, own_blocks: the first block that `own_rows` replaces, and the number of replaced blocks.
        overlapped_sms: the number of SMs that the kernel does not get. The copies that precede the kernel on its stream
            may still run on these SMs. A machine that plans sets this field.
        reserved_sms: the number of SMs that the kernel leaves free for kernels that send signals. A machine that plans
            sets this field.
        along: the positions of further operands with the same rows. Flag `i` says that block `i` of each of these
            operands is ready, too. `own_rows` does not replace their rows.
        early: the positions of operands that the kernel reads when it starts, whatever flags it waits for.
        sources: the number of leading axes that count sources. Blocks consist of complete sources, each source is
            computed alone, and the operands in `along` have one row for each source. It is 0 for computations that can
            be cut between any two rows.
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
    early: tuple[int, ...] = ()
    sources: int = 0

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The numbers of the result's blocks in the order in which the kernel computes them."""
        return *range(self.first, self.results), *range(self.first)

    @cached_property
    def replaced(self) -> range:
        """The numbers of the operand's blocks that `own_rows` replaces."""
        return range(self.own_first, self.own_first + self.own_blocks)

    def needed(self, result: int) -> tuple[int, ...]:
        """Return the numbers of the operand's blocks that block `result` of the result needs, in ascending order."""
        return tuple(block for block in range(result, self.blocks, self.results) if block not in self.replaced)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """The numbers of all blocks of the operand for which the kernel waits, in the order in which it needs them."""
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
        """The numbers of the blocks in the order in which the kernel computes them."""
        return *range(self.first, self.blocks), *range(self.first)


class OptionalMethods(Protocol):
    """Methods that a machine may leave out, because they access no memory and order nothing."""

    def delay(self, microseconds: int) -> None:
        """Delay the current stream for about this time. A machine on which a delay does not help ignores it."""
        return


class Machine(OptionalMethods, Protocol):
    """The interface of a machine that executes statements. `rank` is None on a machine that holds unsharded tensors.

    A handle is the machine's object for a tensor, a stream or a communication.
    """

    @property
    def rank(self) -> int | None:
        """The rank of this machine; None if the machine holds unsharded tensors."""

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> Handle:
        """Allocate a dense uninitialised tensor.

        A symmetric tensor persists from call to call; its flags start at 0.
        """

    def free(self, x: Handle) -> None:
        """Free a tensor. No statement that is issued later accesses it."""

    def select(self, x: Handle, axis: int, index: int) -> Handle:
        """Return the view of `x` at one index of an axis, without that axis."""

    def chunk(self, x: Handle, axis: int, outer: int, count: int, index: int) -> Handle:
        """Return a view of one piece of an axis: piece `index` of `count` equal pieces.

        The axis is treated as three axes [outer, count, inner]. The view selects `index` on the middle axis, and merges
        the other two axes into one axis.
        """

    def reshape(self, x: Handle, shape: tuple[int, ...]) -> Handle:
        """Return the view of `x` in another shape."""

    def permute(self, x: Handle, axes: tuple[int, ...]) -> Handle:
        """Return the view of `x` with its axes in another order."""

    def dense(self, x: Handle) -> Handle:
        """Return `x` if it is dense, else a dense copy of it.

        The copy is made on the current stream. It is freed at the end of the call.
        """

    def compute(
        self,
        computation: str,
        out: Handle,
        operands: Sequence[Handle | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        """Run the kernel of a computation on the current stream. The kernel writes `out`.

        With `ready`, the kernel computes one block of rows after another, and waits for flags before each block. With
        `done`, it sets a flag after each block.

        Args:
            computation: the keyword of the statement.
            out: the result.
            operands: the operands; None for an optional operand that is left out.
            options: the other options of the statement, by field name.
            ready: the flags that the kernel waits for.
            done: the flags that the kernel sets.
        """

    def communicate(self, exchange: Exchange, x: Handle | None, out: Handle | None) -> Handle:
        """Start a communication, which runs after the current stream's earlier work; return its handle."""

    def wait(self, handle: Handle) -> None:
        """Make the current stream wait for a communication."""

    def copy(self, x: Handle, out: Handle, source: int, target: int, sms: int = 0) -> None:
        """Copy `x` on rank `source` to `out` on rank `target`, on the current stream.

        This rank is `source` or `target`. The tensor on the other rank is in symmetric memory. To name that tensor,
        pass the same view of this rank's symmetric tensor. If `sms` is 0, a copy engine copies. Otherwise, a kernel on
        `sms` SMs copies.
        """

    def signal(self, flags: Handle, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        """Set flag `slot` of a peer to an epoch of this call, after all earlier work on the current stream.

        If `sms` is 0, the stream itself sets the flag. Otherwise, a kernel sets it.
        """

    def wait_signal(self, flags: Handle, slot: int, epoch: int) -> None:
        """Make the current stream wait until flag `slot` of this rank has reached an epoch of this call."""

    def barrier(self, team: tuple[int, ...]) -> None:
        """Make the current stream wait until every rank of the team has reached this barrier.

        The n-th call on one rank and the n-th call on any other rank of the team belong to the same barrier.
        """

    def current_stream(self) -> Handle:
        """Return the current stream, to which statements are issued."""

    def set_stream(self, stream: Handle | int) -> None:
        """Make a stream the current stream. An integer is the index of a worker stream."""

    def synchronize(self, stream: Handle | int) -> None:
        """Make the current stream wait for all work issued to another stream so far. The host does not wait."""


@dataclass
class Frame:
    """The state of one rank's run of a program.

    Fields:
        machine: the machine that runs the program.
        sizes: the values of the symbolic sizes.
        handles: a map from the name of each value defined so far to the machine's handle. For an index, it holds an
            integer instead.
    """

    machine: Machine
    sizes: Mapping[str, int]
    handles: dict[str, Handle] = field(default_factory=dict)

    def __getitem__(self, value: Value | None) -> Handle | None:
        return None if value is None else self.handles.get(value.name)

    def __setitem__(self, value: Value, handle: Handle) -> None:
        self.handles[value.name] = handle

    def here(self, *meshes: Mesh | None) -> bool:
        """Return True if this rank belongs to one of the meshes. A mesh of None contains all ranks."""
        rank = self.machine.rank
        return rank is None or any(mesh is None or rank in mesh.places for mesh in meshes)

    def shape(self, type: TensorType) -> tuple[int, ...]:
        """Return the shape that a tensor has on this machine.

        It is the shape of one rank's part, or of the unsharded tensor if the machine holds unsharded tensors.
        """
        return bind_shape(type.shape if self.machine.rank is None else type.local_shape, self.sizes)

    def empty(self, value: Value) -> bool:
        """Return True if a tensor has no elements on any rank. Statements do not compute or transfer such a tensor."""
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
        """Return the rank at position `place` of a team."""
        return team[place]

    def stream(self, expr: Expr) -> Handle | int:
        """Return the stream for an operand: the handle of a stream value, or the index of a worker stream."""
        if not isinstance(expr, (Lit, Bin)) and expr.value.type is Kind.STREAM:
            return self.handles[expr.value.name]
        return self.index(expr)


def meshes_of(values: Iterable[Value]) -> tuple[Mesh | None, ...]:
    """Return the meshes of the tensors among these values."""
    return tuple(v.type.mesh for v in values if isinstance(v.type, TensorType))


MAX_UNROLLED = 1_000_000  # the most statements after loops are unrolled; more would take minutes and much memory


@contextmanager
def uncollected() -> Iterator[None]:
    """Return a context manager that disables garbage collection, for code that unrolls a program.

    Unrolling creates millions of objects, and few of them become garbage. The garbage collector would visit all objects
    again and again, which would take as long as the unrolling itself.
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
    """Evaluate every statement on a machine in program order, with loops unrolled; return the handles of the outputs.

    Raises HostIRError at the loop that makes the program longer than `MAX_UNROLLED` statements.

    Args:
        program: the program.
        machine: the machine.
        sizes: the values of the symbolic sizes.
        inputs: a handle for each input. It stands for this rank's part of the input, or for the unsharded input if the
            machine's rank is None. It is None if this rank holds no part of the input.
        observer: receives each statement before the statement is evaluated.
        frames: the class of the frame.
    """
    unrolled_length(program.body, sizes)
    frame = frames(machine, sizes)
    for value, handle in zip(program.inputs, inputs, strict=True):
        frame[value] = handle
    _run(program.body, frame, observer or Observer(), ())
    return tuple(frame[value] for value in program.outputs)


def unrolled_length(body: tuple[Statement, ...], sizes: Mapping[str, int]) -> int:
    """Return the number of statements in a body after its loops are unrolled. Each round of a loop counts as one more.

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
    """Yield the rounds of a statement's body (see `Statement.rounds`). Errors point at the statement."""
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
