"""Inputs that need no copy: the places in symmetric memory that a program would copy them to."""

from __future__ import annotations

from hostir.runtime.extents import extents, overlap
from hostir.runtime.plan import NONE, Collective, Compute, Copy, Messages, Op, Recording, Symmetric
from hostir.runtime.symmetric import SharedMemory


def places(recording: Recording, memory: SharedMemory | None) -> tuple[int, ...]:
    """For each input the register of the place to which one copy takes all of it; NONE where there is none.

    Nor is there one in a buffer that peers read: they may be at it until this rank's next call waits for them, and the
    caller writes before. Nor where anything else is written: it would be lost, or the input.
    """
    found = dict.fromkeys(recording.inputs, NONE)
    if memory is None:
        return tuple(found.values())
    me = recording.rank
    own = {op.out: (op.name, op.rounds) for op in recording.ops if isinstance(op, Symmetric) and op.rank == me}
    at = extents(recording)
    writes = [(home, at[r]) for op in recording.ops for r in _written(op) if (home := own.get(recording.buffers[r]))]
    writes += [((n, rounds), (low, high)) for o in memory.offers for n, rounds, r, low, high in o.touches if r == me]
    for op in recording.ops:
        home = own.get(recording.buffers[op.out]) if isinstance(op, Copy) else None
        if isinstance(op, Copy) and op.x in found and home is not None and (*home, me) not in memory.read:
            alone = sum(home == place and overlap(at[op.out], [extent]) for place, extent in writes) == 1
            found[op.x] = op.out if alone else found[op.x]
    return tuple(found.values())


def _written(op: Op) -> tuple[int, ...]:
    """The registers that an operation writes."""
    if isinstance(op, Copy | Compute | Collective):
        return (op.out,)
    return tuple(register for register, _ in op.receives) if isinstance(op, Messages) else ()
