"""The machine that plans one simulated rank: statements become tasks, with the edges of the memory model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hostir.ir.machine import Done, Exchange, Observer, OptionalMethods, Ready, interpret
from hostir.ir.message_ops import MESSAGES
from hostir.ir.op import Statement
from hostir.ir.program import Program
from hostir.ir.types import DType
from hostir.kernels.dtypes import in_floats
from hostir.kernels.repeats import Kernel
from hostir.kernels.table import kernels_for
from hostir.machines.simulated.blocks import BlockKernel
from hostir.machines.simulated.collectives import CollectiveSide
from hostir.machines.simulated.issuing import IssueQueue, Issuer, TeamRanks, do_nothing
from hostir.machines.simulated.memory import SimulatedMemory, make_undefined
from hostir.machines.simulated.messages import MessageSide
from hostir.machines.simulated.onesided import BarrierSide, SymmetricBuffers
from hostir.machines.simulated.rank_memory import RankMemory
from hostir.machines.simulated.tasks import Task, Views

Parts = Sequence[torch.Tensor | None]  # the shards of one tensor, by rank


class Float64Side(CollectiveSide):
    """A side of a collective among ranks that compute in float64. Its sums are in float64, too."""

    def add(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts)).sum(0)


class RankMachine(Observer, OptionalMethods):
    """One rank of a `LocalMachine`. Planning makes views and allocates memory. Everything else becomes tasks.

    Streams, the order of a team's communications, flags and symmetric buffers persist across calls. `dtype` is the
    dtype of all computations; None stands for the dtypes that the program declares.

    Fields:
        parts, messages, barriers: the rank's sides of collectives, messages and barriers, by team, in issue order.
        inputs: the rank's memory for the inputs, which is the same in every call.
        outputs: the outputs of each call.
    """

    def __init__(
        self,
        rank: int,
        program: Program,
        kernels: Mapping[str, Kernel],
        memory: SimulatedMemory,
        symmetric: SymmetricBuffers,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.rank = rank
        self.dtype = dtype
        self.program = program
        self.kernels = kernels
        self.issuer = Issuer(rank, program)
        self.memory = RankMemory(self.issuer, memory, symmetric, dtype)
        self.symmetric = symmetric
        self.sms = self.issuer.sms
        self.tasks = self.issuer.tasks
        self.where = self.issuer.where
        self.parts: dict[TeamRanks, list[CollectiveSide]] = {}
        self.messages: dict[TeamRanks, list[MessageSide]] = {}
        self.barriers: dict[TeamRanks, list[BarrierSide]] = {}
        self.inputs: Parts = ()
        self.outputs: list[Parts] = []

    def at(self, statement: Statement, rounds: tuple[int, ...]) -> None:
        self.issuer.at(statement, rounds)

    def plan(self, sizes: Mapping[str, int], inputs: Parts) -> None:
        """Turn one call into tasks.

        The first task writes the inputs, and the last task reads the outputs. Both are on the caller's stream.
        """
        issuer = self.issuer
        if not self.inputs:  # the caller uses the same memory in every call
            named = zip(self.program.inputs, inputs, strict=True)
            self.inputs = [
                None if x is None else self.memory.new(v.name, x.shape, in_floats(x.dtype, self.dtype))
                for v, x in named
            ]
        self.outputs.append(())
        issuer.calls += 1
        issuer.at_caller()
        pairs = [(b, x) for b, x in zip(self.inputs, inputs, strict=True) if b is not None and x is not None]
        entry = issuer.issue(lambda: [buffer.copy_(x) for buffer, x in pairs], writes=tuple(b for b, _ in pairs))
        entry.stream = "before the call"
        outputs = interpret(self.program, self, sizes, self.inputs, observer=self)
        issuer.at_caller()
        read = tuple(x for x in outputs if x is not None)
        written = (*read, *(x for x in self.inputs if x is not None))
        leave = issuer.issue(partial(self.finish, issuer.call, outputs, written), reads=read, undefines=written)
        leave.stream = "after the call"

    def finish(self, call: int, outputs: Parts, written: Views) -> None:
        """End a call: store its outputs, and make the caller's memory undefined.

        The caller may overwrite its memory from now on.
        """
        self.outputs[call] = [None if x is None else x.clone() for x in outputs]
        for x in written:
            make_undefined(x)

    def allocate(self, shape: tuple[int, ...], dtype: DType, symmetric: bool = False) -> torch.Tensor:
        return self.memory.allocate(shape, dtype, symmetric)

    def free(self, x: torch.Tensor) -> None:
        self.memory.free(x)

    def select(self, x: torch.Tensor, axis: int, index: int) -> torch.Tensor:
        return x.select(axis, index)

    def chunk(self, x: torch.Tensor, axis: int, outer: int, count: int, index: int) -> torch.Tensor:
        if outer != 1:
            message = "a rank's part is cut from its outermost block on"
            raise self.issuer.fail(message, expected="1 block outside the pieces")
        extent = x.shape[axis] // count
        return x.narrow(axis, index * extent, extent)

    def reshape(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            return x.view(shape)
        except RuntimeError:
            message = f"no view of {_layout(x)} has shape {list(shape)}"
            raise self.issuer.fail(message, hint="copy it first") from None

    def permute(self, x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        return x.permute(axes)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` or a contiguous copy of it.

        If `x` is not contiguous, it is always copied. If `x` is contiguous, it is copied in every second call, so that
        both cases are tested: in one call on the odd ranks, in the next call on the even ranks. On real ranks, a tensor
        is copied only if it is not contiguous.
        """
        if x.is_contiguous() and (self.rank + self.issuer.call) % 2 == 0:
            return x
        copy = self.memory.new(self.issuer.defined_name, x.shape, x.dtype)
        self.issuer.issue(partial(copy.copy_, x), (x,), (copy,)).gate = self.sms
        return copy

    def compute(
        self,
        computation: str,
        out: torch.Tensor,
        operands: Sequence[torch.Tensor | None],
        options: Mapping[str, Any],
        ready: Ready | None = None,
        done: Done | None = None,
    ) -> None:
        kernel, reads = kernels_for(self.kernels, out.dtype)[computation], tuple(x for x in operands if x is not None)
        self.memory.refuse_overlap(out, reads)
        if ready is not None or done is not None:
            BlockKernel(self.issuer, self.memory, kernel, computation, out, operands, options, ready, done).issue()
            return
        task = self.issuer.issue(partial(kernel, out, *operands, **options), reads, (out,), timed=True)
        task.gate = self.sms

    def communicate(self, exchange: Exchange, x: torch.Tensor | None, out: torch.Tensor | None) -> list[Task]:
        for verb, tensor in (("reads", x), ("writes", out)):
            if tensor is not None and not tensor.is_contiguous():
                message = f"it {verb} {_layout(tensor)}"
                raise self.issuer.fail(message, expected="a dense tensor", hint="copy it first")
        lane, tail = f"communication {len(self.tasks)}", self.issuer.current.tail
        task = partial(self.issuer.task, lane=lane, timed=True, team=exchange.team)
        start = self.issuer.task(do_nothing, lane=lane).follow(tail)
        start.gate, start.may_block = self.sms, True
        if x is not None and out is not None and exchange.takes(self.rank) and exchange.gives(self.rank):
            self.memory.refuse_overlap(out, (x,))
        if exchange.communication in MESSAGES:
            messages = self.messages.setdefault(exchange.team, [])
            messages.append(MessageSide(exchange, x, out, start, task, messages[-1] if messages else None))
            return messages[-1].ends
        parts = self.parts.setdefault(tuple(sorted(exchange.team)), [])
        side = CollectiveSide if self.dtype is None else Float64Side
        parts.append(side(exchange, x, out, tail, start, task, parts[-1] if parts else None))
        return [parts[-1].give]

    def wait(self, handle: list[Task]) -> None:
        self.issuer.current.wait(handle)

    def copy(self, x: torch.Tensor, out: torch.Tensor, source: int, target: int, sms: int = 0) -> None:
        if source != self.rank:
            x = self.memory.at(x, source)
        if target != self.rank:
            out = self.memory.at(out, target)
        if sms:
            task = self.issuer.push(partial(out.copy_, x), (x,), (out,))
        else:
            task = self.issuer.issue(partial(out.copy_, x), (x,), (out,), timed=True)
            task.gate = self.sms if source == target else None  # a kernel copies within a rank
        for view, rank in ((x, source), (out, target)):
            if rank != self.rank:
                self.symmetric.touch(view, rank, task)

    def signal(self, flags: torch.Tensor, slot: int, epoch: int, peer: int, sms: int = 0) -> None:
        view, stream = self.memory.at(flags, peer), self.issuer.current
        after_copy = not sms and stream.pushing and not stream.signalled
        flag = self.symmetric.flag(view, slot)
        task = self.issuer.push(None) if after_copy else self.issuer.issue(None)
        task.gate, task.one_sm = (self.sms, True) if sms else (None, False)
        task.run, task.changes, task.epoch = partial(flag.set, task), flag, self.issuer.epoch(epoch)
        self.symmetric.touch(view, peer, task)

    def wait_signal(self, flags: torch.Tensor, slot: int, epoch: int) -> None:
        task = self.issuer.issue(do_nothing)
        task.gate, task.epoch = self.memory.flag(flags, slot), self.issuer.epoch(epoch)

    def barrier(self, team: TeamRanks) -> None:
        arrived = self.issuer.issue(None)
        self.barriers.setdefault(team, []).append((arrived, self.issuer.issue(None)))

    def current_stream(self) -> IssueQueue:
        return self.issuer.current

    def set_stream(self, stream: IssueQueue | int) -> None:
        self.issuer.current = self.issuer.stream(stream)

    def synchronize(self, stream: IssueQueue | int) -> None:
        self.issuer.current.wait(self.issuer.stream(stream).tail)


def _layout(x: torch.Tensor) -> str:
    return f"shape {list(x.shape)} with strides {list(x.stride())}"
