"""cuBLAS in CUDA graphs: no two executors' graphs share a workspace.

Where the tiles of a product are few, cuBLAS divides K and adds up the parts in a workspace. torch has one workspace for
each stream that it calls cuBLAS on, in a capture too, and a graph keeps its address. Graphs captured on one stream, as
all are for which none is named, and replayed at once on two, would add up each other's parts [PyTorch 2026]. Work that
is issued eagerly to the stream of a capture shares it as well.

So in a capture the products of an executor go to streams that nobody else has, one for each stream of its program. They
fork from the stream that they belong to and join it: edges, which a graph has anyway, and no nodes.

- [PyTorch 2026] pytorch/pytorch issue 193402, *Multiple separate CUDA graphs recorded on the same stream implicitly
  share memory*.
"""

from __future__ import annotations

import contextlib

import torch

from hostir.runtime.kernels.kernel import Again, Kernel
from hostir.runtime.streams import current, own_stream


class Apart:
    """What becomes of the products that one stream of an executor gives cuBLAS.

    Args:
        device: this rank's.
        priority: of the stream, as far as is known now.
    """

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device = device
        self.fork, self.join = torch.cuda.Event(), torch.cuda.Event()
        # By priority, as a node of a graph has its stream's.
        self.streams = {priority: own_stream(self, device, priority, products=True)}

    def wrapped(self, kernel: Kernel) -> Kernel:
        """A kernel of cuBLAS that does as is said above."""

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
                with contextlib.suppress(RuntimeError):  # what came first is the reason
                    self.rejoin(inside, outside)
                raise
            self.rejoin(inside, outside)
            return again

        return call

    def rejoin(self, inside: torch.cuda.Stream, outside: torch.cuda.Stream) -> None:
        self.join.record(inside)
        self.join.wait(outside)
