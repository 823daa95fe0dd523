"""Calls that run beside the caller's own work: handles to wait for, and on CUDA the streams that they run on.

A call forks from the caller's stream to a stream of the executor's own, and `wait` joins the two again. The caller's
allocator knows nothing of that stream. So the handle keeps the tensors that the call uses until a wait has ordered the
caller's stream behind it; where no wait did, the allocator is told of the other stream when the handle goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from hostir.ir.source import error, user_span
from hostir.machines.cuda.driver import capture_id
from hostir.machines.cuda.streams import current, own_stream


class Started:
    """A call that `Executor.start` has started."""

    def __init__(self, outputs: tuple[Any, ...]) -> None:
        self._outputs = outputs

    def wait(self) -> tuple[Any, ...]:
        """Return the outputs, as the call itself would; on CUDA the current stream waits for them, the host does not.

        Later waits return the same tensors; on another stream, that one waits too. A call that was started within a
        capture into a CUDA graph is waited for within it, any other outside. Raises HostIRError otherwise.
        """
        return self._outputs


class StartedCall(Started):
    """A call on a stream beside the caller's.

    Args:
        outputs: the outputs of the call.
        device: the device of the streams.
        caller, side: the stream that it was started on, and the stream that it runs on.
        done: an event that is recorded after the call.
        held: the tensors of the caller that it uses.
        allocated: the outputs that it has allocated.
    """

    def __init__(
        self,
        outputs: tuple[Any, ...],
        device: torch.device,
        caller: torch.cuda.Stream,
        side: torch.cuda.Stream,
        done: torch.cuda.Event,
        held: Sequence[torch.Tensor],
        allocated: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(outputs)
        self._device, self._caller, self._side, self._done = device, caller, side, done
        self._held, self._allocated = held, allocated
        self._capture = _capture(caller)  # its number; 0 if outside
        self._waiting: torch.cuda.Stream | None = None  # the stream that waited last

    def wait(self) -> tuple[Any, ...]:
        now = current(self._device)
        if now == self._waiting:
            return self._outputs
        if self._capture != _capture(now):
            if self._capture and self._waiting is not None:  # its graph has joined it
                return self._outputs
            where = "outside the capture that it was started in"
            where = where if self._capture else "within a capture, and was started outside"
            inside = "within that capture" if self._capture else "outside any capture"
            raise error(f"a started call is waited for {where}", user_span(), expected=f"a wait {inside}")
        self._done.wait(now)
        for x in self._allocated:  # in the allocator's memory for the side stream
            x.record_stream(now)
        if now == self._caller:
            self._held = ()
        self._waiting = now
        return self._outputs

    def __del__(self) -> None:
        if not self._held and self._waiting is not None:
            return
        with contextlib.suppress(Exception):  # CUDA may have ended
            if self._waiting is None and self._capture and capture_id(self._caller) == self._capture:
                self._done.wait(self._caller)  # else the capture could not end
            for x in self._held:
                x.record_stream(self._side)


def _capture(now: torch.cuda.Stream) -> int:
    """Return the number of the capture that the current stream is part of; 0 outside captures."""
    return capture_id(now) if torch.cuda.is_current_stream_capturing() else 0


class SideStreams:
    """The streams on which an executor's started calls run: one within captures, one outside.

    What is issued to a stream that is part of a capture is captured, whichever thread issues it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last: torch.cuda.Event | None = None  # recorded after the latest call outside captures

    @cached_property
    def outside(self) -> torch.cuda.Stream:
        return own_stream(self, self.device, priority=0, products=True)

    @cached_property
    def inside(self) -> torch.cuda.Stream:
        return own_stream(self, self.device, priority=0)

    def start(self, call: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], out: Any) -> Started:
        """Make a call on a stream that waits for the current one."""
        caller = current(self.device)
        capturing = torch.cuda.is_current_stream_capturing()
        side = self.inside if capturing else self.outside
        done = torch.cuda.Event()
        side.wait_stream(caller)
        torch.cuda.set_stream(side)
        try:
            outputs = call(*inputs, out=out)
            done.record(side)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what was issued uses the caller's tensors
                caller.wait_stream(side)
            raise
        finally:
            torch.cuda.set_stream(caller)
        self.last = self.last if capturing else done
        held = _tensors(inputs) if out is None else [*_tensors(inputs), *_tensors(outputs)]
        return StartedCall(outputs, self.device, caller, side, done, held, _tensors(outputs) if out is None else [])


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]
