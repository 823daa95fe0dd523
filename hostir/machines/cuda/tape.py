"""Tapes: the driver calls that one call of a plan makes, as flat data with slots for the addresses that change.

A tape is recorded while a plan runs. It holds launches of kernels, operations on flags in memory, copies, memsets,
and events. It may hold collectives of NCCL, too. An address within a tensor that changes from call to call
becomes a slot and an offset. Any other address is fixed. A stream becomes a number.

Only torch can run some steps, such as a product in f32 by cuBLAS. Such a step ends a segment of the tape. So a call
becomes a list that contains segments and steps in Python. `hostir.machines.cuda.native` issues a segment by one call of
a C function.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hostir.kernels.parameters import TAPING, KernelLaunch, packed
from hostir.machines.cuda.driver import AT_LEAST, WAIT, Memcpy2D, MemoryOp

LAUNCH, MEMORY, COPY, ROWS, MEMSET, RECORD, AWAIT, COLLECTIVE, COUNT = range(9)  # kinds of entries, as in launcher.c
COLLECTIVES = "allgather", "reduce_scatter", "allreduce"  # by their numbers in launcher.c
# The driver's enum CUlaunchAttributeID, and a value of its enum CUclusterSchedulingPolicy.
COOPERATIVE, CLUSTER, CLUSTER_SCHEDULING, DEPENDENT = 2, 4, 5, 6
SPREAD = 1


@dataclass(frozen=True)
class Memory:
    """A named range of addresses. It is fixed memory, or the memory of a tensor, which may differ from call to call.

    Fields:
        name: the name in the text of a tape.
        begin: the first address.
        size: the size in bytes.
        slot: the number of the slot, which is the number of the register that holds the tensor; None for fixed memory.
    """

    name: str
    begin: int
    size: int
    slot: int | None = None


@dataclass(frozen=True)
class Address:
    """An address that the bytes of a tape entry contain.

    Fields:
        at: the offset of the address in the entry's bytes. If `is_map` is True, it is the offset of the tensor map.
        value: the address at the time of the recording.
        memory: the memory that contains the address; None if no known memory does.
        is_map: True if the address is part of a tensor map.
    """

    at: int
    value: int
    memory: Memory | None
    is_map: bool = False

    @property
    def offset(self) -> int:
        return self.value - (self.memory.begin if self.memory is not None else 0)

    def __str__(self) -> str:
        if self.memory is None:
            return hex(self.value)
        return f"{self.memory.name}+{self.offset}" if self.offset else self.memory.name


@dataclass(frozen=True)
class TapeEntry:
    """One call of the driver or of NCCL on a tape; COUNT stands for three calls.

    Fields:
        kind: LAUNCH, MEMORY, COPY, ROWS, MEMSET, RECORD, AWAIT, COLLECTIVE or COUNT.
        place: the index of the plan's step that makes the call.
        stream: the number of the stream.
        fields: the arguments of the call, in the form that the launcher in C takes.
        addresses: the addresses in `fields`.
        text: a description of the call, without its stream.
    """

    kind: int
    place: int
    stream: int
    fields: tuple[Any, ...]
    addresses: tuple[Address, ...]
    text: str

    def __str__(self) -> str:
        return f"stream {self.stream}: {self.text}"


@dataclass(frozen=True)
class Segment:
    """Entries of a tape that are issued together.

    Fields:
        entries: the entries, in order.
        slots: the numbers of the slots that the entries use.
    """

    entries: tuple[TapeEntry, ...]
    slots: tuple[int, ...]

    @staticmethod
    def of(entries: Sequence[TapeEntry]) -> Segment:
        slots = {a.memory.slot for e in entries for a in e.addresses if a.memory is not None}
        return Segment(tuple(entries), tuple(sorted(slot for slot in slots if slot is not None)))

    @property
    def patches(self) -> tuple[tuple[int, int, int, int, bool], ...]:
        """The addresses to replace before a run, each as a tuple for the launcher in C.

        A tuple holds the index in `slots`, the index of the entry, the offset in the entry's bytes, the offset to add
        to the slot's address, and True if the address is in a tensor map.
        """
        places = {slot: place for place, slot in enumerate(self.slots)}
        return tuple(
            sorted(
                (places[address.memory.slot], number, address.at, address.offset, address.is_map)
                for number, entry in enumerate(self.entries)
                for address in entry.addresses
                if address.memory is not None and address.memory.slot is not None
            )
        )

    @property
    def rows(self) -> tuple[tuple[int, int, int, tuple[Any, ...]], ...]:
        """The entries in the form that the launcher in C takes."""
        return tuple((entry.kind, entry.place, entry.stream, entry.fields) for entry in self.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))


def without_redundant_waits(
    entries: Sequence[TapeEntry], numbers: dict[int, int], *, complete: bool
) -> list[TapeEntry]:
    """Remove redundant waits for events, and number the events in the texts.

    A wait is redundant if its stream is already ordered after everything before the record of the event. To remove it
    changes no order between pieces of work.

    Args:
        entries: the entries of one segment.
        numbers: the numbers of the events so far, by handle. The function adds the numbers of new events.
        complete: True if only these entries use the events. Then records that no remaining wait needs are removed, too.
    """
    # Vector clocks: for each stream, the last entry of each stream that must end before its next entry begins. -1 means
    # only the work before the segment. A stream without an entry in the clock is less: no order is known.
    clocks: dict[int, dict[int, int]] = {}
    recorded: dict[int, dict[int, int]] = {}  # the clock of the stream that recorded each event
    kept: list[TapeEntry] = []
    for number, entry in enumerate(entries):
        clock = clocks.setdefault(entry.stream, {entry.stream: -1})
        if entry.kind == RECORD:
            recorded[entry.fields[0]] = dict(clock)
        elif entry.kind == AWAIT and entry.fields[0] in recorded:
            event_clock = recorded[entry.fields[0]]
            if all(stream in clock and clock[stream] >= last for stream, last in event_clock.items()):
                continue
            clock.update({stream: max(last, clock.get(stream, last)) for stream, last in event_clock.items()})
        else:  # a wait for an event that is recorded elsewhere counts as work, so that later records cover it
            clock[entry.stream] = number
        kept.append(entry)
    awaited = {entry.fields[0] for entry in kept if entry.kind == AWAIT}
    return [
        numbered(entry, numbers)
        for entry in kept
        if not (complete and entry.kind == RECORD and entry.fields[0] not in awaited)
    ]


def numbered(entry: TapeEntry, numbers: dict[int, int]) -> TapeEntry:
    """Return an entry. If it records an event or waits for one, its text gets the event's number from `numbers`."""
    if entry.kind not in (RECORD, AWAIT):
        return entry
    number = numbers.setdefault(entry.fields[0], len(numbers))
    return replace(entry, text=f"{'record' if entry.kind == RECORD else 'wait for'} event {number}")


