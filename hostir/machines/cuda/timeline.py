"""Measure the times of a run's operations on CUDA by events on streams. All ranks convert the times to one clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hostir.machines.binding import Step
from hostir.machines.trace import Trace
from hostir.plan.operations import Op
from hostir.plan.unrolled import UnrolledProgram


class Timeline:
    """CUDA events around the operations of one plan. `collect` adds the times of the latest run to a trace.

    The trace shows a communication from the end of the earlier work on its stream, because it could start then. The bar
    ends when the first stream that waits for the communication continues.
    """

    def __init__(self, unrolled: UnrolledProgram, trace: Trace) -> None:
        self.unrolled = unrolled
        self.trace = trace
        self.spans: list[tuple[Op, torch.cuda.Event, torch.cuda.Event]] = []
        self.flights: dict[int, torch.cuda.Event] = {}  # by handle: the end of the communication

    def timed(self, op: Op, step: Step, streams: Sequence[torch.cuda.Stream], inline: bool) -> Step:
        """Return a step that runs `step` and records an event before it and after it.

        The event after a communication is recorded by the first step that waits for it. `inline` is True for a
        communication for which no step waits, because it runs on the operation's stream.
        """
        if op.defines:
            return step
        if op.awaits:
            return self.ends(step, self.flights.pop(op.awaits, None), streams, op.stream)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.spans.append((op, start, end))

        def begun() -> None:
            start.record(streams[op.stream])
            step()

        if op.by_group and not inline:
            self.flights[op.starts] = end
            return begun
        return self.ends(begun, end, streams, op.stream)

    def ends(self, step: Step, end: torch.cuda.Event | None, streams: Sequence[torch.cuda.Stream], stream: int) -> Step:
        if end is None:  # a second stream that waits for the same communication
            return step

        def ended() -> None:
            step()
            end.record(streams[stream])

        return ended

    def collect(self) -> None:
        """Add the times of the latest run to the trace. Waits for the device."""
        torch.cuda.synchronize()
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record()
        anchor.synchronize()
        now = time.time()
        for op, start, end in self.spans:
            begin, stop = (now + anchor.elapsed_time(event) / 1e3 for event in (start, end))
            text = self.unrolled.text(op)
            self.trace.add(self.unrolled.rank, op.lane, text, begin, stop, op.place.rounds)
