"""Calls that run at the same time as the caller's other work.

Such a call has a handle to wait for. On CUDA it runs on a side stream of the executor. The side stream first waits for
the caller's stream, and `wait` makes the caller's stream wait for the side stream. torch's allocator does not know that
the side stream uses the caller's tensors. So the handle keeps references to these tensors until the caller's stream has
waited. If it never waits, the handle reports the side stream to the allocator (`record_stream`) when the handle is
destroyed.
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
        """Return the outputs of the call. On CUDA the current stream waits for them, but the host does not.

        A later `wait` returns the same tensors. If it is called on another stream, that stream waits, too. If the call
        was started during the capture of a CUDA graph, wait for it during the same capture. Wait for any other call
        outside captures. Raises HostIRError otherwise.
        """
        return self._outputs


class StartedCall(Started):
    """A started call on CUDA.

    Args:
        outputs: the outputs of the call.
        device: the device of the streams.
        caller: the stream that the call was started on.
        side: the stream that the call runs on.
        done: an event that is recorded after the call.
        held: the caller's tensors that the call uses.
        allocated: the outputs that the call has allocated.
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
        self._capture = _capture(caller)  # the number of the capture; 0 outside captures
        self._waiting: torch.cuda.Stream | None = None  # the stream that waited last

    def wait(self) -> tuple[Any, ...]:
        now = current(self._device)
        if now == self._waiting:
            return self._outputs
        if self._capture != _capture(now):
            if self._capture and self._waiting is not None:  # a stream of the captured graph has waited for it
                return self._outputs
            where = "outside the capture that it was started in"
            where = where if self._capture else "within a capture, and was started outside"
            inside = "within that capture" if self._capture else "outside any capture"
            raise error(f"a started call is waited for {where}", user_span(), expected=f"a wait {inside}")
        self._done.wait(now)
        for x in self._allocated:  # the allocator knows only that the side stream uses them
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
                self._done.wait(self._caller)  # a capture can end only after all its streams have joined
            for x in self._held:
                x.record_stream(self._side)


def _capture(now: torch.cuda.Stream) -> int:
    """Return the number of the capture that the stream `now` is part of; 0 outside captures."""
    return capture_id(now) if torch.cuda.is_current_stream_capturing() else 0


class SideStreams:
    """The two side streams of an executor's started calls: one for calls within captures, one for all other calls.

    One stream is not enough. While a capture includes a stream, CUDA captures all work on this stream, including the
    work of other threads.
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
        """Make a call on a side stream, after the work of the current stream. Return the handle of the call."""
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
            with contextlib.suppress(RuntimeError):  # work that was already issued uses the caller's tensors
                caller.wait_stream(side)
            raise
        finally:
            torch.cuda.set_stream(caller)
        self.last = self.last if capturing else done
        held = _tensors(inputs) if out is None else [*_tensors(inputs), *_tensors(outputs)]
        return StartedCall(outputs, self.device, caller, side, done, held, _tensors(outputs) if out is None else [])


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]
