"""Small kernels that set flags: a signal to a peer, and the reset of all flags at the end of a call.

A stream can raise a flag without an SM, by a memory operation. But the operation waits until everything that its GPU is
sending to peers has arrived. So it cannot overlap a copy, and takes 3 us between two copies on an H200. The signal
kernel waits only for the earlier work of its stream, and copies of other streams go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from hostir.kernels.devices import (
    INTERPRETED,
    Compiled,
    bind_thread,
    launching,
    load,
)


@triton.jit(do_not_specialize=["flag", "epoch"])
def _signal(flag, epoch):
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), epoch.to(tl.int64), sem="release", scope="sys")


# Compiled signal and push kernels of all plans, by their device and everything that they are specialized for.
_compiled: dict[tuple[object, ...], Compiled] = {}


class SignalKernel:
    """A kernel that sets an int64 flag to `epoch`, with a release.

    `flag` is the address of the flag, usually in a peer's memory.
    """

    def __init__(self, device: torch.device, flag: int, epoch: int) -> None:
        self.device, self.arguments = device, (flag, epoch)
        key = device, *(n.bit_length() > 31 for n in self.arguments)  # Triton passes larger numbers in 64 bits
        self.compiled = loaded(key, device, _signal, self.arguments, {"num_warps": 1})

    def __call__(self, stream: torch.cuda.Stream | None) -> None:
        """Launch the kernel on a stream. In the interpreter, `stream` is None."""
        if self.compiled is None or stream is None:
            with launching(self.device):
                _signal[(1,)](*self.arguments, num_warps=1)
            return
        bind_thread(self.device)
        self.compiled.launch(1, stream.cuda_stream, self.arguments)


def loaded(
    key: tuple[object, ...], device: torch.device, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]
) -> Compiled | None:
    """Return the compiled kernel with this key; compile and load it first if necessary. Return None in the interpreter.

    `key` holds the device and everything that the kernel is specialized for. `arguments` and `options` are as in
    `load`.
    """
    if key in _compiled or INTERPRETED:
        return _compiled.get(key)
    with launching(device):
        compiled = load(kernel, arguments, options)
    return None if compiled is None else _compiled.setdefault(key, compiled)


@triton.jit(do_not_specialize=["flag_count", "credit_count"])
def _reset_flags(flags, credits, flag_count, credit_count, FLAGS: tl.constexpr, CREDITS: tl.constexpr):
    """Set the int64 at each address in `flags` to 0, then add 1 to the int64 at each address in `credits`."""
    number = tl.arange(0, FLAGS)
    address = tl.load(flags + number, mask=number < flag_count, other=0).to(tl.pointer_type(tl.int64))
    tl.store(address, tl.zeros((FLAGS,), tl.int64), mask=number < flag_count)
    tl.debug_barrier()  # orders the stores of all threads before the release by one thread
    number = tl.arange(0, CREDITS)
    address = tl.load(credits + number, mask=number < credit_count, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_add(address, 1, mask=number < credit_count, sem="release", scope="sys")


class FlagResetKernel:
    """A kernel for the end of a call: it resets this rank's flags and then grants credits, on the current stream.

    A credit is the right of a peer to signal this rank's flags again. See hostir.machines.cuda.flow_control. A stream
    could do this without an SM, but would take almost a microsecond for each flag.

    Args:
        device: this rank's device.
        flags: addresses of int64 flags, which are set to 0.
        credits: addresses of int64 counters of peers, which are then increased by 1.
    """

    def __init__(self, device: torch.device, flags: Sequence[int], credits: Sequence[int]) -> None:
        self.device = device
        self.addresses = [torch.tensor([*row, 0], dtype=torch.int64, device=device) for row in (flags, credits)]
        sizes = len(flags), len(credits)
        self.rest = (*sizes, *(triton.next_power_of_2(max(1, size)) for size in sizes))
        self.arguments = (*(row.data_ptr() for row in self.addresses), *self.rest)
        with launching(device):
            self.compiled = load(_reset_flags, (*self.addresses, *self.rest), {"num_warps": 1})

    def __call__(self) -> None:
        """Launch the kernel on the current stream."""
        if self.compiled is None:
            with launching(self.device):
                _reset_flags[(1,)](*self.addresses, *self.rest, num_warps=1)
            return
        bind_thread(self.device)
        self.compiled.launch(1, self.compiled.stream(self.device.index), self.arguments)
