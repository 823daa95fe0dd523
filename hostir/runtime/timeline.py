"""Times of a run's operations on CUDA, from events on their streams, brought to the clock that all ranks share."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hostir.runtime.plan import CALLER, Allocate, Collective, Messages, Op, Recording, Step, Wait
from hostir.runtime.trace import Trace


def lane_of(op: Op) -> str:
    """The track of a trace that an operation belongs on."""
    if isinstance(op, Collective | Messages):
        return f"communication {op.team}"
    return "caller" if op.stream == CALLER else f"stream {op.stream}"


class Timeline:
    """Events around the operations of one plan; `collect` turns those of the latest run into events of a trace.

    A communication lasts from where it could start, the end of the earlier work on its stream, to where the first
    stream that waits for it goes on.
    """

    def __init__(self, recording: Recording, trace: Trace) -> None:
        self.recording = recording
        self.trace = trace
        self.spans: list[tuple[Op, torch.cuda.Event, torch.cuda.Event]] = []
        self.flights: dict[int, torch.cuda.Event] = {}  # by handle: where the communication ends

    def timed(self, op: Op, step: Step, streams: Sequence[torch.cuda.Stream]) -> Step:
        """The step with events before and after it."""
        if isinstance(op, Allocate):
            return step
        if isinstance(op, Wait):
            return self.ends(step, self.flights.pop(op.handle, None), streams, op.stream)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.spans.append((op, start, end))

        def begun() -> None:
            start.record(streams[op.stream])
            step()

        if isinstance(op, Collective | Messages):
            self.flights[op.handle] = end
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
        """Adds the latest run to the trace. Waits for the device."""
        torch.cuda.synchronize()
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record()
        anchor.synchronize()
        now = time.time()
        for op, start, end in self.spans:
            begin, stop = (now + anchor.elapsed_time(event) / 1e3 for event in (start, end))
            text = self.recording.text(op)
            self.trace.add(self.recording.rank, lane_of(op), text, begin, stop, op.place.rounds)
