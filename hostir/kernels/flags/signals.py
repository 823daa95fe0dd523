"""Small kernels that set flags: a signal to a peer, and the end of a call.

A stream can raise a flag without an SM, by a memory operation. But the operation waits until everything that its GPU is
sending to peers has arrived. So it cannot overlap a copy, and takes 3 us between two copies on an H200. The signal
kernel waits only for the earlier work of its stream, and copies of other streams go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from hostir.kernels.devices import (
    INTERPRETED,
    Compiled,
    bind_thread,
    launching,
    load,
    only_loads,
)

if TYPE_CHECKING:
    from hostir.kernels.flags.ready import ReadyFlags


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


@triton.jit
def _end_call(table, SIZE: tl.constexpr):
    """Set the int64 at each address in the first half of a table to 0; then add 1 at each address in the second half.

    Each half has SIZE addresses. An address of 0 stands for none.
    """
    number = tl.arange(0, SIZE)
    flags, credits = tl.load(table + number), tl.load(table + SIZE + number)
    tl.store(flags.to(tl.pointer_type(tl.int64)), tl.zeros((SIZE,), tl.int64), mask=flags != 0)
    tl.debug_barrier()  # orders the stores of all threads before the release by one thread
    tl.atomic_add(credits.to(tl.pointer_type(tl.int64)), 1, mask=credits != 0, sem="release", scope="sys")


@triton.jit
def end_call(ending, SIZE: tl.constexpr):
    """Count this program as done. The last program of the launch ends the call, as `CallEnd` does."""
    tl.debug_barrier()  # all reads of this program come before the arrival that one thread signals
    if tl.atomic_add(ending.arrived, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(ending.arrived, 0)
        _end_call(ending.table, SIZE)


class Ending(NamedTuple):
    """The fields of a `CallEnd` that a kernel needs: its table and its counter."""

    table: Any
    arrived: Any

    @classmethod
    def of(cls, ready: ReadyFlags | None, pointer: Callable[[torch.Tensor], Any]) -> Ending | None:
        """Return the argument for a kernel that waits for `ready`. `pointer` converts a tensor to an argument."""
        end = None if ready is None else ready.ending
        return None if end is None else cls(pointer(end.table), pointer(end.arrived))


class CallEnd:
    """The end of a call: this rank's flags are reset, and then credits are granted.

    A credit is the right of a peer to signal this rank's flags again. See hostir.machines.cuda.flow_control. Either the
    last kernel that waits for flags does this when it ends, or a call of this object launches a kernel of its own on
    the current stream. A stream could do it without an SM, but would take almost a microsecond for each flag.

    Args:
        device: this rank's device.
        flags: addresses of int64 flags, which are set to 0.
        credits: addresses of int64 counters of peers, which are then increased by 1.

    Fields:
        size: the number of addresses in each half of `table`, see `_end_call`.
        arrived: the number of programs of a launch that have ended; 0 between launches.
    """

    def __init__(self, device: torch.device, flags: Sequence[int], credits: Sequence[int]) -> None:
        self.device = device
        self.size = triton.next_power_of_2(max(len(flags), len(credits), 1))
        rows = [[*row, *[0] * (self.size - len(row))] for row in (flags, credits)]
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        with launching(device):
            self.compiled = load(_end_call, (self.table, self.size), {"num_warps": 1})

    def __call__(self) -> None:
        """Launch the kernel on the current stream. Within `loading`, do nothing: the kernel is loaded already."""
        if only_loads():
            return
        if self.compiled is None:
            with launching(self.device):
                _end_call[(1,)](self.table, self.size, num_warps=1)
            return
        bind_thread(self.device)
        self.compiled.launch(1, self.compiled.stream(self.device.index), (self.table.data_ptr(), self.size))
