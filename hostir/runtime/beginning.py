"""Where on CUDA a call begins for its streams: none shall look at a flag, or raise one, before the last call's end."""

from __future__ import annotations

from collections.abc import Callable

from hostir.runtime.plan import (
    CALLER,
    Barrier,
    Compute,
    Copy,
    Delay,
    Op,
    Recording,
    Signal,
    Synchronize,
    Wait,
    WaitSignal,
)

Touches = Callable[[Op], bool]  # whether an operation touches a peer's memory


def beginning(recording: Recording, peers: Touches) -> tuple[bool, bool]:
    """Whether a stream uses flags without having waited for the caller's; and whether permits must be taken at once.

    Permits are taken by the first stream that touches a peer, and others that do so wait for it. That is wrong where
    it may be held up by then, by a flag or for want of an SM, and the program says nothing of this to the others.
    """
    forked, held, behind = {CALLER}, set[int](), set[int]()  # behind: what comes after the first touch of a peer
    loose = late = others = False
    sms = any(isinstance(op, Compute) and op.ready is not None for op in recording.ops)
    for op in recording.ops:
        if isinstance(op, Synchronize):
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
    return isinstance(op, Signal | WaitSignal) or (isinstance(op, Compute) and op.ready is not None) or peers(op)


def _holds(op: Op, sms: bool) -> bool:
    """Whether an operation may hold its stream up: `sms` where a kernel that waits may have taken them all."""
    if isinstance(op, Compute):
        return op.ready is not None or sms
    if isinstance(op, Signal):
        return sms and op.sms > 0
    return isinstance(op, Wait | WaitSignal | Barrier) or (sms and isinstance(op, Copy | Delay))
