"""Collectives by symmetric memory instead of NCCL: the implementations that a collective names with `by`.

`low_latency` launches a kernel of hostir: see `hostir.kernels.low_latency`. The others use operators of torch. All of
these that belong to a program and kind of sizes share one workspace in symmetric memory, and the signal pads that torch
keeps with it. An operand is computed in the workspace if nothing else needs the workspace meanwhile. The caller may
compute an input there, too: see `hostir.machines.binding.places`. Other operands are copied there. Those by
`low_latency` share slots instead. So all collectives that name an implementation run one after another. The kernel of a
sum by `low_latency` may also carry out what follows the sum: see `NormedSum`.

If the next operation awaits each of these collectives, they run on the caller's stream. Otherwise they run on a
separate stream, like the collectives of NCCL. Collectives of NCCL among the same ranks then follow that stream, too,
because the collectives of a team must start in the order in which they are issued.

`one_shot` and `two_shot` run torch's own kernels, also after `hostir.torch.install` has taken over their operators.
`copy_engine` makes the barriers and copies of torch's `_low_contention_all_gather`. That operator returns a new tensor,
which would have to be copied to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from hostir.ir.comm_ops import COPY_ENGINE, LOW_LATENCY, ONE_SHOT, TWO_SHOT, UNIT
from hostir.ir.source import error
from hostir.job.offers import SLOTS
from hostir.job.symmetric import SharedMemory
from hostir.kernels.dtypes import torch_dtype
from hostir.machines.binding import Step, copy_here, workspace
from hostir.machines.cuda import torchs
from hostir.machines.cuda.context import PlanContext
from hostir.machines.cuda.streams import current, own_stream
from hostir.machines.normed import NormedSum
from hostir.plan.lifetimes import awaited_at_once, workspace_buffers
from hostir.plan.operations import NONE, CollectiveOp, MessagesOp

if TYPE_CHECKING:
    from hostir.kernels.low_latency import Epilogue, LowLatency

Run = Callable[[torch.Tensor, torch.Tensor], object]  # issues a collective from `x` to `out` to the current stream
PAIRED = (2, 4, 8)  # the numbers of ranks for which torch has a two-shot kernel with a separate result
HIGH = -1  # the priority of the separate stream: its kernels get SMs before other kernels, like NCCL's


class SymmetricCollectives:
    """Makes the steps of a plan's collectives that name an implementation.

    Args:
        context: the plan.
        memory: the symmetric memory of the plan, with the workspace or the slots.
        all_ranks: returns the registered process group of all ranks.
        patience: the seconds for which hostir's kernel waits for other ranks.

    Fields:
        inline: True if the collectives run on the caller's stream.
        buffers: the buffers of the program that lie in the workspace.
        normed: the sum to which an operation belongs that one kernel carries out with others, by the operation's id.
        needless: the buffers that need no memory, because the kernels of `normed` store nothing there.
    """

    def __init__(
        self, context: PlanContext, memory: SharedMemory, all_ranks: Callable[[], Any], patience: float
    ) -> None:
        self.context = context
        self.memory = memory
        self.all_ranks = all_ranks
        self.patience = patience
        ops = [op for op in context.unrolled.ops if isinstance(op, CollectiveOp) and op.by]
        self.inline = awaited_at_once(context.unrolled).issuperset(op.handle for op in ops)
        self.buffers = workspace_buffers(context.unrolled)
        sums = [normed for normed in NormedSum.of(context.unrolled) if self.in_one_kernel(normed)]
        self.normed = {id(op): normed for normed in sums for op in (normed.collective, *normed.computations)}
        self.needless = frozenset(buffer for normed in sums for buffer in normed.needless)

    def collective(self, op: CollectiveOp) -> Step:
        """Return the step that starts a collective.

        If it does not run on the caller's stream, the step puts an event into the register of the handle.
        """
        registers, streams, run = self.context.registers, self.context.streams, self.run(op)
        x, out, handle = op.x, op.out, op.handle
        if self.inline:
            return lambda: run(registers[x], registers[out])
        apart, begun, ended = self.stream("apart"), torch.cuda.Event(), torch.cuda.Event()

        def step() -> None:
            begun.record(streams[op.stream])
            begun.wait(apart)
            with on(apart, streams[op.stream]):
                run(registers[x], registers[out])
            ended.record(apart)
            registers[handle] = ended

        return step

    def in_order(self, op: CollectiveOp | MessagesOp, start: Step) -> Step:
        """Return the step that starts a communication of NCCL in the order of the collectives of all ranks.

        `start` starts the communication on the current stream, and puts torch's `Work` object into the register of the
        handle.
        """
        if self.inline or len(op.team) < self.context.unrolled.program.ranks:
            return start
        registers, streams, handle = self.context.registers, self.context.streams, op.handle
        apart, begun = self.stream("apart"), torch.cuda.Event()

        def step() -> None:
            begun.record(streams[op.stream])
            begun.wait(apart)
            with on(apart, streams[op.stream]):
                start()
                registers[handle].wait()  # makes only the stream wait

        return step

    def stream(self, name: str) -> torch.cuda.Stream:
        """Return a stream for these collectives. All plans with this memory share it."""
        if name not in self.memory.kept:
            self.memory.kept[name] = own_stream(self.memory, self.context.device, HIGH)
        stream: torch.cuda.Stream = self.memory.kept[name]
        return stream

    def run(self, op: CollectiveOp) -> Run:
        """Return the function that issues a collective."""
        if op.by == LOW_LATENCY:
            return self.low_latency(op)
        make: dict[tuple[str, str], Callable[[CollectiveOp, torch.Tensor], Run]] = {
            ("allreduce", ONE_SHOT): self.one_shot,
            ("allreduce", TWO_SHOT): self.two_shot,
            ("reduce_scatter", ONE_SHOT): self.scattered,
            ("allgather", COPY_ENGINE): self.copied,
        }
        return make[op.communication, op.by](op, self.space(op.x))

    def space(self, register: int) -> torch.Tensor:
        """Return the beginning of the workspace, with the shape and the dtype of the tensor in a register."""
        return workspace(self.context.unrolled, self.memory, register)

    def low_latency(self, op: CollectiveOp) -> Run:
        """Return a function that launches hostir's kernel for a collective."""
        kernel, registers = self.low_latency_kernel(op), self.context.registers
        self.context.launching(op, lambda: kernel(registers[op.x], registers[op.out]))
        return kernel

    def low_latency_kernel(self, op: CollectiveOp, epilogue: Epilogue | None = None) -> LowLatency:
        """Return hostir's kernel for a collective, and for the epilogue that follows a sum."""
        from hostir.kernels.low_latency import LowLatency  # which needs Triton

        unrolled, flat = self.context.unrolled, self.memory.flat
        dtype = torch_dtype(unrolled.dtypes[unrolled.layouts[op.x].buffer])
        slots = [flat[SLOTS, rank].view(dtype) for rank in op.team]
        calls, timeouts = self.memory.kept["calls"], self.context.timeouts.of_data(unrolled, op)
        return LowLatency(
            self.context.device, unrolled.rank, slots, calls, timeouts, op.communication, epilogue, self.patience
        )

    def in_one_kernel(self, normed: NormedSum) -> bool:
        """Return True if one kernel carries out a sum and what follows it: Triton would compute that in any case."""
        return all(self.context.in_triton(op) for op in normed.computations if op is not normed.add)

    def normed_sum(self, normed: NormedSum) -> Step:
        """Return the step that launches one kernel for a sum and for what follows it."""
        from hostir.kernels.low_latency import Epilogue, RowTensors  # which needs Triton

        registers, quantize, x = self.context.registers, normed.quantize, normed.collective.x
        fp8 = "" if quantize is None else quantize.options["dtype"]
        kernel = self.low_latency_kernel(normed.collective, Epilogue(normed.norm.options["eps"], fp8))
        out, *results = normed.stored
        rows = normed.residual, normed.weight, *results, *[NONE] * (4 - len(results))
        return self.context.launching(
            normed.collective,
            lambda: kernel(registers[x], registers[out], RowTensors(*[registers[register] for register in rows])),
        )

    def is_there(self, op: CollectiveOp) -> bool:
        """Return True if the operand of a collective already lies in the workspace."""
        return self.context.unrolled.buffers[op.x] in self.buffers

    def fill(self, op: CollectiveOp, space: torch.Tensor) -> Callable[[torch.Tensor], object]:
        """Return a function that copies the operand of a collective to the workspace, unless it lies there."""
        return (lambda x: None) if self.is_there(op) else lambda x: copy_here(space, x, copy)

    def one_shot(self, op: CollectiveOp, space: torch.Tensor) -> Run:
        """Return a function that issues a one-shot all-reduce.

        Unless the operand lies in the workspace, the kernel itself copies it there. All ranks call the same operator,
        because only the kernel that copies orders its reads after the copies of peers.
        """
        group = self.group
        if self.is_there(op):
            one_shot = self.operator(op, "one_shot_all_reduce_out")
            return lambda x, out: into(out, lambda out: one_shot(space, "sum", group, out))
        copy_first = self.operator(op, "one_shot_all_reduce_copy_out")

        def run(x: torch.Tensor, out: torch.Tensor) -> None:
            aligned = x if is_aligned(x) else torch.empty_like(x)
            if aligned is not x:
                copy(aligned, x)
            into(out, lambda out: copy_first(space, aligned, "sum", group, out))

        return run

    def two_shot(self, op: CollectiveOp, space: torch.Tensor) -> Run:
        group, fill = self.group, self.fill(op, space)
        if len(op.team) in PAIRED:
            two_shot = self.operator(op, "two_shot_all_reduce_out")

            def run(x: torch.Tensor, out: torch.Tensor) -> None:
                fill(x)
                into(out, lambda out: two_shot(space, "sum", group, out))

            return run
        in_place = self.operator(op, "two_shot_all_reduce_")

        def run_in_place(x: torch.Tensor, out: torch.Tensor) -> None:
            fill(x)
            in_place(space, "sum", group)
            copy(out, space)

        return run_in_place

    def scattered(self, op: CollectiveOp, space: torch.Tensor) -> Run:
        reduce_scatter, group, flat = self.operator(op, "reduce_scatter_out"), self.group, space.view(-1)
        fill = self.fill(op, space)

        def run(x: torch.Tensor, out: torch.Tensor) -> None:
            fill(x)
            into(out.view(-1), lambda out: reduce_scatter(flat, group, False, out))

        return run

    def copied(self, op: CollectiveOp, space: torch.Tensor) -> Run:
        """Return a function that copies the parts of peers between two barriers, and this rank's part meanwhile.

        The ranks copy in different orders, so that no two of them read from one rank at a time. The links bound the
        copies from peers, so the copy of this rank's part gets the memory's bandwidth beside them. Beside the copy into
        the workspace it would not.
        """
        handle, rank, ranks, fill = self.handle, self.context.unrolled.rank, len(op.team), self.fill(op, space)
        order = [(rank - step) % ranks for step in range(1, ranks)]
        peers = [(peer, handle.get_buffer(peer, space.shape, space.dtype).view(-1)) for peer in order]
        device, local, begun, copied = (
            self.context.device,
            self.stream("local"),
            torch.cuda.Event(),
            torch.cuda.Event(),
        )

        def run(x: torch.Tensor, out: torch.Tensor) -> None:
            blocks, part, stream = out.view(ranks, -1), x.view(-1), current(device)
            fill(x)
            begun.record(stream)
            begun.wait(local)
            with on(local, stream):
                copy(blocks[rank], part)
            copied.record(local)
            handle.barrier()  # all parts are in the workspaces
            for peer, theirs in peers:
                copy(blocks[peer], theirs)
            handle.barrier()  # all ranks have read this rank's part
            copied.wait(stream)

        return run

    @cached_property
    def group(self) -> str:
        """The name by which torch's operators find the symmetric memory of all ranks."""
        return str(self.all_ranks().group_name)

    @cached_property
    def handle(self) -> Any:
        """torch's handle of the symmetric memory."""
        return self.memory.kept["handle"]

    def operator(self, op: CollectiveOp, name: str) -> Callable[..., object]:
        """Return torch's kernel of an operator of `torch.ops.symm_mem`, as a function.

        Raise HostIRError if this torch has no such operator.
        """
        if not hasattr(torch.ops.symm_mem, name):
            s = op.place.statement
            raise error(
                f"torch {torch.__version__} has no operator symm_mem.{name}, which '{s.keyword()} by {op.by}' needs",
                s.span,
                hint="leave out 'by': NCCL runs the collective",
            )
        return torchs.own(name)


@contextmanager
def on(stream: torch.cuda.Stream, before: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream the current one; afterwards, make the stream `before` the current one again."""
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def copy(out: torch.Tensor, x: torch.Tensor) -> None:
    """Issue a copy to the current stream."""
    out.copy_(x)


def into(out: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
    """Call `write` with `out`. If the kernels cannot write there, call it with new memory, and copy that to `out`."""
    if is_aligned(out):
        write(out)
        return
    aligned = torch.empty_like(out)
    write(aligned)
    copy(out, aligned)


def is_aligned(x: torch.Tensor) -> bool:
    """Return True if torch's kernels can access a tensor in units of UNIT bytes."""
    return x.data_ptr() % UNIT == 0 and int(x.storage_offset()) * x.element_size() % UNIT == 0
