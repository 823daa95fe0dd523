"""Run one-sided statements on CUDA: copy engines or SMs copy, streams or kernels set flags and wait for flags.

No stream may poll or raise a flag of a call before the previous call has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from hostir.ir.machine import Ready
from hostir.ir.source import Diagnostic, HostIRError
from hostir.ir.types import FLAG
from hostir.job.offers import BARRIERS, BufferPlace
from hostir.job.symmetric import SharedMemory
from hostir.kernels import aten
from hostir.kernels.contractions import IN_TRITON
from hostir.kernels.dtypes import torch_dtype
from hostir.kernels.repeats import Again, Kernel, repeating
from hostir.kernels.table import kernels_for
from hostir.knobs import TIMEOUT
from hostir.machines.binding import Step, bind_compute, completed, compute_block, copy_here
from hostir.machines.cuda.copies import StridedCopy
from hostir.machines.cuda.driver import in_batches, wait_at_least, write
from hostir.machines.cuda.flow_control import CREDITS, Slot, flow_control_of, waits
from hostir.machines.cuda.streams import join, own_stream
from hostir.machines.pushes import PushedProduct, Pushes
from hostir.plan.operations import CALLER, NONE, BarrierOp, ComputeOp, CopyOp, Op, SignalOp, WaitSignalOp
from hostir.plan.unrolled import UnrolledProgram

if TYPE_CHECKING:
    from hostir.kernels.flags.copies import PushKernel
    from hostir.kernels.flags.done import DoneFlags
    from hostir.kernels.flags.ready import ReadyFlags
    from hostir.kernels.layout import Words


def unforked(unrolled: UnrolledProgram) -> list[Op]:
    """Return the operations that use flags on a stream that has not yet waited for the caller's stream."""
    forked = unrolled.order.forked
    return [op for at, op in enumerate(unrolled.ops) if uses_flags(unrolled, op) and not forked(at)]


def takes_credits_first(unrolled: UnrolledProgram) -> bool:
    """Whether the caller's stream takes the credits at the beginning of the call.

    Otherwise the first stream that accesses a peer takes them, and other streams wait for it before they access one. If
    a flag, or the lack of a free SM, may block that stream first, the others would wait for more than the program asks.
    """
    ops, precedes = unrolled.ops, unrolled.order.precedes
    touching = [at for at, op in enumerate(ops) if unrolled.touches_peer(op)]
    if all(precedes(touching[0], at) for at in touching[1:]):
        return False
    waits_on_sms = any(op.needs_sms and op.awaited_flags for op in ops)  # such a kernel may hold all SMs while it waits
    return any(
        precedes(at, touching[0])
        for at, op in enumerate(ops[: touching[0]])
        if op.awaits or op.awaited_flags or (waits_on_sms and op.needs_sms)
    )


def uses_flags(unrolled: UnrolledProgram, op: Op) -> bool:
    """Whether an operation raises or waits for flags, of this rank or a peer, or needs credits to access a peer."""
    return bool(op.raised_flags or op.awaited_flags) or unrolled.touches_peer(op)


# The host only issues work, and waits for nothing. A flag holds an epoch; hostir.machines.cuda.memory describes how it
# is reset to 0 at the end of a call. So all work can be captured into a CUDA graph, and every replay is correct.

FLAG_BYTES = 8
TIMEOUTS = 256  # the number of blocks whose words share one allocation, at least
SECONDS_PER_POLL = 1e-6  # of a kernel: a round trip to the L2 cache
Issue = Callable[[int], None]  # issues work to the stream with the given handle


