"""A program unrolled for one rank and one set of shapes: what the rank does, as data, in the order of issue.

Names, loops, indices and sizes are gone: operations on numbered registers are left, each knowing the statement it came
from. `recorder.record` makes them. The machines bind them to closures over one list of registers, and a run is those
closures called one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hostir.ir.comm_ops import Communication
from hostir.ir.machine import Ready
from hostir.ir.op import Statement
from hostir.ir.p2p_ops import Message
from hostir.ir.program import Program, format_statement
from hostir.ir.source import HostIRError
from hostir.runtime.kernels.kernel import Kernel, repeating
from hostir.runtime.kernels.table import REPEATABLE

CALLER = -1  # the caller's stream; the pool's are 0, 1, ...
NONE = 0  # the register that always holds None

# A flag is one integer, so that a machine sets it and waits for it in one go: the number of the call, from 1, in the
# upper half, and the epoch of that call in the lower. It rises from epoch to epoch and from call to call, whichever of
# an executor's plans they run; 2^31 calls of 2^32 epochs are more than anyone will make.
FLAGS = torch.int64
EPOCHS = 1 << 32


def flag_value(call: int, epoch: int) -> int:
    """What a flag holds once it has reached an epoch of a call."""
    return call * EPOCHS + epoch


@dataclass(frozen=True)
class Place:
    """A statement, and the indices of the loops around it, outermost first."""

    statement: Statement
    rounds: tuple[int, ...]


# Operations -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Op:
    """One operation. `stream` is the stream that is current where it is issued."""

    place: Place
    stream: int


@dataclass(frozen=True)
class Allocate(Op):
    """`registers[out]` becomes a dense uninitialised tensor, unless the caller's tensor for an output is there."""

    out: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Symmetric(Op):
    """`registers[out]` becomes `rank`'s buffer of those that ranks allocate under one name in one round.

    It is dense, belongs to the executor, and is the same in every run with these sizes. Flags are int64.
    """

    out: int
    name: str
    rounds: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int


@dataclass(frozen=True)
class View(Op):
    """`registers[out]` becomes a view of the buffer `x`; `offset` counts elements from the buffer's first.

    Where the view is `x[index]`, `index` says so: torch makes such a view in two thirds of the time.
    """

    out: int
    x: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    index: int | None


def index_of(whole: torch.Tensor, view: torch.Tensor) -> int | None:
    """The i for which the view is `whole[i]`, or None."""
    if view.shape != whole.shape[1:] or view.stride() != whole.stride()[1:] or not whole.ndim:
        return None
    index, rest = divmod(int(view.storage_offset()), max(int(whole.stride(0)), 1))
    return index if rest == 0 and index < whole.shape[0] else None


@dataclass(frozen=True)
class Free(Op):
    """The buffer and all its views go."""

    buffer: int


@dataclass(frozen=True)
class Compute(Op):
    """Kernel `kind` writes `out`.

    With `ready`, whose flags and own rows are registers, it computes each block of rows once the flag of that block is
    up. It may start while the copies run that come right before it on its stream: `beside` is on how many SMs, 0 where
    none do. `spare` is how many it leaves to signals that come before it in the call and that kernels send.
    """

    kind: str
    out: int
    operands: tuple[int, ...]
    options: Mapping[str, Any]
    ready: Ready | None = None
    beside: int = 0
    spare: int = 0

    @property
    def touches(self) -> tuple[int, ...]:
        """The registers that it reads or writes."""
        own = () if self.ready is None or self.ready.own is None else (self.ready.own,)
        return self.out, *self.operands, *own


@dataclass(frozen=True)
class Copy(Op):
    """`out` becomes `x`, without SMs if `sms` is 0, else by a kernel on so many. One may be a peer's memory."""

    x: int
    out: int
    sms: int = 0


@dataclass(frozen=True)
class Signal(Op):
    """Element `slot` of `flags`, which are those of `peer`, reaches an epoch of this call.

    The stream itself sees to that if `sms` is 0, else a kernel on so many.
    """

    flags: int
    slot: int
    epoch: int
    peer: int
    sms: int = 0


@dataclass(frozen=True)
class WaitSignal(Op):
    """The stream waits until element `slot` of this rank's `flags` has reached an epoch of this call."""

    flags: int
    slot: int
    epoch: int


@dataclass(frozen=True)
class Barrier(Op):
    """The stream waits for the ranks of a team, each at its barrier of this number, which counts in every call."""

    team: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Collective(Op):
    """A communication of the whole team. `x` and `out` are dense, and the same memory for an allreduce."""

    kind: str
    team: tuple[int, ...]
    x: int
    out: int
    handle: int


@dataclass(frozen=True)
class Messages(Op):
    """Pieces to and from other ranks: pairs of a register and a rank.

    Where it is `collective`, it is one rank's side of a transfer between meshes, and has its turn among the collectives
    of the team. Else it has it among this rank's own messages, which collectives neither wait for nor keep waiting.
    """

    team: tuple[int, ...]
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    collective: bool
    handle: int


