"""Sum tensors of all ranks in one kernel and one exchange, without flags: the data themselves show that they are there.

Each rank has slots in symmetric memory, one for each rank. An empty slot is all zeros. The kernel stores this rank's
summands into its slot at every peer. Then it waits until no element of its own slots is zero, adds up the summands in
the order of the ranks, and empties the slots. The bits of an element are inverted before they are stored. So the only
element that would look like an empty slot is the NaN whose bits are all ones. Another NaN is sent in its place.

All slots exist twice, and calls use the two halves in turn. No rank can overwrite data that a peer still needs: in call
c + 2 a rank stores into the slots of call c. Before that, it received data of call c + 1 from every peer. A peer sends
these data after its call c has ended, when the slots of call c are empty. The number of the call is in device memory,
because each replay of a CUDA graph passes the same arguments.

No element needs an order relative to another element. So the kernel needs neither fences nor flags, each of which would
cost another trip over the link. NCCL's protocol LL rests on the same idea, but sends a flag with every four bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hostir.kernels.devices import INTERPRETED, Compiled, bind_thread, launching, limits, only_loads
from hostir.kernels.flags.signals import loaded
from hostir.kernels.matmul.conversions import from_float32, to_float32

FLOATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
BITS = {2: torch.int16, 4: torch.int32}  # integers, by the bytes of an element
PROGRAMS = 128  # the most programs, each on its own SM: they must run at the same time, because they wait for peers
VECTOR = 16  # bytes that a thread moves at a time
BLOCKS = 512, 16 << 10  # the least and the most bytes of a block
MAX_WARPS = 16


@triton.jit
def _send(x, slot, at, mask):
    """Store the elements `at` of `x` into a slot at a peer."""
    bits = tl.load(x + at, mask=mask, other=0)
    bits = tl.where(bits == -1, bits & ((1 << (bits.dtype.primitive_bitwidth - 1)) - 1), bits)
    tl.store(slot + at, bits ^ -1, mask=mask)


@triton.jit
def _receive(slot, at, mask):
    """Wait for the elements `at` of one of this rank's slots, and empty the slot."""
    bits = tl.load(slot + at, mask=mask, other=-1, volatile=True)
    while tl.max((bits == 0).to(tl.int32), 0) > 0:
        bits = tl.load(slot + at, mask=mask, other=-1, volatile=True)
    tl.store(slot + at, tl.zeros_like(bits), mask=mask)
    return bits ^ -1


