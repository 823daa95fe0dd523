"""One-sided statements on CUDA: copy engines move rows, streams set flags and wait for flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from hostir.ir.machine import Ready
from hostir.ir.source import Diagnostic, HostIRError
from hostir.knobs import TIMEOUT
from hostir.runtime.cuda.memory import PERMITS, Handover, Slot, waits
from hostir.runtime.cuda.streams import Copier, in_batches, own_stream, wait_at_least, write
from hostir.runtime.kernels.flags import with_all_rows
from hostir.runtime.kernels.table import Again, Kernel, repeating
from hostir.runtime.lifetimes import unjoined
from hostir.runtime.symmetric import BARRIERS, Place, SharedMemory
from hostir.runtime.unroll import (
    CALLER,
    FLAGS,
    NONE,
    BarrierOp,
    ComputeOp,
    CopyOp,
    DelayOp,
    Op,
    Pushes,
    SignalOp,
    Step,
    SymmetricOp,
    SynchronizeOp,
    UnrolledProgram,
    ViewOp,
    WaitOp,
    WaitSignalOp,
    bind,
)

# The beginning of a call ----------------------------------------------------------------------------------------------
# Where on CUDA a call begins for its streams: none shall look at a flag, or raise one, before the last call's end.

Touches = Callable[[Op], bool]  # whether an operation touches a peer's memory


def beginning(unrolled: UnrolledProgram, peers: Touches) -> tuple[bool, bool]:
    """Whether a stream uses flags without having waited for the caller's; and whether permits must be taken at once.

    Permits are taken by the first stream that touches a peer, and others that do so wait for it. That is wrong where
    it may be held up by then, by a flag or for want of an SM, and the program says nothing of this to the others.
    """
    forked, held, behind = {CALLER}, set[int](), set[int]()  # behind: what comes after the first touch of a peer
    loose = late = others = False
    sms = any(isinstance(op, ComputeOp) and op.ready is not None for op in unrolled.ops)
    for op in unrolled.ops:
        if isinstance(op, SynchronizeOp):
            forked |= {op.stream} if op.other in forked else set()
            held |= {op.stream} if op.other in held else set()
            behind |= {op.stream} if op.other in behind else set()
        loose |= uses_flags(op, peers) and op.stream not in forked
        if peers(op):
            late |= not behind and op.stream in held
            others |= bool(behind) and op.stream not in behind
            behind.add(op.stream)
        elif _holds(op, sms):
            held.add(op.stream)
    return loose, late and others


def uses_flags(op: Op, peers: Touches) -> bool:
    """Whether an operation raises or awaits flags, of this rank or a peer, or needs permits."""
    return isinstance(op, SignalOp | WaitSignalOp) or (isinstance(op, ComputeOp) and op.ready is not None) or peers(op)


def _holds(op: Op, sms: bool) -> bool:
    """Whether an operation may hold its stream up: `sms` where a kernel that waits may have taken them all."""
    if isinstance(op, ComputeOp):
        return op.ready is not None or sms
    if isinstance(op, SignalOp):
        return sms and op.sms > 0
    return isinstance(op, WaitOp | WaitSignalOp | BarrierOp) or (sms and isinstance(op, CopyOp | DelayOp))


# Statements -----------------------------------------------------------------------------------------------------------
# One-sided statements on CUDA: copy engines move rows, streams set flags and wait for flags, a kernel looks at them.
#
# The host only issues. A flag holds an epoch; see handover.py for how it gets back to 0. Everything is captured into a
# CUDA graph as it stands, and is right in every replay.

FLAG_BYTES = 8
SECONDS_OF_A_LOOK = 1e-6  # of a kernel at a flag
Issue = Callable[[int], None]  # something that a stream shall do, given its handle


class CudaOneSided:
    """The one-sided operations of a plan.

    Args:
        unrolled: of the plan.
        memory: of all ranks.
        device: this rank's.
        registers, streams: the plan's own lists, whose elements change with every call.
        kernels: what computes.
        kernel: what carries out one computation, on its stream.
    """

    def __init__(
        self,
        unrolled: UnrolledProgram,
        memory: SharedMemory,
        device: torch.device,
        registers: list[Any],
        streams: Sequence[torch.cuda.Stream],
        kernels: Mapping[str, Kernel],
        kernel: Callable[[ComputeOp], Kernel],
    ) -> None:
        self.unrolled = unrolled
        self.memory = memory
        self.device = device
        self.registers = registers
        self.streams = streams
        self.kernels, self.kernel = kernels, kernel
        self.rank = unrolled.rank
        self.handover = Handover.of(unrolled, memory.offers)
        self.owner_of = {op.out: op.rank for op in unrolled.ops if isinstance(op, SymmetricOp)}  # by buffer
        self.opened: torch.cuda.Event | None = None  # behind the permits, once a stream has waited for them
        self.behind: set[int] = set()  # the streams that come after them
        self.forked = {CALLER}
        self.stalls: list[tuple[ComputeOp, torch.Tensor, memoryview]] = []  # their bytes are looked at in every call
        self.start = torch.cuda.Event()  # the beginning of the call
        self.loose, self.early = beginning(unrolled, self.peers)
        self.sent: set[tuple[int, Place, int, int]] = set()
        self.pushes = {id(op): pushes for pushes in Pushes.of(unrolled) for op in pushes.ops}
        self.offsets = {op.out: op.offset for op in unrolled.ops if isinstance(op, ViewOp)}

    @cached_property
    def aside(self) -> torch.cuda.Stream:
        """A stream to look at flags on, whatever the others are stuck in."""
        return own_stream(self, self.device, priority=0)

    # Operations ---------------------------------------------------------------------------------------------------
    def is_direct(self, op: Op) -> bool:
        """Whether an operation needs no current stream, as it is given its own."""
        if id(op) in self.pushes:
            return False
        return isinstance(op, SignalOp | WaitSignalOp | BarrierOp) or (isinstance(op, CopyOp) and not self.is_local(op))

    def is_local(self, op: CopyOp) -> bool:
        """Whether a copy stays on this GPU, where it is a kernel's work."""
        return all(self.owner(register) == self.rank for register in (op.x, op.out))

    def owner(self, register: int) -> int:
        """Whose memory a register's is."""
        return self.owner_of.get(self.unrolled.buffers[register], self.rank)

    def peers(self, op: Op) -> bool:
        """Whether an operation touches a peer's memory."""
        if isinstance(op, CopyOp):
            return not self.is_local(op)
        return isinstance(op, BarrierOp) or (isinstance(op, SignalOp) and op.peer != self.rank)

    def opening(self) -> list[Step]:
        """The beginning of a call, on the caller's stream."""
        marks: list[Step] = [partial(_record, self.streams, CALLER, self.start)] if self.loose else []
        if not self.early:
            return marks
        self.opened = torch.cuda.Event()
        self.behind.add(CALLER)
        return [*marks, self.on(CALLER, self.permits()), partial(_record, self.streams, CALLER, self.opened)]

    def before(self, op: Op) -> list[Step]:
        """What must come before an operation that uses flags: the beginning of the call; for a peer's, the permits.

        Permits are taken once in a call, by the first stream that touches a peer; others that do so wait for it.
        """
        if isinstance(op, SynchronizeOp) and op.other in self.forked:
            self.forked.add(op.stream)
        streams, fork = self.streams, list[Step]()
        if uses_flags(op, self.peers) and op.stream not in self.forked:  # else it may be ahead of the call before
            self.forked.add(op.stream)
            fork = [partial(_after, streams, op.stream, self.start)]
        if not self.peers(op) or op.stream in self.behind:
            return fork
        self.behind.add(op.stream)
        if self.opened is not None:
            return [*fork, partial(_after, streams, op.stream, self.opened)]
        self.opened = torch.cuda.Event()
        others = {o.stream for o in self.unrolled.ops if self.peers(o)} - {op.stream}
        mark = [partial(_record, streams, op.stream, self.opened)] if others else []
        return [*fork, self.on(op.stream, self.permits()), *mark]

    def bind(self, op: Op) -> Step | None:
        """What carries out an operation; None where nothing is left to do."""
        if isinstance(op, CopyOp):
            return self.copy(op)
        if isinstance(op, SignalOp | WaitSignalOp) and self.is_settled(op):
            return None
        if isinstance(op, SignalOp):
            if self.is_sent(op):
                return None
            if op.sms:
                return self.raising(op)
            return self.on(op.stream, in_batches([write(self.flag(self.place(op.flags), op.slot, op.peer), op.epoch)]))
        if isinstance(op, WaitSignalOp):
            return self.on(op.stream, self.wait(op.flags, op.slot, op.epoch))
        assert isinstance(op, BarrierOp)
        return None if op.number == 0 and op.team in self.handover.opening else self.barrier(op)

    def is_settled(self, op: SignalOp | WaitSignalOp) -> bool:
        """Whether a flag says no more than the order of the stream."""
        mine = isinstance(op, WaitSignalOp) or op.peer == self.rank
        return mine and (self.place(op.flags), op.slot) in self.handover.settled

    def is_sent(self, op: SignalOp) -> bool:
        """Whether this call has sent the same before: sent again, it might come after the flag is back at 0."""
        signal = op.peer, self.place(op.flags), op.slot, op.epoch
        again = signal in self.sent
        self.sent.add(signal)
        return again

    def on(self, stream: int, issue: Issue) -> Step:
        streams = self.streams
        return lambda: issue(streams[stream].cuda_stream)

    def copy(self, op: CopyOp) -> Step:
        registers, streams, x, out, stream = self.registers, self.streams, op.x, op.out, op.stream
        if not self.is_local(op):
            copy = Copier()
            return lambda: copy(registers[out], registers[x], streams[stream].cuda_stream)
        kernel = self.kernels["copy"]

        def local() -> None:
            if registers[out].data_ptr() != registers[x].data_ptr():  # else the caller made it in its place
                kernel(registers[out], registers[x])

        return local

    def push(self, pushes: Pushes) -> Step:
        """One kernel for all of these copies and signals."""
        registers, (first, _) = self.registers, pushes.copies[0]
        source = self.unrolled.buffers[first.x]
        to = registers[first.out]
        pieces = []
        for copy, signal in pushes.copies:
            flag, epoch = (0, 0) if signal is None or self.is_sent(signal) else (self.raised(signal), signal.epoch)
            offset = self.offsets.get(copy.x, 0) * to.element_size()
            pieces.append((offset, registers[copy.out].data_ptr(), flag, epoch))
        # Its flags rise in any order, hence each once: an earlier epoch might come when the flag is back at 0.
        last = {flag: number for number, (*_, flag, _) in enumerate(pieces)}
        pieces = [
            (offset, target, flag if last[flag] == number else 0, epoch)
            for number, (offset, target, flag, epoch) in enumerate(pieces)
        ]
        kernel = self.pusher(pieces, to.numel() * to.element_size(), pushes.sms)
        return lambda: kernel(registers[source])

    def pusher(self, pieces: Sequence[tuple[int, ...]], size: int, sms: int) -> Callable[[torch.Tensor], None]:
        from hostir.runtime.kernels.flags import Piece, PushKernel  # which needs Triton

        return PushKernel(self.device, [Piece(*each) for each in pieces], size, sms)

    def raising(self, op: SignalOp) -> Step:
        kernel, streams, stream = self.raiser(self.raised(op), op.epoch), self.streams, op.stream
        return lambda: kernel(streams[stream])

    def raiser(self, flag: int, epoch: int) -> Callable[[torch.cuda.Stream], None]:
        from hostir.runtime.kernels.flags import Raising  # which needs Triton

        return Raising(self.device, flag, epoch)

    def raised(self, op: SignalOp) -> int:
        """The address of the flag that a signal raises; 0 for one that is up."""
        return 0 if self.is_settled(op) else self.flag(self.place(op.flags), op.slot, op.peer)

    def wait(self, flags: int, slot: int, epoch: int) -> Issue:
        return in_batches([wait_at_least(self.flag(self.place(flags), slot, self.rank), epoch)])

    def barrier(self, op: BarrierOp) -> Step:
        """Tells the others that this rank has come, and waits for them."""
        size, place = len(op.team), (BARRIERS, op.team)
        mine, first = op.team.index(self.rank), op.number * size
        others = [rank for rank in op.team if rank != self.rank]
        tell = [write(self.flag(place, first + mine, rank), 1) for rank in others]
        slots = [first + op.team.index(rank) for rank in others]
        return self.on(
            op.stream, in_batches([*tell, *(wait_at_least(self.flag(place, s, self.rank), 1) for s in slots)])
        )

    # A matmul that waits ------------------------------------------------------------------------------------------
    def compute(self, op: ComputeOp, ready: Ready) -> Step:
        """One kernel that looks at the flags; where there is none that can, block after block, each behind a wait.

        Where it comes after all of this rank's copies, there is nothing to begin with before the peers' are there too.
        """
        kernel = self.kernels.get(f"{op.kind}_ready")
        if kernel is not None:
            return self.whole(op, ready, kernel)
        return self.afterwards(op, ready) if op.beside and ready.own is None else self.blocks(op, ready)

    def whole(self, op: ComputeOp, ready: Ready, kernel: Kernel) -> Step:
        from hostir.runtime.kernels.flags import ReadyFlags  # which needs Triton

        stalls = torch.zeros(ready.blocks, 2, dtype=torch.int64, device="cpu", pin_memory=True)
        self.stalls.append((op, stalls, stalls.numpy().data.cast("B")))
        registers, out, operands, options = self.registers, op.out, op.operands, dict(op.options)
        looks = int(TIMEOUT.get() / 2 / SECONDS_OF_A_LOOK)  # so that it says what is missing before somebody else does
        flags = ReadyFlags(registers[ready.flags], ready.epoch, stalls, ready.first, looks, op.beside, op.spare)
        own = NONE if ready.own is None else ready.own

        def waiting(out: torch.Tensor, own: torch.Tensor | None, *operands: torch.Tensor) -> Again | None:
            return kernel(out, *operands, ready=flags, own=own, **options)

        multiply = repeating(waiting)
        return lambda: multiply(registers[out], registers[own], *[registers[x] for x in operands])

    def afterwards(self, op: ComputeOp, ready: Ready) -> Step:
        place, stream = self.place(ready.flags), op.stream
        flags = [self.flag(place, block, self.rank) for block in range(ready.blocks)]
        wait = self.on(stream, in_batches([wait_at_least(flag, ready.epoch) for flag in flags]))
        compute = bind(replace(op, ready=None), self.registers, self.device, {op.kind: self.kernel(op)})

        def step() -> None:
            wait()
            compute()

        return step

    def blocks(self, op: ComputeOp, ready: Ready) -> Step:
        registers, operands, options = self.registers, op.operands, dict(op.options)
        awaited = {b for b in ready.awaited if (self.place(ready.flags), b) not in self.handover.settled}
        issues = [self.wait(ready.flags, b, ready.epoch) if b in awaited else in_batches([]) for b in ready.order]
        waits = [(block, self.on(op.stream, issue)) for block, issue in zip(ready.order, issues, strict=True)]
        kernel, own = self.kernel(op), NONE if ready.own is None else ready.own

        def step() -> None:
            out, a, *others = registers[op.out], *(registers[x] for x in operands)
            pairs = with_all_rows(out, a, ready.blocks, ready.first, registers[own])
            for block, wait in waits:
                wait()
                for out_part, a_part in pairs[block]:
                    kernel(out_part, a_part, *others, **options)

        return step

    def problem(self) -> HostIRError | None:
        """What kernels that gave up waiting have said; forgets it."""
        found: list[Diagnostic] = []
        for op, stalls, said in self.stalls:
            if int.from_bytes(said):
                from hostir.runtime.kernels.flags import stall_error

                assert op.ready is not None
                stalled = stall_error(stalls.clone(), self.rank, f"%{self.place(op.ready.flags)[0]}")
                stalls.zero_()
                if stalled is not None:  # else another thread has just taken it
                    found += self.unrolled.failure(op, stalled).diagnostics
        return HostIRError(*found) if found else None

    def missing(self) -> list[tuple[Op, str]]:
        """The operations whose flags have not risen, and which flag stands where. Reads flags beside all streams."""
        held: dict[Place, list[int]] = {}
        with torch.cuda.stream(self.aside):
            for (place, rank), buffer in self.memory.buffers.items():
                if rank == self.rank and buffer.dtype == FLAGS:
                    held[place] = buffer.cpu().view(-1).tolist()
        found: list[tuple[Op, str]] = []
        for op in self.unrolled.ops:
            if isinstance(op, BarrierOp) and not (op.number == 0 and op.team in self.handover.opening):
                row = held[BARRIERS, op.team][op.number * len(op.team) :]
                late = [rank for rank, came in zip(op.team, row, strict=False) if not came and rank != self.rank]
                found += [(op, f"rank {', '.join(map(str, late))} has not come")] if late else []
        for (place, slot), epoch, op in waits(self.unrolled):
            if (at := held[place][slot]) < epoch:
                found.append((op, f"flag %{place[0]}[{slot}] stands at {at}, not at {epoch}"))
        return found

    # From call to call --------------------------------------------------------------------------------------------
    def permits(self) -> Issue:
        """Waits for the permits of all peers whose flags this rank raises, and takes them away."""
        count = self.flag(PERMITS, 0, self.rank)
        needed = len(self.handover.owners)
        return in_batches([wait_at_least(count, needed), write(count, 0)] if needed else [])

    def closing(self) -> list[Step]:
        """The end of a call, on the caller's stream: flags back to 0, permits to the peers that raise them."""
        joins: list[Step] = [
            partial(_join, self.streams, CALLER, stream, torch.cuda.Event()) for stream in unjoined(self.unrolled)
        ]
        late = [wait_at_least(self.slot(slot), epoch) for slot, epoch in self.handover.unseen.items()]
        flags = [*map(self.slot, self.handover.raised), *self.arrivals()]
        counts = [self.flag(PERMITS, 0, user) for user in sorted(self.handover.users)]
        wait: list[Step] = [self.on(CALLER, in_batches(late))] if late else []
        return [*joins, *wait, *([self.ending(flags, counts)] if flags or counts else [])]

    def ending(self, flags: Sequence[int], counts: Sequence[int]) -> Step:
        from hostir.runtime.kernels.flags import Ending  # which needs Triton

        return Ending(self.device, flags, counts)

    def arrivals(self) -> list[int]:
        """The flags that the team of each barrier has raised here."""
        return [
            self.flag((BARRIERS, op.team), op.number * len(op.team) + number, self.rank)
            for op in self.unrolled.ops
            if isinstance(op, BarrierOp) and not (op.number == 0 and op.team in self.handover.opening)
            for number, rank in enumerate(op.team)
            if rank != self.rank
        ]

    def slot(self, slot: Slot) -> int:
        return self.flag(*slot, self.rank)

    def flag(self, place: Place, slot: int, rank: int) -> int:
        """The address of a flag."""
        return self.memory.buffers[place, rank].data_ptr() + slot * FLAG_BYTES

    def place(self, register: int) -> Place:
        """The symmetric buffer of a register."""
        buffer = self.unrolled.buffers[register]
        op = next(op for op in self.unrolled.ops if isinstance(op, SymmetricOp) and op.out == buffer)
        return op.name, op.rounds


def _record(streams: Sequence[torch.cuda.Stream], stream: int, event: torch.cuda.Event) -> None:
    event.record(streams[stream])


def _after(streams: Sequence[torch.cuda.Stream], stream: int, event: torch.cuda.Event) -> None:
    event.wait(streams[stream])


def _join(streams: Sequence[torch.cuda.Stream], stream: int, other: int, event: torch.cuda.Event) -> None:
    """One stream goes on after what another has been given so far."""
    event.record(streams[other])
    event.wait(streams[stream])
