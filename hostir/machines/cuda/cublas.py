"""Private streams for cuBLAS during captures, so that graphs of different executors never share a workspace.

For a product of few tiles, cuBLAS uses split-K and adds up the parts in a workspace. torch has one workspace for each
stream on which it calls cuBLAS, also during a capture, and the graph keeps the workspace's address. All graphs are
captured on the same stream, unless the caller names another one. If two such graphs are replayed at the same time on
two streams, they corrupt each other's parts [PyTorch 2026]. A replayed graph and eager work on the stream of its
capture corrupt each other's parts, too.

So during a capture, an executor issues its products to private streams, one for each stream of its program. For each
product, the private stream forks from the program's stream and joins that stream again. This adds edges to the graph,
but no nodes.

- [PyTorch 2026] pytorch/pytorch issue 193402, *Multiple separate CUDA graphs recorded on the same stream implicitly
  share memory*.
"""

from __future__ import annotations

import contextlib

import torch

from hostir.kernels.repeats import Again, Kernel
from hostir.machines.cuda.streams import current, own_stream


class CublasStreams:
    """The private streams on which cuBLAS runs during captures, for one stream of an executor.

    Args:
        device: this rank's device.
        priority: the expected priority of the executor's stream.
    """

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device = device
        self.fork, self.join = torch.cuda.Event(), torch.cuda.Event()
        # A node of a graph has the priority of its stream, so there is one private stream for each priority.
        self.streams = {priority: own_stream(self, device, priority, products=True)}

    def wrap(self, kernel: Kernel) -> Kernel:
        """Return a kernel that calls `kernel`. During captures, it calls `kernel` on a private stream."""

        def call(*tensors: torch.Tensor | None, **options: object) -> Again | None:
            if not torch.cuda.is_current_stream_capturing():
                return kernel(*tensors, **options)
            outside = current(self.device)
            if (inside := self.streams.get(outside.priority)) is None:
                inside = own_stream(self, self.device, outside.priority, products=True)
                self.streams[outside.priority] = inside
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

    def rejoin(self, inside: torch.cuda.Stream, outside: torch.cuda.Stream) -> None:
        self.join.record(inside)
        self.join.wait(outside)