@triton.jit(do_not_specialize=["vectors", "room"])
def low_latency_kernel(
    x,  # this rank's summands, as integers; with SCATTERS, those for each rank, one rank after another
    out,
    slots,  # a tuple of pointers: the slots of each rank
    calls,  # [PROGRAMS] of int32, all equal: the number of calls so far
    vectors,  # vectors of VECTOR bytes in `out`
    room,  # vectors in a slot
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SCATTERS: tl.constexpr,  # each rank gets a part of the sums; else every rank gets all of them
    FLOAT: tl.constexpr,  # the type of the elements
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Store this rank's summands at the peers, wait for theirs, and compute the sums. See the module."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + program)
    UNITS: tl.constexpr = 128 // FLOAT.primitive_bitwidth
    size, room = vectors * UNITS, room.to(tl.int64) * UNITS
    half = (call & 1) * RANKS * room
    number = tl.arange(0, BLOCK)
    for begin in range(program * BLOCK, size, programs * BLOCK):
        at = begin + number
        for i in tl.static_range(1, RANKS):  # ranks begin with different peers
            PEER: tl.constexpr = (RANK + i) % RANKS
            _send(x + PEER * size.to(tl.int64) * SCATTERS, slots[PEER] + half + RANK * room, at, at < size)
    tl.debug_barrier()  # no thread waits before all threads have sent
    x += RANK * size.to(tl.int64) * SCATTERS
    for begin in range(program * BLOCK, size, programs * BLOCK):
        at = begin + number
        mask = at < size
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                bits = tl.load(x + at, mask=mask, other=0)
            else:
                bits = _receive(slots[RANK] + half + rank * room, at, mask)
            summand = to_float32(bits.to(FLOAT, bitcast=True))
            if rank == 0:
                total = summand  # -0 stays -0
            else:
                total += summand
        tl.store(out + at, from_float32(total, FLOAT).to(bits.dtype, bitcast=True), mask=mask)
    for n in range(program, PROGRAMS, programs):
        tl.store(calls + n, call + 1)


class LowLatencySum:
    """A kernel that sums tensors of all ranks. A call of the object launches the kernel.

    All ranks call it in the same order, and each rank on one stream, or on streams that follow each other. The kernel
    waits for the peers without a timeout. It ends early if its slots are overwritten with anything but zeros.

    Sums are computed in float32, in the order of the ranks, and rounded once. So all ranks get the same bits.

    Args:
        device: this rank's device.
        rank: this rank.
        slots: the memory for the slots of each rank, contiguous, of the dtype of the summands, and zero at first. With
            R ranks it holds 2 R slots of the same size, the size of a result. Each slot is a multiple of 16 bytes.
        calls: an int32 tensor of PROGRAMS zeros. All kernels that use these slots share it.
        scatters: every rank gets its part of the sums, in the order of the ranks; otherwise all sums.
    """

    def __init__(
        self, device: torch.device, rank: int, slots: Sequence[torch.Tensor], calls: torch.Tensor, scatters: bool
    ) -> None:
        self.device, self.rank, self.slots, self.calls, self.scatters = device, rank, slots, calls, scatters
        self.room = slots[0].numel() * slots[0].element_size() // (2 * len(slots)) // VECTOR
        # The number of programs, the kernel, and its arguments after `out`, by the size and the alignment.
        self.launches: dict[tuple[int, bool], tuple[int, Compiled | None, tuple[object, ...]]] = {}

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Launch the kernel on the current stream. Within `loading`, only load it. Nothing is sent if `out` is empty.

        `x` and `out` are contiguous, and may be the same memory without `scatters`. `x` has the size of `out`, or with
        `scatters` the size of all results. `out` is a multiple of 16 bytes.
        """
        size = out.numel()
        if not size:
            return
        aligned = (x.data_ptr() | out.data_ptr()) % VECTOR == 0
        if (size, aligned) not in self.launches:
            self.launches[size, aligned] = self._prepare(x, out, aligned)
        programs, compiled, arguments = self.launches[size, aligned]
        if only_loads():
            return
        if compiled is None:
            with launching(self.device):
                low_latency_kernel[(programs,)](_bits(x), _bits(out), *arguments, num_warps=1)
            return
        bind_thread(self.device)
        compiled.launch(programs, compiled.stream(self.device.index), (x.data_ptr(), out.data_ptr(), *arguments))

    def _prepare(
        self, x: torch.Tensor, out: torch.Tensor, aligned: bool
    ) -> tuple[int, Compiled | None, tuple[object, ...]]:
        """Load the kernel for results of the size of `out`. Return the number of programs, the kernel and arguments."""
        width, sms = out.element_size(), min(PROGRAMS, limits(self.device).sms)
        bytes = triton.next_power_of_2(-(-out.numel() * width // sms))
        bytes = min(max(bytes, BLOCKS[0]), BLOCKS[1])
        warps = 1 if INTERPRETED else min(max(bytes // VECTOR // 32, 1), MAX_WARPS)
        constants = self.rank, len(self.slots), self.scatters, FLOATS[out.dtype], bytes // width, PROGRAMS
        numbers = out.numel() * width // VECTOR, self.room
        slots: tuple[object, ...] = tuple(map(_bits, self.slots))
        key = self.device, "low latency", *constants, warps, aligned
        arguments = _bits(x), _bits(out), slots, self.calls, *numbers, *constants
        compiled = loaded(key, self.device, low_latency_kernel, arguments, {"num_warps": warps})
        calls: object = self.calls
        if compiled is not None:
            slots, calls = tuple(slot.data_ptr() for slot in self.slots), self.calls.data_ptr()
        return min(sms, -(-out.numel() * width // bytes)), compiled, (slots, calls, *numbers, *constants)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as integers, in one axis."""
    return x.view(-1).view(BITS[x.element_size()])
