"""The unrolled program: the operations of one rank for given sizes, with their registers and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from hostir.ir.comm_ops import LOW_LATENCY, SLOTS, WORKSPACE
from hostir.ir.op import IndexOperand
from hostir.ir.program import Program, format_statement
from hostir.ir.regions import is_dense
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import TensorOp
from hostir.ir.types import DType
from hostir.plan.operations import NONE, AllocateOp, CollectiveOp, ComputeOp, ElementRange, Op, SymmetricOp
from hostir.plan.order import RankOrder


class RegisterView(NamedTuple):
    """A tensor: the register of its buffer, and its layout in the buffer.

    Strides and offset are numbers of elements.
    """

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def dense(self) -> bool:
        return is_dense(self.shape, self.strides)

    @property
    def extent(self) -> ElementRange:
        if 0 in self.shape:
            return self.offset, self.offset
        steps = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        return self.offset, self.offset + sum(steps) + 1

    def index_in(self, buffer: RegisterView) -> int | None:
        """Return i if this view is `buffer[i]`; return None if there is no such i."""
        if self.shape != buffer.shape[1:] or self.strides != buffer.strides[1:] or not buffer.shape:
            return None
        index, rest = divmod(self.offset, max(buffer.strides[0], 1))
        return index if rest == 0 and index < buffer.shape[0] else None


@dataclass(frozen=True)
class UnrolledProgram:
    """The flat program of one rank for given sizes: its operations and its registers.

    A register holds a tensor or a handle. A buffer is identified by the register that holds all of its elements.

    Fields:
        program: the host program.
        rank: the rank.
        sizes: the values of the program's symbols.
        ops: the operations, in the order of issue.
        inputs: the registers of the inputs.
        outputs: the registers of the outputs; NONE for an output that this rank does not hold.
        buffers: for each register, the buffer of its tensor; NONE for a handle.
        layouts: for each register that holds a tensor, its layout. Inputs that this rank does not hold are left out.
        dtypes: for each buffer, its dtype.
        allocated: for each buffer that a run allocates, the operation that allocates it.
        symmetric: for each symmetric buffer of this rank or a peer, the operation that provides it.
    """

    program: Program
    rank: int
    sizes: Mapping[str, int]
    ops: tuple[Op, ...]
    inputs: range
    outputs: tuple[int, ...]
    buffers: tuple[int, ...]
    layouts: Mapping[int, RegisterView]
    dtypes: Mapping[int, DType]
    allocated: Mapping[int, AllocateOp]
    symmetric: Mapping[int, SymmetricOp]

    @cached_property
    def order(self) -> RankOrder:
        """The happens-before order of the operations on the rank's streams."""
        return RankOrder(self.ops)

    @cached_property
    def extents(self) -> Mapping[int, ElementRange]:
        """For each register with a tensor, a range of elements of its buffer.

        The range goes from the first element of the tensor to its last element.
        """
        return {register: layout.extent for register, layout in self.layouts.items()}

    @property
    def memory(self) -> tuple[int, int]:
        """Two numbers of bytes: the memory that a run allocates, and the memory of this rank's symmetric buffers.

        The second number includes the workspace of collectives.
        """
        symmetric = _bytes(op for op in self.symmetric.values() if op.rank == self.rank)
        return _bytes(self.allocated.values()), symmetric + self.workspace

    @property
    def workspace(self) -> int:
        """The number of bytes of the symmetric memory that collectives share: the workspace, and the slots."""
        shared = {WORKSPACE: 0, SLOTS: 0}
        for op in self.ops:
            if isinstance(op, CollectiveOp) and op.by:
                slots = op.by == LOW_LATENCY
                x = self.layouts[op.out if slots and op.communication == "reduce_scatter" else op.x]
                size = prod(x.shape) * self.dtypes[x.buffer].bytes * (2 * len(op.team) if slots else 1)
                name = SLOTS if slots else WORKSPACE
                shared[name] = max(shared[name], size)
        return sum(shared.values())

    def owner(self, register: int) -> int:
        """Return the rank whose memory holds the tensor of a register."""
        op = self.symmetric.get(self.buffers[register])
        return self.rank if op is None else op.rank

    def tensors(self, op: Op) -> tuple[int, ...]:
        """Return the registers of the tensors that an operation reads or writes. Flags are left out."""
        flags = {register for register, *_ in (*op.raised_flags, *op.awaited_flags)}
        return tuple([register for register in (*op.reads, *op.writes) if register not in flags])

    def flag_name(self, flags: int, slot: int) -> str:
        """Return the name of a flag for messages, such as %flags[2]. `flags` is the register of the flags."""
        layout = self.layouts[flags]
        return f"%{self.symmetric[layout.buffer].name}[{layout.offset + slot * layout.strides[0]}]"

    def touches_peer(self, op: Op) -> bool:
        """Return True if an operation accesses the memory or the flags of a peer directly, without a process group."""
        return id(op) in self._touching

    @cached_property
    def _touching(self) -> frozenset[int]:
        return frozenset([id(self.ops[at]) for at in self.touching])

    @cached_property
    def touching(self) -> Sequence[int]:
        """The positions of the operations that access the memory or the flags of a peer directly."""
        remote = self.remote
        return [
            at
            for at, (op, (reads, writes)) in enumerate(zip(self.ops, self.accesses, strict=True))
            if op.of_team or not remote.isdisjoint((*reads, *writes))
        ]

    @cached_property
    def accesses(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """For each operation, the registers that it reads and those that it writes, with those of flags."""
        return [(op.reads, op.writes) for op in self.ops]

    @cached_property
    def remote(self) -> frozenset[int]:
        """The registers of tensors and flags in the memory of peers."""
        peers = {register for register, op in self.symmetric.items() if op.rank != self.rank}
        return frozenset([x for x, buffer in enumerate(self.buffers) if buffer in peers])

    def indices(self, op: ComputeOp) -> list[tuple[IndexOperand, int, int]]:
        """Return the operands of an operation that hold indices, each with its register and its limit."""
        statement = op.place.statement
        assert isinstance(statement, TensorOp)
        registers = dict(zip(statement.operands, (x for x in op.operands if x != NONE), strict=False))
        return [(each, registers[each.indices], each.limit.bind(self.sizes)) for each in statement.index_operands]

    def text(self, op: Op) -> str:
        """Return the text of an operation's statement, in one line."""
        return format_statement(op.place.statement, self.program).strip()

    def describe(self, op: Op) -> str:
        """Return a description of an operation for a message: the text of its statement, and its round in each loop."""
        rounds = ", ".join(map(str, op.place.rounds))
        return f"'{self.text(op)}'" + (f" in round {rounds}" if rounds else "")

    def failure(self, op: Op, problem: BaseException) -> HostIRError:
        """Return the error for an operation that raised `problem`.

        The error names the rank, statement, source line and cause.
        """
        diagnosed = isinstance(problem, HostIRError)
        cause = str(problem).removeprefix("error: ") if diagnosed else f"{type(problem).__name__}: {problem}"
        return op.place.statement.fail(f"rank {self.rank}, {self.describe(op)}: {cause}")


def _bytes(buffers: Iterable[AllocateOp | SymmetricOp]) -> int:
    return sum(prod(op.shape) * op.dtype.bytes for op in buffers)
