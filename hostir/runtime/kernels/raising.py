"""A peer's flag, raised by one small kernel.

A stream can raise it without an SM, but only once all that its GPU has under way to peers has arrived; so it cannot do
so beside a copy, and between two copies it costs 3 us on an H200. This kernel releases what came before it on its own
stream, and lets copies of other streams go on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hostir.runtime.kernels.launch import INTERPRETED, Compiled, bind_thread, launching


@triton.jit(do_not_specialize=["flag", "epoch"])
def _raise(flag, epoch):
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), epoch.to(tl.int64), sem="release", scope="sys")


class Raising:
    """What sets the int64 at the address `flag` to `epoch`."""

    def __init__(self, device: torch.device, flag: int, epoch: int) -> None:
        self.device, self.arguments = device, (flag, epoch)
        self.compiled: Compiled | None = None

    def __call__(self, stream: torch.cuda.Stream | None) -> None:
        """Launch on a stream; the interpreter knows none."""
        if self.compiled is None or stream is None:
            with launching(self.device), torch.cuda.stream(stream):
                kernel = _raise[(1,)](*self.arguments, num_warps=1)
            self.compiled = None if INTERPRETED else Compiled(kernel)
            return
        bind_thread(self.device)
        self.compiled.launch(1, stream.cuda_stream, self.arguments)
