"""The end of a call, by one small kernel: this rank's flags go back to 0, and then every peer's count of permits rises.

See hostir.runtime.handover. A stream could do it without an SM, but takes almost a microsecond for each flag.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hostir.runtime.kernels.launch import INTERPRETED, Compiled, bind_thread, launching


@triton.jit(do_not_specialize=["flag_count", "count_count"])
def _end(flags, counts, flag_count, count_count, FLAGS: tl.constexpr, COUNTS: tl.constexpr):
    """`flags` and `counts` are rows of addresses of int64."""
    number = tl.arange(0, FLAGS)
    address = tl.load(flags + number, mask=number < flag_count, other=0).to(tl.pointer_type(tl.int64))
    tl.store(address, tl.zeros((FLAGS,), tl.int64), mask=number < flag_count)
    tl.debug_barrier()  # the release of one thread then covers what all of them have stored
    number = tl.arange(0, COUNTS)
    address = tl.load(counts + number, mask=number < count_count, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_add(address, 1, mask=number < count_count, sem="release", scope="sys")


class Ending:
    """What ends a call on the current stream.

    Args:
        device: this rank's.
        flags: addresses of int64 to become 0.
        counts: addresses of int64, of peers, to rise by 1 afterwards.
    """

    def __init__(self, device: torch.device, flags: Sequence[int], counts: Sequence[int]) -> None:
        self.device = device
        self.addresses = [torch.tensor([*row, 0], dtype=torch.int64, device=device) for row in (flags, counts)]
        sizes = len(flags), len(counts)
        self.rest = (*sizes, *(triton.next_power_of_2(max(1, size)) for size in sizes))
        self.arguments = (*(row.data_ptr() for row in self.addresses), *self.rest)
        self.compiled: Compiled | None = None

    def __call__(self) -> None:
        if self.compiled is None:
            with launching(self.device):
                kernel = _end[(1,)](*self.addresses, *self.rest, num_warps=1)
            self.compiled = None if INTERPRETED else Compiled(kernel)
            return
        bind_thread(self.device)
        self.compiled.launch(1, self.compiled.stream(self.device.index), self.arguments)
