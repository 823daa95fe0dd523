"""Collectives and messages by NCCL, through torch's process groups.

Some collectives can be recorded on a tape. Then native code issues them to NCCL directly, with the communicator of the
process group. Such a collective runs on the stream of the caller, as it does through torch. torch's watchdog does not
see it, so hostir's watchdog checks that it ends (see `NativeCollectives`).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from hostir.job.links import headline
from hostir.machines.binding import Step
from hostir.machines.cuda.streams import own_stream
from hostir.machines.cuda.tape import COLLECTIVES, COUNT, TapeEntry, TapeWriter
from hostir.plan.operations import CollectiveOp, MessagesOp

if TYPE_CHECKING:
    from hostir.machines.cuda.machine import CudaPlan

LIBRARY = "libtorch_cuda.so"  # it needs, or contains, the copy of NCCL that made torch's communicators
# Values of ncclDataType_t for sums, with the names of hostir's types. Other collectives move bytes.
SUMMED = {
    torch.int32: (2, "i32"),
    torch.int64: (4, "i64"),
    torch.float16: (6, "f16"),
    torch.float32: (7, "f32"),
    torch.float64: (8, "f64"),
    torch.bfloat16: (9, "bf16"),
}
BYTES = (1, "bytes")
# By variable: the values with which torch leaves a process alone if a collective does not end.
LEFT_ALONE = {
    **dict.fromkeys(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), ("0", "2")),
    **dict.fromkeys(("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"), ("1",)),
}
LOOK = 1.0  # the most seconds between two looks of the watchdog, unless its process was stopped
COUNTS = 1024  # the size of the struct Counts in launcher.c, in elements of int64
STREAMS = 8  # of callers; an executor keeps as many tapes
AFTER_ERROR = 5.0  # seconds in which a collective must end if its process exits after an error
_all: list[NativeCollectives] = []  # of all sessions; a GPU may write to their memory after a session has ended


def collective(
    op: CollectiveOp, registers: list[Any], backend: Any, members: tuple[int, ...], inline: bool = False
) -> Step:
    """Return the step that starts a collective and puts torch's `Work` object into the handle's register.

    A process group numbers its ranks in ascending order. If the team has another order, the step passes a list of
    blocks in the order of the group.

    Args:
        op: the operation.
        registers: the registers of the plan.
        backend: the NCCL backend of the process group. It takes less host time than the methods of the group, which
            go through torch's dispatcher.
        members: the ranks of the group.
        inline: True to run the collective on the current stream instead of NCCL's internal stream.
    """
    x, out, handle = op.x, op.out, op.handle
    order = [op.team.index(rank) for rank in members]
    if op.communication == "allreduce":
        options = _options(AllreduceOptions, inline)

        def allreduce() -> None:
            registers[handle] = backend.allreduce([registers[out]], options)

        return allreduce
    if order != sorted(order):
        return _block_by_block(op, registers, backend, order, inline)
    if op.communication == "alltoall":
        options = _options(AllToAllOptions, inline)

        def alltoall() -> None:
            registers[handle] = backend.alltoall_base(registers[out], registers[x], [], [], options)

        return alltoall
    gather = op.communication == "allgather"
    call = backend._allgather_base if gather else backend._reduce_scatter_base
    options = _options(AllgatherOptions if gather else ReduceScatterOptions, inline)

    def base() -> None:
        registers[handle] = call(registers[out], registers[x], options)

    return base


def recordable(op: CollectiveOp, members: tuple[int, ...]) -> bool:
    """Return True if a collective on the caller's stream can be recorded: one call of NCCL, for ranks in order.

    `members` are the ranks of the process group.
    """
    order = [op.team.index(rank) for rank in members]
    return not op.by and op.communication in COLLECTIVES and (order == sorted(order) or op.communication == "allreduce")


@functools.cache
def library_problem(module: Any, library: str = LIBRARY) -> str:
    """Open NCCL in the native launcher. Return the reason if this is not possible, and else an empty text."""
    try:
        module.open_nccl(library)
    except OSError as problem:
        return str(problem)
    atexit.register(_exit_in_time, module)
    os.register_at_fork(after_in_child=lambda: atexit.unregister(_exit_in_time))
    return ""


def _exit_in_time(module: Any) -> None:
    """Make sure that this process exits, even if a collective never ends. Python calls this when it begins to exit.

    While Python exits, CUDA may wait for the device, and so for the collective. torch's watchdog does not know of it.
    So the native launcher ends the process if the collective does not end: after AFTER_ERROR seconds if the session or
    the process ends by an error, and otherwise after the group's timeout.
    """
    for each in _all:
        if text := each.under_way():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each.memory))  # for the thread, which runs after Python
            seconds = AFTER_ERROR if each.failed or hasattr(sys, "last_type") else each.seconds
            addresses = tuple(counts.data_ptr() for counts in each.memory)
            message = f"error: hostir ends rank {each.rank}, which could not exit: {text} has not ended\n"
            module.exit_unless_ended(addresses, seconds, message)


class NativeCollectives:
    """The collectives that native code issues for a session. The watchdog's thread asks whether they end.

    Native code numbers the segments of tapes with collectives that it issues to a stream. It writes each number to
    pinned memory before it issues the segment. At the end of the segment, the device writes the number to the same
    memory. A second stream does this. If the segment's own stream did, later work would begin 4 us later. Segments end
    in order, so the numbers only rise. The watchdog only reads memory. A call of CUDA could wait for a lock that a
    thread holds while it waits for the device, and it would be refused while another thread captures.

    Args:
        seconds: the timeout of the process groups.
        device: the device.
        rank: the rank of this process in the session.

    Fields:
        device: the device.
        memory: the numbers of all streams.
        streams: the numbers of each stream's segments, by the handle of the stream.
        texts: what the collectives of each segment are, as text.
        asked: the time when the watchdog asked last.
        failed: True if the session has ended by an error.
    """

    failed = False

    def __init__(self, seconds: float, device: torch.device, rank: int) -> None:
        self.seconds, self.rank, self.device = seconds, rank, device
        pinned = device.type == "cuda"
        self.memory = torch.zeros(STREAMS, COUNTS, dtype=torch.int64, device="cpu", pin_memory=pinned)
        _all.append(self)
        self.free = [*self.memory.unbind()]
        self.streams: dict[int, SegmentsOfStream] = {}
        self.texts: list[str] = []
        self.asked = time.monotonic()

    def watches(self, stream: int) -> bool:
        """Return True if collectives on a stream can be watched. Only STREAMS streams of a session can."""
        if stream not in self.streams and self.free:
            self.streams[stream] = SegmentsOfStream(self.free[-1], *_stream_and_event(self, self.device))
            self.free.pop()
        return stream in self.streams

    def entry(self, text: str, place: int, number: int, stream: int) -> TapeEntry:
        """Return a tape entry that marks the end of a segment.

        Args:
            text: what the collectives are.
            place: as for the entry.
            number: the number of the stream on the tape.
            stream: the handle of the stream.
        """
        if text not in self.texts:
            self.texts.append(text)
        segments = self.streams[stream]
        handles = segments.aside.cuda_stream, segments.event.cuda_event
        fields = (segments.memory.data_ptr(), self.texts.index(text), *handles)
        return TapeEntry(COUNT, place, number, fields, (), "count the segments that have ended")

    def late(self) -> str:
        """Return a text about collectives that have not ended within the timeout; empty if all end in time.

        Only the thread of the watchdog calls this.
        """
        last, self.asked = self.asked, time.monotonic()
        since = min(self.asked - last, LOOK)
        texts = [each.late(since, self.seconds) for each in list(self.streams.values())]
        text = next((text for text in texts if text is not None), None)
        if text is None:
            return ""
        return f"{self.named(text)} has not ended for {self.seconds:.0f} s, the group's timeout"

    def under_way(self) -> str:
        """Return a text about a segment that has not ended; empty if all have ended."""
        oldest = (each.oldest() for each in list(self.streams.values()))
        text = next((text for text in oldest if text is not None), None)
        return "" if text is None else self.named(text)

    def named(self, text: int) -> str:
        """Return the text about a segment, by its number, which is -1 if it is not known."""
        which = self.texts[text] if text >= 0 else "a collective by NCCL"
        return f"{which}, or what follows it in its call,"


def _stream_and_event(owner: object, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
    """Return a stream that writes the numbers of ended segments, and an event for which it waits.

    Both live as long as the process, as `_all` keeps their owner. After a failure, a stream of the
    highest priority raises flags. This stream has another priority, so the two share no hardware queue. Otherwise the
    flags could wait for a collective that never ends.
    """
    stream, event = own_stream(owner, device, priority=0), torch.cuda.Event()
    event.record(stream)  # torch creates the event now
    return stream, event


class SegmentsOfStream:
    """The numbers of segments that native code has issued to one stream.

    Fields:
        memory: the struct Counts of launcher.c.
        aside: the stream that writes the number of a segment that has ended.
        event: the event for which it waits, which is recorded at the end of the segment.
        ended: the number of segments that had ended when the watchdog asked last.
        waited: the seconds in which no segment has ended, and one was under way. Time in which the process was stopped
            does not count.
    """

    def __init__(self, memory: torch.Tensor, aside: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self.memory, self.aside, self.event = memory, aside, event
        self.counts = memory.numpy().data
        self.ended, self.waited = 0, 0.0

    def late(self, since: float, most: float) -> int | None:
        """Return the text of the oldest segment under way, as a number, if none has ended for `most` seconds.

        `since` are the seconds since the last call. Returns None if segments end, and -1 if the text is not known.
        """
        begun, ended = self.counts[0], self.counts[1]
        stands = begun != ended == self.ended
        self.ended, self.waited = ended, self.waited + since if stands else 0.0
        return self.oldest() if self.waited >= most else None

    def oldest(self) -> int | None:
        """Return the text of the oldest segment under way, as a number; -1 if the text is unknown.

        Return None if all segments have ended.
        """
        begun, ended, ring = self.counts[0], self.counts[1], COUNTS - 2
        if begun == ended:
            return None
        text: int = self.counts[2 + (ended + 1) % ring]
        return text if begun - ended <= ring else -1


def record_collective(
    plan: CudaPlan, number: int, native: NativeCollectives, backend: Any, module: Any, writer: TapeWriter
) -> str:
    """Add a collective to a tape. Return the reason if this is not possible, and else an empty text.

    Args:
        plan: the plan, with the tensors of a run in its registers.
        number: the index of the collective's step, which has just run.
        native: the collectives that native code issues for the session.
        backend: the NCCL backend of its process group.
        module: the native launcher.
        writer: the tape.
    """
    op = plan.ops[number]
    assert isinstance(op, CollectiveOp)
    x, out = plan.registers[op.x], plan.registers[op.out]
    smaller = min(x, out, key=torch.Tensor.numel)
    datatype = BYTES if op.communication == "allgather" else SUMMED.get(x.dtype)
    if datatype is None:
        return f"hostir does not know how NCCL adds up {x.dtype}"
    for name, values in LEFT_ALONE.items():
        if (value := os.environ.get(name, "").strip()) in values:
            return f"with {name}={value} torch does not end the process if a collective does not end"
    if reason := library_problem(module):
        return reason
    try:
        with torch.cuda.device(plan.machine.device):  # the communicator is looked up by the current device
            communicator = backend._comm_ptr()
    except Exception as problem:  # whatever torch raises
        return f"torch does not show NCCL's communicator ({headline(problem).partition(chr(10))[0]})"
    if not communicator:
        return "torch does not show NCCL's communicator"
    count = smaller.numel() * (smaller.element_size() if datatype is BYTES else 1)
    stream = plan.streams[op.stream].cuda_stream
    if not native.watches(stream):
        return f"native code issues collectives to {STREAMS} other streams"
    writer.collective(op.communication, out.data_ptr(), x.data_ptr(), (count, *datatype), communicator, stream)
    if any(address.memory is None for entry in writer.entries for address in entry.addresses):
        return "a tensor is not in a buffer of the program"
    return "" if writer.complete else "the tape lacks its stream"


def _options(options_class: Any, inline: bool) -> Any:
    options = options_class()
    options.asyncOp = not inline  # if False, NCCL runs on the current stream and delays the work that follows
    return options


def _block_by_block(op: CollectiveOp, registers: list[Any], backend: Any, order: list[int], inline: bool) -> Step:
    def blocks(register: int) -> list[torch.Tensor]:
        rows = registers[register].view(len(order), -1).unbind(0)
        return [rows[i] for i in order]

    def flat(register: int) -> torch.Tensor:
        return registers[register].view(-1)

    def step() -> None:
        if op.communication == "allgather":
            work = backend.allgather([blocks(op.out)], [flat(op.x)], _options(AllgatherOptions, inline))
        elif op.communication == "reduce_scatter":
            options = _options(ReduceScatterOptions, inline)
            work = backend.reduce_scatter([flat(op.out)], [blocks(op.x)], options)
        else:
            work = backend.alltoall(blocks(op.out), blocks(op.x), _options(AllToAllOptions, inline))
        registers[op.handle] = work

    return step


def messages(op: MessagesOp, registers: list[Any], group: Any, members: tuple[int, ...], device: torch.device) -> Step:
    """Return the step that sends and receives all pieces of an exchange in one NCCL group call.

    The step puts torch's `Work` object into the handle's register. `members` are the ranks of `group`.
    """
    handle = op.handle
    sends = [(register, members.index(rank)) for register, rank in op.sends]
    receives = [(register, members.index(rank)) for register, rank in op.receives]

    def step() -> None:
        group._start_coalescing(device)
        for register, peer in sends:
            group.send([registers[register]], peer, 0)
        for register, peer in receives:
            group.recv([registers[register]], peer, 0)
        registers[handle] = group._end_coalescing(device)

    return step