def attribute(number: int, *value: int) -> bytes:
    """Return the bytes of the driver's struct CUlaunchAttribute."""
    return struct.pack("<I4x", number) + struct.pack(f"<{len(value)}I", *value).ljust(64, b"\0")


class Launched(Protocol):
    """The interface of a compiled kernel that a tape can record."""

    @property
    def kernel_launch(self) -> KernelLaunch:
        """The properties that all launches of the kernel share. Raises TypeError if native code cannot launch it."""


class TapeWriter:
    """Records the driver calls of a thread as tape entries. It is a context manager, and records within its context.

    Args:
        memories: a function that returns the ranges of addresses that are known at this moment.
        streams: the number of each stream, by its handle.

    Fields:
        entries: the entries recorded so far.
        place: the index of the step of the plan that is being issued.
        complete: True as long as everything that was launched could be recorded.
        kept: tensors that recorded launches use. They must live as long as the recording.
    """

    def __init__(self, memories: Callable[[], Sequence[Memory]], streams: Mapping[int, int]) -> None:
        self.memories = memories
        self.streams = streams
        self.entries: list[TapeEntry] = []
        self.place = 0
        self.complete = True
        self.kept: list[Any] = []

    def __enter__(self) -> TapeWriter:
        TAPING.writer = self
        return self

    def __exit__(self, *_: object) -> None:
        TAPING.writer = None

    def address(self, at: int, value: int, *, is_map: bool = False) -> Address:
        """Return an `Address` for the address `value`, which is at offset `at` of an entry.

        The result names the memory that contains `value`. If no known memory contains the address of a tensor map, the
        recording is incomplete.
        """
        inside = (m for m in self.memories() if m.begin <= value < m.begin + max(m.size, 1))
        memory = next(inside, None) if value else None
        if is_map and memory is None:
            self.complete = False  # the tensor of a map is not known: its address cannot be replaced
        return Address(at, value, memory, is_map)

    def add(self, kind: int, stream: int, fields: tuple[Any, ...], addresses: Sequence[Address], text: str) -> None:
        number = self.streams.get(stream)
        if number is None:
            self.complete = False
            return
        self.entries.append(TapeEntry(kind, self.place, number, fields, tuple(addresses), text))

    def incomplete(self) -> None:
        """Mark the recording as incomplete: something was launched that cannot be recorded."""
        self.complete = False

    def launch(self, compiled: Launched, programs: int, stream: int, arguments: Sequence[Any]) -> None:
        """Record the launch of a compiled kernel. If native code cannot repeat it, mark the recording as incomplete."""
        try:
            launch = compiled.kernel_launch
            image, offsets, places = packed(launch.types, arguments)
        except (TypeError, KeyError, AttributeError, struct.error):  # Triton passes arguments in another way
            self.complete = False
            return
        addresses = [self.address(at, value, is_map=is_map) for at, value, is_map in places]
        attributes = attribute(DEPENDENT, 1) if launch.dependent else b""
        attributes += attribute(COOPERATIVE, 1) if launch.cooperative else b""
        if launch.ctas != 1:
            attributes += attribute(CLUSTER, launch.ctas, 1, 1) + attribute(CLUSTER_SCHEDULING, SPREAD)
        sizes = (programs * launch.ctas, 1, 1, 32 * launch.warps, 1, 1)
        fields = (launch.function, sizes, launch.shared, attributes, image, tuple(offsets))
        text = f"launch {launch.name} x {programs}({', '.join(map(str, addresses))})"
        self.add(LAUNCH, stream, fields, addresses, text)

    def memory_ops(self, ops: Sequence[MemoryOp], stream: int) -> None:
        """Record one batch of operations on memory: writes of flags, and waits for flags."""
        addresses = [
            self.address(i * ctypes.sizeof(MemoryOp) + MemoryOp.address.offset, op.address) for i, op in enumerate(ops)
        ]
        texts = [
            f"{'wait' if op.kind == WAIT else 'write'} {address} {'>=' if op.kind == WAIT else '='} {op.value}"
            for op, address in zip(ops, addresses, strict=True)
        ]
        assert all(op.flags == AT_LEAST for op in ops)
        self.add(MEMORY, stream, (b"".join(map(bytes, ops)),), addresses, ", ".join(texts))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Record a copy of `size` contiguous bytes from address `source` to address `target`."""
        addresses = self.address(0, target), self.address(8, source)
        text = f"copy {addresses[1]} -> {addresses[0]}, {size} bytes"
        self.add(COPY, stream, (target, source, size), addresses, text)

    def copy_rows(self, rows: Memcpy2D, stream: int) -> None:
        """Record a copy of equally spaced rows."""
        addresses = (
            self.address(Memcpy2D.out_address.offset, rows.out_address),
            self.address(Memcpy2D.x_address.offset, rows.x_address),
        )
        text = f"copy {addresses[1]} -> {addresses[0]}, {rows.height} rows of {rows.width} bytes"
        self.add(ROWS, stream, (bytes(rows),), addresses, text)

    def collective(
        self, what: str, target: int, source: int, elements: tuple[int, int, str], communicator: int, stream: int
    ) -> None:
        """Record a collective of NCCL.

        Args:
            what: one of COLLECTIVES.
            target, source: the addresses of the tensors.
            elements: the number of elements in the smaller one of them, their type as a value of NCCL's enum
                ncclDataType_t, and the name of this type in texts.
            communicator: NCCL's handle of the ranks.
            stream: the handle of the stream.
        """
        (count, datatype, name), addresses = elements, (self.address(0, target), self.address(8, source))
        text = f"{what} {addresses[1]} -> {addresses[0]} by NCCL, {count} {name}"
        fields = (target, source, count, communicator, COLLECTIVES.index(what), datatype)
        self.add(COLLECTIVE, stream, fields, addresses, text)

    def record(self, event: int, stream: int) -> None:
        """Add an entry that records an event on a stream. Both arguments are handles."""
        self.add(RECORD, stream, (event,), (), f"record event {event:#x}")

    def wait(self, event: int, stream: int) -> None:
        """Add an entry that makes a stream wait for an event. Both arguments are handles."""
        self.add(AWAIT, stream, (event,), (), f"wait for event {event:#x}")
