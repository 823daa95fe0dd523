"""Inputs that need no copy: the places in symmetric memory that a program would copy them to."""

from __future__ import annotations

from hostir.runtime.plan import NONE, Copy, Recording, Symmetric
from hostir.runtime.symmetric import SharedMemory


def places(recording: Recording, memory: SharedMemory | None) -> tuple[int, ...]:
    """For each input the register of the place to which one copy takes all of it; NONE where there is none.

    Nor is there one in a buffer that peers read: they may be at it until this rank's next call waits for them, and the
    caller writes before.
    """
    found = dict.fromkeys(recording.inputs, NONE)
    if memory is None:
        return tuple(found.values())
    me = recording.rank
    own = {op.out: (op.name, op.rounds) for op in recording.ops if isinstance(op, Symmetric) and op.rank == me}
    for op in recording.ops:
        home = own.get(recording.buffers[op.out]) if isinstance(op, Copy) else None
        if isinstance(op, Copy) and op.x in found and home is not None and (*home, me) not in memory.read:
            found[op.x] = op.out
    return tuple(found.values())
