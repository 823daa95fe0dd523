"""Buffers of an unrolled program: which inputs need no copy, and how long buffers live."""

from __future__ import annotations

from dataclasses import dataclass, field

from hostir.runtime.symmetric import SharedMemory
from hostir.runtime.unroll import (
    CALLER,
    NONE,
    AllocateOp,
    CollectiveOp,
    ComputeOp,
    CopyOp,
    FreeOp,
    MarkOp,
    MessagesOp,
    Op,
    SymmetricOp,
    SynchronizeOp,
    UnrolledProgram,
    WaitOp,
    extents,
    overlap,
)

# Inputs in place ------------------------------------------------------------------------------------------------------
# Inputs that need no copy: the caller can write them where a program would copy them, in symmetric memory.


def places(unrolled: UnrolledProgram, memory: SharedMemory | None) -> tuple[int, ...]:
    """Return for each input the register of the memory to which one copy takes all of it; NONE if there is none.

    Memory that peers read does not count: they may read it until this rank's next call waits for them, and the caller
    writes before. Nor does memory that anything else writes: the result or the input would be lost.
    """
    found = dict.fromkeys(unrolled.inputs, NONE)
    if memory is None:
        return tuple(found.values())
    me = unrolled.rank
    own = {op.out: (op.name, op.rounds) for op in unrolled.ops if isinstance(op, SymmetricOp) and op.rank == me}
    at = extents(unrolled)
    writes = [(home, at[r]) for op in unrolled.ops for r in _written(op) if (home := own.get(unrolled.buffers[r]))]
    writes += [((n, rounds), (low, high)) for o in memory.offers for n, rounds, r, low, high in o.touches if r == me]
    for op in unrolled.ops:
        home = own.get(unrolled.buffers[op.out]) if isinstance(op, CopyOp) else None
        if isinstance(op, CopyOp) and op.x in found and home is not None and (*home, me) not in memory.read:
            alone = sum(home == place and overlap(at[op.out], [extent]) for place, extent in writes) == 1
            found[op.x] = op.out if alone else found[op.x]
    return tuple(found.values())


def _written(op: Op) -> tuple[int, ...]:
    """Return the registers that an operation writes."""
    if isinstance(op, CopyOp | ComputeOp | CollectiveOp):
        return (op.out,)
    return tuple(register for register, _ in op.receives) if isinstance(op, MessagesOp) else ()


# Lifetimes ------------------------------------------------------------------------------------------------------------
# Buffers that can be returned to the allocator when the host drops them, and those that must wait for a stream.
#
# An allocator of CUDA memory hands a dropped buffer to the next allocation on the stream it came from. That is safe
# if that stream has already waited for every stream that used the buffer. One pass over the operations proves it, or
# names the streams it cannot prove it for; they are then marked on the tensor (`record_stream`), at some cost in
# memory. Programs that lowering emits allocate on the caller's stream and join all workers to it, so they pass; texts
# edited by hand may not.


def late_streams(unrolled: UnrolledProgram) -> dict[int, tuple[int, ...]]:
    """Return, for each buffer that needs it, the streams that may still use it when the host drops it.

    Buffers are dropped where the program frees them, else at the end of the run. Outputs go to the caller, who uses
    them on its stream; inputs come from the caller, who drops them after the run.
    """
    scan = _Scan(unrolled)
    for op in unrolled.ops:
        scan.pass_over(op)
    for buffer in scan.home.keys() - scan.dropped:
        scan.drop(buffer)
    for output in unrolled.outputs:
        buffer = unrolled.buffers[output]
        if scan.home.get(buffer, CALLER) != CALLER:
            scan.late[buffer] = tuple(sorted({*scan.late.get(buffer, ()), CALLER}))
    return scan.late


def unjoined(unrolled: UnrolledProgram) -> tuple[int, ...]:
    """Return the streams that the caller's stream has not waited for at the end of the run."""
    scan = _Scan(unrolled)
    for op in unrolled.ops:
        scan.pass_over(op)
    known = scan.seen.get(CALLER, {})
    return tuple(sorted(s for s, clock in scan.seen.items() if s != CALLER and known.get(s, 0) < clock.get(s, 0)))


@dataclass
class _Scan:
    """Vector clocks: `seen[s][t]` counts operations of stream t that are over before the next of stream s begins."""

    unrolled: UnrolledProgram
    seen: dict[int, dict[int, int]] = field(default_factory=dict)
    home: dict[int, int] = field(default_factory=dict)  # the stream a buffer was allocated on
    uses: dict[int, dict[int, int]] = field(default_factory=dict)  # of a buffer: the last operation of each stream
    flights: dict[int, tuple[list[int], dict[int, int]]] = field(default_factory=dict)  # by handle: buffers, clock
    flying: dict[int, int] = field(default_factory=dict)  # by handle: the stream, until something waits
    late: dict[int, tuple[int, ...]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.home = dict.fromkeys(self.unrolled.inputs, CALLER)

    def pass_over(self, op: Op) -> None:
        here = self.seen.setdefault(op.stream, {})
        here[op.stream] = here.get(op.stream, 0) + 1
        if isinstance(op, AllocateOp):
            self.home[op.out] = op.stream
        elif isinstance(op, ComputeOp):
            self.use(op.touches, op.stream)
        elif isinstance(op, CopyOp):
            self.use((op.x, op.out), op.stream)
        elif isinstance(op, CollectiveOp):
            self.launch(op.handle, (op.x, op.out), op.stream)
        elif isinstance(op, MessagesOp):
            self.launch(op.handle, tuple(r for r, _ in (*op.sends, *op.receives)), op.stream)
        elif isinstance(op, MarkOp):
            self.launch(op.handle, (), op.stream)
        elif isinstance(op, WaitOp):
            self.flying.pop(op.handle, None)
            buffers, before = self.flights[op.handle]
            self.catch_up(op.stream, before)
            self.use(buffers, op.stream)
        elif isinstance(op, SynchronizeOp):
            self.catch_up(op.stream, self.seen.get(op.other, {}))
        elif isinstance(op, FreeOp):
            self.drop(op.buffer)

    def use(self, registers: tuple[int, ...] | list[int], stream: int) -> None:
        for register in registers:
            self.uses.setdefault(self.unrolled.buffers[register], {})[stream] = self.seen[stream][stream]

    def launch(self, handle: int, registers: tuple[int, ...], stream: int) -> None:
        """Start a communication: a stream that waits for it follows what it started after, and uses its buffers."""
        self.use(registers, stream)
        self.flying[handle] = stream
        self.flights[handle] = ([self.unrolled.buffers[r] for r in registers], dict(self.seen[stream]))

    def catch_up(self, stream: int, other: dict[int, int]) -> None:
        here = self.seen[stream]
        for name, count in other.items():
            here[name] = max(here.get(name, 0), count)

    def drop(self, buffer: int) -> None:
        self.dropped.add(buffer)
        home = self.home[buffer]
        known = self.seen.get(home, {})
        late = {s for s, last in self.uses.get(buffer, {}).items() if s != home and known.get(s, 0) < last}
        late |= {stream for handle, stream in self.flying.items() if buffer in self.flights[handle][0]}
        if late and buffer != NONE:
            self.late[buffer] = tuple(sorted(late))