class Timeouts:
    """The words in pinned memory to which the kernels of a program report timeouts; every call reads them.

    Executors that share symmetric memory share them: after a timeout none of them reads what is stale there. A kernel
    that waits for flags has two words for each of its blocks, see `ReadyFlags`. They belong to a statement in one round
    of its loops, and plans for all sizes share them: the words outlive a plan, and their number is bounded.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.words: dict[tuple[object, ...], tuple[UnrolledProgram, ComputeOp, torch.Tensor]] = {}
        self.pages: list[torch.Tensor] = []  # [TIMEOUTS, 2] each
        self.used = 0  # the number of rows in use of the latest page
        self.read: list[tuple[memoryview, bytes]] = []  # for each page the bytes in use, and as many zeros

    def of(self, unrolled: UnrolledProgram, op: ComputeOp, blocks: int) -> torch.Tensor:
        """Return the words `[blocks, 2]` of an operation's kernel."""
        number = next(n for n, s in enumerate(unrolled.program.walk()) if s is op.place.statement)
        key = number, op.place.rounds, blocks
        if key not in self.words:
            if not self.pages or self.used + blocks > len(self.pages[-1]):
                self.pages.append(pinned_zeros(max(blocks, TIMEOUTS)))
                self.used = 0
            self.words[key] = unrolled, op, self.pages[-1][self.used : self.used + blocks]
            self.used += blocks
            size = self.used * 2 * FLAG_BYTES
            self.read[len(self.pages) - 1 :] = [(self.pages[-1].numpy().data.cast("B")[:size], bytes(size))]
        return self.words[key][2]

    def problem(self) -> HostIRError | None:
        """Return the timeouts that were reported since they were last read, as one error, and clear them."""
        for words, zeros in self.read:
            if words.tobytes() != zeros:
                return self._taken()
        return None

    def _taken(self) -> HostIRError | None:
        from hostir.kernels.flags.ready import timeout_error

        found: list[Diagnostic] = []
        for unrolled, op, words in self.words.values():
            assert op.ready is not None
            seen = words.clone()
            words.zero_()
            name = f"%{unrolled.symmetric[unrolled.buffers[op.ready.flags]].home[0]}"
            results = None if op.ready.results == op.ready.blocks else op.ready.results
            timed_out = timeout_error(seen, self.rank, name, results)
            found += () if timed_out is None else unrolled.failure(op, timed_out).diagnostics
        return HostIRError(*found) if found else None  # None if another thread has just read and cleared them


def pinned_zeros(rows: int) -> torch.Tensor:
    """Return `[rows, 2]` of int64 zeros in pinned memory: kernels write to it, and the host reads without waiting."""
    return torch.zeros(rows, 2, dtype=torch.int64, device="cpu", pin_memory=True)


