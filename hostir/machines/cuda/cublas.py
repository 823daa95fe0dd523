"""Private streams for cuBLAS during captures, so that graphs of different executors never share a workspace.

For a product of few tiles, cuBLAS uses split-K and adds up the parts in a workspace. torch has one workspace for each
stream on which it calls cuBLAS, also during a capture, and the graph keeps the workspace's address. All graphs are
captured on the same stream, unless the caller names another one. If two such graphs are replayed at the same time on
two streams, they corrupt each other's parts [PyTorch 2026]. A replayed graph and eager work on the stream of its
capture corrupt each other's parts, too.

So during a capture, an executor issues its products to private streams, one for each stream of its program. For each
product, the private stream forks from the program's stream and joins that stream again. This adds edges to the graph,
but no nodes.

torch never frees a workspace, of 32 MiB on an H100. The graphs of trials are replayed one after another by one thread,
and end before the trial does. So all trials of a thread share their private streams.

- [PyTorch 2026] pytorch/pytorch issue 193402, *Multiple separate CUDA graphs recorded on the same stream implicitly
  share memory*.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from hostir.kernels.repeats import Again, Kernel
from hostir.machines.cuda.streams import current, own_stream


class _Trials(threading.local):
    """The private streams of a thread's trials, by device, stream of the program and priority."""

    def __init__(self) -> None:
        self.streams: dict[tuple[torch.device, int, int], torch.cuda.Stream] = {}
        self.capture = False

    def stream(self, device: torch.device, number: int, priority: int) -> torch.cuda.Stream:
        key = device, number, priority
        if key not in self.streams:
            self.streams[key] = own_stream(self, device, priority, products=True)
        return self.streams[key]


_trials = _Trials()


@contextlib.contextmanager
def captured_for_a_trial() -> Iterator[None]:
    """Within this context, captures of this thread call cuBLAS on the streams that all its trials share.

    Such graphs must not run at the same time, and must end before the thread captures another one.
    """
    _trials.capture = True
    try:
        yield
    finally:
        _trials.capture = False


class CublasStreams:
    """The private streams on which cuBLAS runs during captures, for one stream of an executor.

    Args:
        device: this rank's device.
        number: the number of the stream in the program.
        priority: the expected priority of the executor's stream.
    """

    def __init__(self, device: torch.device, number: int, priority: int) -> None:
        self.device = device
        self.number = number
        self.fork, self.join = torch.cuda.Event(), torch.cuda.Event()
        # A node of a graph has the priority of its stream, so there is one private stream for each priority.
        self.streams = {priority: own_stream(self, device, priority, products=True)}

    def wrap(self, kernel: Kernel) -> Kernel:
        """Return a kernel that calls `kernel`. During captures, it calls `kernel` on a private stream."""

        def call(*tensors: torch.Tensor | None, **options: object) -> Again | None:
            if not torch.cuda.is_current_stream_capturing():
                return kernel(*tensors, **options)
            outside = current(self.device)
            inside = self.inside(outside.priority)
            self.fork.record(outside)
            self.fork.wait(inside)
            try:
                with torch.cuda.stream(inside):
                    again = kernel(*tensors, **options)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # report the first failure
                    self.rejoin(inside, outside)
                raise
            self.rejoin(inside, outside)
            return again

        return call

    def inside(self, priority: int) -> torch.cuda.Stream:
        """Return the private stream with a priority for the capture that is under way."""
        if _trials.capture:
            return _trials.stream(self.device, self.number, priority)
        if priority not in self.streams:
            self.streams[priority] = own_stream(self, self.device, priority, products=True)
        return self.streams[priority]

    def rejoin(self, inside: torch.cuda.Stream, outside: torch.cuda.Stream) -> None:
        self.join.record(inside)
        self.join.wait(outside)
