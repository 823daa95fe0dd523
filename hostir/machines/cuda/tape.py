"""Tapes: what one rank's call issues to the driver, as flat data with slots for the addresses that change.

A tape is recorded while a plan runs, from the calls of the driver that the plan makes: launches of kernels, operations
on flags in memory, copies, and events. An address within a tensor that changes from call to call becomes a slot and an
offset. Any other address is fixed. A stream is a number, and each run gives its handle.

A step that only torch can run, such as a product by cuBLAS or a collective by NCCL, ends a segment. So a call is a list
of segments and of steps in Python. `hostir.machines.cuda.native` runs a segment in one call of C.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hostir.kernels.parameters import TAPING, KernelLaunch, packed
from hostir.machines.cuda.driver import AT_LEAST, WAIT, Memcpy2D, MemoryOp

LAUNCH, MEMORY, COPY, ROWS, RECORD, AWAIT = range(6)  # kinds of entries, as in launcher.c


@dataclass(frozen=True)
class Memory:
    """A range of addresses with a name: a tensor that changes from call to call, or fixed memory.

    Fields:
        name: for the text of a tape.
        begin, size: the range of addresses, in bytes.
        slot: the number of the slot; None for fixed memory.
    """

    name: str
    begin: int
    size: int
    slot: int | None = None


@dataclass(frozen=True)
class Address:
    """An address that an entry holds.

    Fields:
        at: where the entry holds it, in bytes.
        value: the address at the recording.
        memory: the memory that it lies in; None if it is in no known one.
        is_map: True if a tensor map there holds the address.
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
    """One call of the driver.

    Fields:
        kind: LAUNCH, MEMORY, COPY, ROWS, RECORD or AWAIT.
        place: the number of the operation that issues it, in the unrolled program.
        stream: the number of its stream.
        fields: what the launcher in C needs for it.
        addresses: the addresses that it holds.
        text: what it does, without its stream.
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
    """Entries that are issued together.

    Fields:
        entries: the entries, in order.
        streams: how many streams there are.
        slots: the slots that the entries use, by their numbers. A run gets one address for each.
    """

    entries: tuple[TapeEntry, ...]
    streams: int
    slots: tuple[int, ...]

    @staticmethod
    def of(entries: Sequence[TapeEntry], streams: int) -> Segment:
        slots = {a.memory.slot for e in entries for a in e.addresses if a.memory is not None}
        return Segment(tuple(entries), streams, tuple(sorted(slot for slot in slots if slot is not None)))

    @property
    def patches(self) -> tuple[tuple[int, int, int, int, bool], ...]:
        """The addresses that change: place in `slots`, entry, place in the entry, offset, whether in a tensor map."""
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
        """The entries as the launcher in C takes them."""
        return tuple((entry.kind, entry.place, entry.stream, entry.fields) for entry in self.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))


class Launched(Protocol):
    """The interface of a kernel object that a tape can record: it has a `kernel_launch`."""

    @property
    def kernel_launch(self) -> KernelLaunch:
        """The common part of all its launches."""


class TapeWriter:
    """Collects what a thread gives the driver to do, while it is the thread's writer.

    Args:
        memories: returns the ranges of addresses that are known at this moment.
        streams: the number of each stream, by its handle.

    Fields:
        entries: what was recorded.
        place: the number of the operation that is being issued.
        complete: False once something was launched that cannot be recorded.
        kept: tensors that recorded launches use, which must live as long as the recording.
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
        """Return an address with the memory that it lies in."""
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
        """Take note that something was launched that cannot be recorded."""
        self.complete = False

    def launch(self, compiled: Launched, programs: int, stream: int, arguments: Sequence[Any]) -> None:
        """Record the launch of a compiled kernel; without a record if it cannot be repeated by native code."""
        try:
            launch = compiled.kernel_launch
            image, offsets, places = packed(launch.types, arguments)
        except (TypeError, KeyError, AttributeError, struct.error):  # Triton passes arguments in another way
            self.complete = False
            return
        addresses = [self.address(at, value, is_map=is_map) for at, value, is_map in places]
        fields = (
            *(launch.function, programs, 32 * launch.warps, launch.shared, launch.ctas),
            *(launch.dependent, launch.cooperative, image, tuple(offsets)),
        )
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
        """Record a copy of contiguous bytes."""
        addresses = self.address(0, target), self.address(8, source)
        text = f"copy {addresses[1]} -> {addresses[0]}, {size} bytes"
        self.add(COPY, stream, (target, source, size), addresses, text)

    def copy_rows(self, rows: Memcpy2D, stream: int) -> None:
        """Record a copy of rows."""
        addresses = (
            self.address(Memcpy2D.out_address.offset, rows.out_address),
            self.address(Memcpy2D.x_address.offset, rows.x_address),
        )
        text = f"copy {addresses[1]} -> {addresses[0]}, {rows.height} rows of {rows.width} bytes"
        self.add(ROWS, stream, (bytes(rows),), addresses, text)

    def record(self, event: int, stream: int) -> None:
        """Record that an event is recorded on a stream."""
        self.add(RECORD, stream, (event,), (), f"record event {event:#x}")

    def wait(self, event: int, stream: int) -> None:
        """Record that a stream waits for an event."""
        self.add(AWAIT, stream, (event,), (), f"wait for event {event:#x}")