class CudaOneSided:
    """Makes the steps of a plan's one-sided operations.

    Args:
        unrolled: the plan's unrolled program.
        memory: the symmetric memory of all ranks.
        device: this rank's device.
        registers, streams: the plan's own lists, whose elements change with every call.
        kernels: the kernels by kind of computation.
        kernel: returns the kernel of one computation, for its stream.
        timeouts: receives the timeouts of kernels that wait for flags.
        words: device memory for the numbers that kernels read.
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
        timeouts: Timeouts,
        words: Words,
    ) -> None:
        self.unrolled = unrolled
        self.memory = memory
        self.device = device
        self.registers = registers
        self.streams = streams
        self.kernels, self.kernel, self.timeouts, self.words = kernels, kernel, timeouts, words
        self.push_kernels = 0  # how many there are so far
        self.launches: list[tuple[Op, Step]] = []  # what launches kernels of Triton, and issues nothing else
        self.rank = unrolled.rank
        self.flow_control = flow_control_of(unrolled, memory)
        self.credits_taken: torch.cuda.Event | None = None  # recorded by the stream that takes the credits
        self.after_credits: set[int] = set()  # the streams that wait for that event
        self.forked = set[int]()  # the streams that wait for `start`
        self.start = torch.cuda.Event()  # recorded at the beginning of the call
        self.unforked = {id(op) for op in unforked(unrolled)}
        self.sent: set[tuple[int, BufferPlace, int, int]] = set()
        runs = Pushes.of(unrolled)
        self.pushes = {id(op): pushes for pushes in runs for op in pushes.ops}
        products = [each for each in PushedProduct.of(unrolled, runs) if self.pushing_kernel(each.product) is not None]
        self.products = {id(op): each for each in products for op in (each.product, *each.pushes.ops)}
        self.behind_products = {id(each.reader) for each in products}
        self.barriers: list[BarrierOp] = []  # all but those that credits replace

    @cached_property
    def diagnosis(self) -> torch.cuda.Stream:
        """The stream on which flags are read while all others may be blocked."""
        return own_stream(self, self.device, priority=0)

    # Operations ---------------------------------------------------------------------------------------------------
    def begin_call(self) -> list[Step]:
        """Return the steps that begin a call, on the caller's stream."""
        marks: list[Step] = [partial(_record, self.streams, CALLER, self.start)] if self.unforked else []
        if not takes_credits_first(self.unrolled):
            return marks
        self.credits_taken = torch.cuda.Event()
        self.after_credits.add(CALLER)
        take = self.on(CALLER, self.take_credits())
        return [*marks, take, partial(_record, self.streams, CALLER, self.credits_taken)]

    def before(self, op: Op) -> list[Step]:
        """Return the steps before an operation: wait for the beginning of the call, and take credits or wait for them.

        Credits are taken once in a call; `takes_credits_first` says by which stream.
        """
        streams, fork = self.streams, list[Step]()
        if id(op) in self.unforked and op.stream not in self.forked:  # or it might run before the last call has ended
            self.forked.add(op.stream)
            fork = [partial(_after, streams, op.stream, self.start)]
        if not self.unrolled.touches_peer(op) or op.stream in self.after_credits:
            return fork
        self.after_credits.add(op.stream)
        if self.credits_taken is not None:
            return [*fork, partial(_after, streams, op.stream, self.credits_taken)]
        self.credits_taken = torch.cuda.Event()
        others = {o.stream for o in self.unrolled.ops if self.unrolled.touches_peer(o)} - {op.stream}
        mark = [partial(_record, streams, op.stream, self.credits_taken)] if others else []
        return [*fork, self.on(op.stream, self.take_credits()), *mark]

    def is_sent(self, op: SignalOp) -> bool:
        """Whether the call sends the same signal earlier; a second one might arrive after the reset of the flag."""
        signal = op.peer, self.place(op.flags), op.slot, op.epoch
        again = signal in self.sent
        self.sent.add(signal)
        return again

    def on(self, stream: int, issue: Issue) -> Step:
        streams = self.streams
        return lambda: issue(streams[stream].cuda_stream)

    def copy(self, op: CopyOp) -> Step:
        """Return the step of a copy from or to a peer."""
        registers, streams, x, out, stream = self.registers, self.streams, op.x, op.out, op.stream
        copy = StridedCopy()
        return lambda: copy(registers[out], registers[x], streams[stream].cuda_stream)

    def copy_here(self, op: CopyOp) -> Step:
        """Return the step of a copy within this GPU, which a kernel makes."""
        registers, x, out, kernel = self.registers, op.x, op.out, self.kernels["copy"]
        return lambda: copy_here(registers[out], registers[x], kernel)

    def push(self, pushes: Pushes) -> Step:
        """Return the step that launches one kernel for all of these copies and signals."""
        registers, source = self.registers, self.unrolled.buffers[pushes.copies[0][0].x]
        kernel = self.pushing(pushes)
        return self.launching(pushes.ops[0], lambda: kernel(registers[source]))

    def pushed_product(self, op: ComputeOp, pushes: Pushes) -> Step:
        """Return the step that launches one kernel for a product and for copies of its rows: see `PushedProduct`."""
        registers, out, operands, kernel = self.registers, op.out, op.operands, self.pushing_kernel(op)
        assert kernel is not None
        multiply = repeating(kernel, pushed=self.pushing(pushes), **op.options)
        return self.launching(op, lambda: multiply(registers[out], *[registers[x] for x in operands]))

    def in_triton(self, op: ComputeOp) -> bool:
        """Return True if the kernel of a computation, or of a block of one, launches kernels of Triton."""
        return kernels_for(self.kernels, torch_dtype(op.dtype))[op.kind] in IN_TRITON

    def launching(self, op: Op, step: Step) -> Step:
        """Return the step, which launches kernels of Triton for an operation, and note that it does."""
        self.launches.append((op, step))
        return step

    def pushing_kernel(self, op: ComputeOp) -> Kernel | None:
        """Return the kernel that makes a product and stores it to peers as well, if there is one."""
        return kernels_for(self.kernels, torch_dtype(op.dtype)).get(f"{op.kind}_pushed")

    def pushing(self, pushes: Pushes) -> PushKernel:
        """Return the kernel that makes all of these copies and sends their signals."""
        to = self.registers[pushes.copies[0][0].out]
        pieces = []
        for copy, signal in pushes.copies:
            flag, epoch = (0, 0) if signal is None or self.is_sent(signal) else (self.raised(signal), signal.epoch)
            offset = self.unrolled.layouts[copy.x].offset * to.element_size()
            pieces.append((offset, self.registers[copy.out].data_ptr(), flag, epoch))
        # The kernel raises its flags in any order, so each only once: a lower epoch might arrive after the reset to 0.
        last = {flag: number for number, (*_, flag, _) in enumerate(pieces)}
        pieces = [
            (offset, target, flag if last[flag] == number else 0, epoch)
            for number, (offset, target, flag, epoch) in enumerate(pieces)
        ]
        return self.push_kernel(pieces, to.numel() * to.element_size(), pushes.sms)

    def push_kernel(self, pieces: Sequence[tuple[int, ...]], size: int, sms: int) -> PushKernel:
        from hostir.kernels.flags.copies import Piece, PushKernel  # which needs Triton

        self.push_kernels += 1
        return PushKernel(self.device, [Piece(*each) for each in pieces], size, sms, self.words, self.push_kernels)

    def signal(self, op: SignalOp) -> Step | None:
        """Return the step that raises a flag; None if the call raises it earlier, or stream order makes it needless."""
        flag = self.raised(op)
        if not flag or self.is_sent(op):
            return None
        if not op.sms:
            return self.on(op.stream, in_batches([write(flag, op.epoch)]))
        kernel, streams, stream = self.signal_kernel(flag, op.epoch), self.streams, op.stream
        return lambda: kernel(streams[stream])

    def signal_kernel(self, flag: int, epoch: int) -> Callable[[torch.cuda.Stream], None]:
        from hostir.kernels.flags.signals import SignalKernel  # which needs Triton

        return SignalKernel(self.device, flag, epoch)

    def raised(self, op: SignalOp) -> int:
        """Return the address of the flag that a signal raises; 0 if stream order makes the flag needless."""
        place = self.place(op.flags)
        ordered = op.peer == self.rank and (place, op.slot) in self.flow_control.stream_ordered
        return 0 if ordered else self.flag(place, op.slot, op.peer)

    def wait_signal(self, op: WaitSignalOp) -> Step | None:
        """Return the step that makes the stream wait for a flag; None if stream order makes the flag needless."""
        if (self.place(op.flags), op.slot) in self.flow_control.stream_ordered:
            return None
        return self.on(op.stream, self.wait_all(op.flags, [op.slot], op.epoch))

    def wait_all(self, flags: int, slots: Sequence[int], epoch: int) -> Issue:
        return in_batches([wait_at_least(self.flag(self.place(flags), slot, self.rank), epoch) for slot in slots])

    def barrier(self, op: BarrierOp) -> Step | None:
        """Return the step that signals this rank's arrival to its team and waits for theirs; None if credits do."""
        if op.number == 0 and op.team in self.flow_control.implied_barriers:
            return None
        self.barriers.append(op)
        size, place = len(op.team), (BARRIERS, op.team)
        mine, first = op.team.index(self.rank), op.number * size
        others = [rank for rank in op.team if rank != self.rank]
        signals = [write(self.flag(place, first + mine, rank), 1) for rank in others]
        slots = [first + op.team.index(rank) for rank in others]
        return self.on(
            op.stream, in_batches([*signals, *(wait_at_least(self.flag(place, s, self.rank), 1) for s in slots)])
        )

    # Computations by blocks ---------------------------------------------------------------------------------------
    def compute(self, op: ComputeOp) -> Step:
        """Return the step of a computation that waits for flags or raises them.

        That is one kernel, which polls and raises them by itself, or else one for each block. Without a kernel that
        polls, a product directly after this rank's copies by SMs and without own rows waits for all blocks at once, and
        is one kernel: it could not start much earlier.
        """
        if op.ready is not None and id(op) in self.behind_products:
            op = replace(op, ready=replace(op.ready, overlapped_sms=0))
        kernel, ready = kernels_for(self.kernels, torch_dtype(op.dtype)).get(f"{op.kind}_by_blocks"), op.ready
        if kernel is not None:
            return self.in_one_kernel(op, kernel)
        if ready is not None and ready.overlapped_sms and ready.own is None and op.done is None:
            return self.after_all_blocks(op, ready)
        return self.by_blocks(op)

    def in_one_kernel(self, op: ComputeOp, kernel: Kernel) -> Step:
        registers, out, operands, options = self.registers, op.out, op.operands, dict(op.options)
        own = NONE if op.ready is None or op.ready.own is None else op.ready.own
        flags = {"ready": self.ready_flags(op), "done": self.done_flags(op)}

        def by_blocks(out: torch.Tensor, own: torch.Tensor | None, *operands: torch.Tensor) -> Again | None:
            return kernel(out, *operands, own_rows=own, **flags, **options)

        call = repeating(by_blocks)
        return self.launching(op, lambda: call(registers[out], registers[own], *[registers[x] for x in operands]))

    def ready_flags(self, op: ComputeOp) -> ReadyFlags | None:
        """Return the flags that the kernel of an operation polls, if any."""
        from hostir.kernels.flags.ready import ReadyFlags  # which needs Triton

        ready = op.ready
        if ready is None:
            return None
        return ReadyFlags(
            self.registers[ready.flags],
            ready.epoch,
            self.timeouts.of(self.unrolled, op, ready.blocks),
            first=ready.first,
            source=ready.own_first // ready.results,
            polls=int(TIMEOUT.get() / 2 / SECONDS_PER_POLL),  # half the timeout: the kernel reports before others
            overlapped_sms=ready.overlapped_sms,
            reserved_sms=ready.reserved_sms,
        )

    def done_flags(self, op: ComputeOp) -> DoneFlags | None:
        """Return the flags that the kernel of an operation raises, if any."""
        from hostir.kernels.flags.done import DoneFlags  # which needs Triton

        done = op.done
        return None if done is None else DoneFlags(self.registers[done.flags], done.epoch, done.first)

    def after_all_blocks(self, op: ComputeOp, ready: Ready) -> Step:
        place, stream = self.place(ready.flags), op.stream
        flags = [self.flag(place, block, self.rank) for block in range(ready.blocks)]
        wait = self.on(stream, in_batches([wait_at_least(flag, ready.epoch) for flag in flags]))
        compute = bind_compute(op, self.registers, self.kernel(op))
        if self.in_triton(op):
            self.launching(op, compute)

        def step() -> None:
            wait()
            compute()

        return step

    def by_blocks(self, op: ComputeOp) -> Step:
        """Return the step that computes block by block; the stream waits for flags before and raises flags behind."""
        registers, kernel, ready, done = self.registers, self.kernel(op), op.ready, op.done
        order = ready.order if ready is not None else done.order if done is not None else ()
        blocks, computed, steps = len(order), set[int](), list[Step]()
        for block in order:
            slots = [] if ready is None else self.needed(ready, block)
            if ready is not None and slots:
                steps.append(self.on(op.stream, self.wait_all(ready.flags, slots, ready.epoch)))
            steps.append(partial(compute_block, op, registers, kernel, block, blocks, self.add_up))
            if self.in_triton(op):
                self.launching(op, steps[-1])
            computed.add(block)
            if done is not None and (raised := completed(done, block, blocks, computed)):
                place = self.place(done.flags)
                writes = [write(self.flag(place, slot, self.rank), done.epoch) for slot in raised]
                steps.append(self.on(op.stream, in_batches(writes)))

        def step() -> None:
            for each in steps:
                each()

        return step

    def add_up(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, activation: str) -> None:
        aten.add_up(out, parts, activation=activation)

    def needed(self, ready: Ready, block: int) -> list[int]:
        """Return the flags that a block of the result waits for, but for those that the order of a stream replaces."""
        place, ordered = self.place(ready.flags), self.flow_control.stream_ordered
        return [slot for slot in ready.needed(block) if (place, slot) not in ordered]

    def missing(self) -> list[tuple[Op, str]]:
        """Return the operations that wait for flags not raised so far, and the flags' values; wait for no other stream.

        This is for messages about a call that does not end.
        """
        held: dict[BufferPlace, list[int]] = {}
        with torch.cuda.stream(self.diagnosis):
            for (place, rank), buffer in self.memory.buffers.items():
                if rank == self.rank and buffer.dtype == torch_dtype(FLAG):
                    held[place] = buffer.cpu().view(-1).tolist()
        found: list[tuple[Op, str]] = []
        for barrier in self.barriers:
            row = held[BARRIERS, barrier.team][barrier.number * len(barrier.team) :]
            late = [rank for rank, came in zip(barrier.team, row, strict=False) if not came and rank != self.rank]
            found += [(barrier, f"rank {', '.join(map(str, late))} has not come")] if late else []
        for (place, slot), epoch, op in waits(self.unrolled):
            if (at := held[place][slot]) < epoch:
                found.append((op, f"flag %{place[0]}[{slot}] stands at {at}, not at {epoch}"))
        return found

    # From call to call --------------------------------------------------------------------------------------------
    def take_credits(self) -> Issue:
        """Return the work that waits for one credit from each peer whose flags this rank raises, and consumes them."""
        count = self.flag(CREDITS, 0, self.rank)
        needed = len(self.flow_control.signaled)
        return in_batches([wait_at_least(count, needed), write(count, 0)] if needed else [])

    def end_call(self) -> list[Step]:
        """Return the steps that end a call, on the caller's stream: reset flags, and grant credits to peers."""
        joins: list[Step] = [
            partial(join, self.streams, CALLER, stream, torch.cuda.Event()) for stream in self.unrolled.order.unjoined
        ]
        late = [wait_at_least(self.slot(slot), epoch) for slot, epoch in self.flow_control.unawaited.items()]
        flags = [*map(self.slot, self.flow_control.raised), *self.arrivals()]
        counters = [self.flag(CREDITS, 0, peer) for peer in sorted(self.flow_control.signalers)]
        wait: list[Step] = [self.on(CALLER, in_batches(late))] if late else []
        if not flags and not counters:
            return [*joins, *wait]
        key = "flag reset", *flags, NONE, *counters
        if key not in self.memory.kept:  # the same for all sizes, so that new ones take no memory for it
            self.memory.kept[key] = self.flag_reset(flags, counters)
        return [*joins, *wait, self.memory.kept[key]]

    def flag_reset(self, flags: Sequence[int], counters: Sequence[int]) -> Step:
        from hostir.kernels.flags.signals import FlagResetKernel  # which needs Triton

        return FlagResetKernel(self.device, flags, counters)

    def arrivals(self) -> list[int]:
        """Return the addresses of this rank's flags that peers raise in barriers."""
        return [
            self.flag((BARRIERS, op.team), op.number * len(op.team) + number, self.rank)
            for op in self.barriers
            for number, rank in enumerate(op.team)
            if rank != self.rank
        ]

    def slot(self, slot: Slot) -> int:
        return self.flag(*slot, self.rank)

    def flag(self, place: BufferPlace, slot: int, rank: int) -> int:
        """Return the address of a flag."""
        return self.memory.buffers[place, rank].data_ptr() + slot * FLAG_BYTES

    def place(self, register: int) -> BufferPlace:
        """Return the symmetric buffer that a register's tensor is in."""
        return self.unrolled.symmetric[self.unrolled.buffers[register]].home


def _record(streams: Sequence[torch.cuda.Stream], stream: int, event: torch.cuda.Event) -> None:
    event.record(streams[stream])


def _after(streams: Sequence[torch.cuda.Stream], stream: int, event: torch.cuda.Event) -> None:
    event.wait(streams[stream])