@dataclass(frozen=True)
class Mark(Op):
    """The end, on its own stream, of a communication that stayed within the rank: what other streams wait for."""

    handle: int


@dataclass(frozen=True)
class Wait(Op):
    """The stream waits for a communication."""

    handle: int


@dataclass(frozen=True)
class Synchronize(Op):
    """The stream waits for all that was issued on the stream `other`."""

    other: int


@dataclass(frozen=True)
class Delay(Op):
    """The stream stands still."""

    microseconds: int


@dataclass(frozen=True)
class Recording:
    """Operations in the order of issue, and where a call's tensors go and come from.

    Fields:
        sizes: what its symbols stand for.
        inputs: the registers of the program's inputs; they follow one another.
        outputs: the registers of its outputs, NONE where this rank holds none.
        buffers: for each register the register of the memory behind it, NONE for a handle.
    """

    program: Program
    rank: int
    sizes: Mapping[str, int]
    ops: tuple[Op, ...]
    inputs: range
    outputs: tuple[int, ...]
    buffers: tuple[int, ...]

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that a run allocates, over all its buffers, and bytes of this rank's symmetric memory."""
        mine = [op for op in self.ops if isinstance(op, Symmetric) and op.rank == self.rank]
        return _bytes(op for op in self.ops if isinstance(op, Allocate)), _bytes(mine)

    def text(self, op: Op) -> str:
        """The statement behind an operation, in one line."""
        return format_statement(op.place.statement, self.program).strip()

    def describe(self, op: Op) -> str:
        """The same with its round in each loop, for a message."""
        rounds = ", ".join(map(str, op.place.rounds))
        return f"'{self.text(op)}'" + (f" in round {rounds}" if rounds else "")

    def failure(self, op: Op, problem: BaseException) -> HostIRError:
        """What a person reads when an operation raises: the rank, the statement, the line it stands in, the cause."""
        what = str(problem) if isinstance(problem, HostIRError) else f"{type(problem).__name__}: {problem}"
        return op.place.statement.fail(f"rank {self.rank}, {self.describe(op)}: {what}")


def _bytes(buffers: Iterable[Allocate | Symmetric]) -> int:
    return sum(prod(op.shape) * op.dtype.itemsize for op in buffers)


# Teams ------------------------------------------------------------------------------------------------------------
def teams_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """The members, in ascending order, of every team of two ranks or more that communicates, in program order.

    The same on every rank: what must be made for a team is made in this order everywhere.
    """
    found: dict[tuple[int, ...], None] = {}
    for statement in program.walk():
        if not isinstance(statement, Communication):
            continue
        devices = sorted({device for mesh in statement.meshes if mesh for device in mesh.devices})
        found.update((tuple(sorted(statement.exchange(device).team)), None) for device in devices)
    return tuple(team for team in found if len(team) > 1)


def message_teams_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """As `teams_of`, for the teams whose ranks send each other messages."""
    teams = (team for statement in program.walk() if isinstance(statement, Message) for team in statement.teams)
    return tuple(dict.fromkeys(team for team in teams if len(team) > 1))


# Binding ----------------------------------------------------------------------------------------------------------
Step = Callable[[], object]


def bind(
    op: Allocate | View | Compute, registers: list[Any], device: torch.device, kernels: Mapping[str, Kernel]
) -> Step:
    """The closure that carries out an operation that is the same on every machine."""
    if isinstance(op, Allocate):
        return _bind_allocate(op, registers, device)
    if isinstance(op, View):
        return _bind_view(op, registers)
    return _bind_compute(op, registers, kernels[op.kind])


def _bind_allocate(op: Allocate, registers: list[Any], device: torch.device) -> Step:
    out, shape, dtype, empty = op.out, op.shape, op.dtype, torch.empty

    def step() -> None:
        if registers[out] is None:  # else it is an output, and the caller gave a tensor for it
            registers[out] = empty(shape, dtype=dtype, device=device)

    return step


def _bind_view(op: View, registers: list[Any]) -> Step:
    out, x, shape, stride, offset, index = op.out, op.x, op.shape, op.stride, op.offset, op.index

    def item() -> None:
        registers[out] = registers[x][index]

    def strided() -> None:
        buffer = registers[x]  # an input may start anywhere in its own storage
        registers[out] = buffer.as_strided(shape, stride, buffer.storage_offset() + offset)

    return strided if index is None else item


def _bind_compute(op: Compute, registers: list[Any], kernel: Kernel) -> Step:
    out, operands, options = op.out, op.operands, dict(op.options)
    if kernel in REPEATABLE:
        multiply = repeating(kernel, **options)
        return lambda: multiply(registers[out], *[registers[i] for i in operands])
    if options or len(operands) > 2:
        return lambda: kernel(registers[out], *[registers[i] for i in operands], **options)
    if len(operands) == 2:
        x, y = operands
        return lambda: kernel(registers[out], registers[x], registers[y])
    (x,) = operands
    return lambda: kernel(registers[out], registers[x])
