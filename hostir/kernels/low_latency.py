"""Sum or gather tensors of all ranks in one kernel and one exchange, without flags: the data show that they are there.

Each rank has slots in symmetric memory, one for each rank. An empty slot is all zeros. The kernel stores this rank's
summands into its slot at every peer. It waits until no element of its own slots is zero, adds up the summands in the
order of the ranks, and empties the slots. It does this block by block, and sends a few blocks ahead of the block that
it sums up. So the link and the memory are busy at the same time. An all-gather does the same with the parts of the
ranks, but it stores each part in its place instead of adding them up.

The bits of an element are inverted before they are stored. So the only element that would look like an empty slot is
the NaN whose bits are all ones. Another NaN is sent in its place.

All slots exist twice, and calls use the two halves in turn. No rank can overwrite data that a peer still needs: in call
c + 2 a rank stores into the slots of call c. Before that, it received data of call c + 1 from every peer. A peer sends
these data after its call c has ended, when the slots of call c are empty. The number of the call is in device memory,
because each replay of a CUDA graph passes the same arguments.

No element needs an order relative to another element. So the kernel needs neither fences nor flags, each of which would
cost another trip over the link. NCCL's protocol LL rests on the same idea, but sends a flag with every four bytes.

The kernel can also compute what follows a sum in a transformer: it adds a residual, normalizes the rows, and quantizes
them. A program then sums complete rows. It rounds where separate kernels would store, so the results are the same up to
the order in which a norm adds up squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hostir.kernels.aten import FP8, LEAST_SCALE
from hostir.kernels.devices import INTERPRETED, Compiled, bind_thread, launching, limits, only_loads
from hostir.kernels.flags.signals import loaded
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.norm import reciprocal_rms
from hostir.kernels.quantize import limited_quotient, magnitude, scale_of

FLOATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
GATHERED = {**FLOATS, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}  # fp8 is not summed
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # integers, by the bytes of an element
PROGRAMS = 128  # the most programs, each on its own SM: they must run at the same time, because they wait for peers
VECTOR = 16  # bytes that a thread moves at a time
BLOCKS = 512, 16 << 10  # the least and the most bytes of a block
MAX_ELEMENTS = (1 << 31) - (1 << 22)  # of a slot: a step of all programs beyond its end must fit into 32 bits
MAX_WARPS, LONGEST = 16, 8192  # a longer row gets twice the warps, so that registers hold it
SECONDS_PER_POLL = 0.3e-6  # on an H200; up to 0.7e-6 if blocks are large
POLLS = 1024  # the unit in which polls are passed to the kernel
_POLLS = tl.constexpr(POLLS)
# How many blocks a program sends ahead of the one that it receives. Without an epilogue, the largest blocks of all
# programs together are 2 MiB, which take about 5 us to a peer.
IN_FLIGHT = 2
_IN_FLIGHT = tl.constexpr(IN_FLIGHT)


@triton.jit
def _sendable(x, at, mask):
    """Return the elements `at` of `x`, with another NaN in the place of the one whose bits are all ones."""
    bits = tl.load(x + at, mask=mask, other=0)
    return tl.where(bits == -1, bits & ((1 << (bits.dtype.primitive_bitwidth - 1)) - 1), bits)


@triton.jit
def _send(x, slot, at, mask):
    """Store the elements `at` of `x` into a slot at a peer."""
    tl.store(slot + at, _sendable(x, at, mask) ^ -1, mask=mask)


@triton.jit
def _receive(slot, at, mask, polls, timeout, reports):
    """Wait for the elements `at` of one of this rank's slots, and empty the slot.

    Returns the elements, and the number of polls that are left. If no polls are left, the elements that have not
    arrived are NaN. Then, if `reports` is True, the word at `timeout` becomes 1.
    """
    bits = tl.load(slot + at, mask=mask, other=-1, volatile=True)
    missing = tl.max((bits == 0).to(tl.int32), 0)
    while (missing > 0) & (polls > 0):
        bits = tl.load(slot + at, mask=mask, other=-1, volatile=True)
        missing = tl.max((bits == 0).to(tl.int32), 0)
        polls -= missing  # 0 or 1
    tl.store(timeout, 1, mask=(missing > 0) & reports)
    tl.store(slot + at, tl.zeros_like(bits), mask=mask)
    return bits ^ -1, polls


@triton.jit
def _finish_row(
    total,  # the sums of a row in float32; zeros outside the mask
    residual,  # the bits of the residual's row
    factors,  # the bits of the weight; None without a weight
    row,
    at,  # the elements of the row in the results
    mask,
    columns,
    added,
    normed,
    scales,
    quantized,
    FLOAT: tl.constexpr,
    EPS: tl.constexpr,
    LIMIT: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Add the residual to a row of rounded sums, normalize it, quantize it, and store the results: see `RowTensors`."""
    total = to_float32(from_float32(total + to_float32(residual.to(FLOAT, bitcast=True)), FLOAT))
    if added is not None:
        tl.store(added + at, from_float32(total, FLOAT).to(residual.dtype, bitcast=True), mask=mask)
    total *= reciprocal_rms(total * total, columns, EPS)
    if factors is not None:
        total *= to_float32(factors.to(FLOAT, bitcast=True))
    rounded = from_float32(total, FLOAT)
    if normed is not None:
        tl.store(normed + at, rounded.to(residual.dtype, bitcast=True), mask=mask)
    if scales is not None:
        total = to_float32(rounded)
        scale = scale_of(tl.max(magnitude(total), 0), LIMIT, LEAST)
        tl.store(scales + row, scale.to(tl.int32, bitcast=True))
        quotient = limited_quotient(total, tl.zeros_like(total) + scale, LIMIT)
        tl.store(quantized + at, from_float32(quotient, quantized.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["polls", "size", "room", "length"])
def low_latency_kernel(
    x,  # this rank's summands or its part, as integers; with SCATTERS, those for each rank, one rank after another
    out,  # the sums, or all parts; None if only the results of the epilogue are wanted
    residual,  # this and the next five: see `RowTensors`
    weight,
    added,
    normed,
    scales,
    quantized,
    slots,  # a tuple of pointers: the slots of each rank
    calls,  # [PROGRAMS] of int32, all equal: the number of calls so far
    timeouts,  # [RANKS, 2] of int64: see `LowLatency`
    polls,  # after this number times POLLS, a program gives up
    size,  # of the data that a rank sends to a peer, in UNIT elements
    room,  # vectors of VECTOR bytes in a slot
    length,  # of a row, in UNIT elements; unused without ROWS
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SCATTERS: tl.constexpr,  # each rank gets a part of the sums
    GATHERS: tl.constexpr,  # every rank gets the parts of all ranks; without SCATTERS and GATHERS, all sums
    FLOAT: tl.constexpr,  # the type of the elements
    ROWS: tl.constexpr,  # a block is a row, and the epilogue finishes it
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,  # at least the elements of a row
    EPS: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest number of the dtype of `quantized`
    LEAST: tl.constexpr,  # the least scale
    PROGRAMS: tl.constexpr,
):
    """Store this rank's data at the peers, wait for theirs, and compute or store the results. See the module."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + program)
    polls = polls.to(tl.int64) * _POLLS
    size, room = size * UNIT, room.to(tl.int64) * (128 // FLOAT.primitive_bitwidth)
    half = (call & 1) * RANKS * room
    number = tl.arange(0, BLOCK)
    step = length * UNIT if ROWS else BLOCK
    stride, place = programs * step, half + RANK * room
    distance = stride * _IN_FLIGHT
    for begin in range(program * step, tl.minimum(size, program * step + distance), stride):
        at = begin + number
        mask = number < step if ROWS else at < size
        for i in tl.static_range(1, RANKS):  # ranks begin with different peers
            of_peer = x + (RANK + i) % RANKS * size.to(tl.int64) * SCATTERS
            _send(of_peer, slots[(RANK + i) % RANKS] + place, at, mask)
    tl.debug_barrier()  # no thread waits before all threads have sent these blocks
    own = x + RANK * size.to(tl.int64) * SCATTERS
    for begin in range(program * step, size, stride):
        if size - begin > distance:
            at = begin + distance + number
            mask = number < step if ROWS else at < size
            for i in tl.static_range(1, RANKS):
                of_peer = x + (RANK + i) % RANKS * size.to(tl.int64) * SCATTERS
                _send(of_peer, slots[(RANK + i) % RANKS] + place, at, mask)
        at = begin + number
        mask = number < step if ROWS else at < size
        if ROWS:  # these loads do not wait for peers
            added_to = tl.load(residual + at, mask=mask, other=0)
            factors = None if weight is None else tl.load(weight + number, mask=mask, other=0)
        reports = polls > 0  # later blocks may also lack the data of ranks that wait for the late rank
        if GATHERS:
            tl.store(out + RANK * size.to(tl.int64) + at, _sendable(own, at, mask), mask=mask)  # as on the peers
            for i in tl.static_range(1, RANKS):
                peer = (RANK + i) % RANKS
                slot = slots[RANK] + half + peer * room
                bits, polls = _receive(slot, at, mask, polls, timeouts + 2 * peer, reports)
                tl.store(out + peer * size.to(tl.int64) + at, bits, mask=mask)
        else:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for rank in tl.static_range(RANKS):
                if rank == RANK:
                    bits = tl.load(own + at, mask=mask, other=0)
                else:
                    slot = slots[RANK] + half + rank * room
                    bits, polls = _receive(slot, at, mask, polls, timeouts + 2 * rank, reports)
                summand = to_float32(bits.to(FLOAT, bitcast=True))
                if rank == 0:
                    total = summand  # -0 stays -0
                else:
                    total += summand
            rounded = from_float32(total, FLOAT)
            if out is not None:
                tl.store(out + at, rounded.to(bits.dtype, bitcast=True), mask=mask)
            if ROWS:
                results = added, normed, scales, quantized
                row = begin // step
                total = to_float32(rounded)
                _finish_row(total, added_to, factors, row, at, mask, step, *results, FLOAT, EPS, LIMIT, LEAST)
    for n in range(program, PROGRAMS, programs):
        tl.store(calls + n, call + 1)


@dataclass(frozen=True)
class Epilogue:
    """The computations after the sums: a residual is added, and the rows are normalized and perhaps quantized.

    Fields:
        eps: as for `hostir.kernels.norm.rms_norm`.
        fp8: the name of the dtype of the quantized rows; empty if they are not quantized.
    """

    eps: float
    fp8: str = ""


class RowTensors(NamedTuple):
    """The tensors of an epilogue, contiguous, `[..., columns]`. Results that are None are not stored.

    No result shares memory with another tensor of the call, with two exceptions: `added` may be the residual, and in
    an all-reduce a result in the dtype of the summands may be the summands.

    Fields:
        residual: is added to the sums.
        weight: the factors of the columns; None if they are 1.
        added: the sums with the residual.
        normed: the normalized rows.
        scales: the scale of each row, in float32; None if the rows are not quantized.
        quantized: the quantized rows; None if they are not quantized.
    """

    residual: torch.Tensor | None
    weight: torch.Tensor | None
    added: torch.Tensor | None
    normed: torch.Tensor | None
    scales: torch.Tensor | None
    quantized: torch.Tensor | None


NO_ROWS = RowTensors(*[None] * len(RowTensors._fields))


class LowLatency:
    """A kernel that sums or gathers tensors of all ranks. A call of the object launches the kernel.

    All ranks call it in the same order, and each rank on one stream, or on streams that follow each other. If its slots
    are overwritten with 16-bit integers -32767, it ends. Then it has received NaN, in fp8 at least in every second
    element.

    Sums are computed in float32, in the order of the ranks, and rounded once. So all ranks get the same bits. Ranks may
    call kernels with different epilogues, if all programs of each kernel fit on its GPU at once.

    It gathers numbers of all dtypes in GATHERED, and sums those of all dtypes in FLOATS.

    Args:
        device: this rank's device.
        rank: this rank.
        slots: the memory for the slots of each rank, contiguous, of the dtype of the data, and zero at first. With R
            ranks it holds 2 R slots of the same size. Each slot has room for the data that a rank sends to a peer, and
            is a multiple of 16 bytes.
        calls: an int32 tensor of PROGRAMS zeros. All kernels that use these slots share it.
        timeouts: `[ranks, 2]` of int64, contiguous, perhaps in pinned host memory. If the kernel gives up waiting for a
            rank, it sets the first word of the rank to 1, and reads NaN. The slots are then useless for further calls.
        collective: `allreduce`, `reduce_scatter` or `allgather`. Parts are in the order of the ranks.
        epilogue: the computations after the sums; None if nothing follows them.
        seconds: after one to two and a half times these seconds of waiting, the kernel gives up.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        slots: Sequence[torch.Tensor],
        calls: torch.Tensor,
        timeouts: torch.Tensor,
        collective: str,
        epilogue: Epilogue | None = None,
        seconds: float = 600.0,
    ) -> None:
        assert collective in ("allreduce", "reduce_scatter", "allgather")
        assert epilogue is None or collective != "allgather"
        self.device, self.rank, self.slots, self.calls, self.collective = device, rank, slots, calls, collective
        polls = int(seconds / SECONDS_PER_POLL / POLLS)
        self.timeouts, self.polls = timeouts, min(max(polls, 1), (1 << 31) - 1)  # 32 bits hold a week
        self.epilogue = epilogue
        self.room = slots[0].numel() * slots[0].element_size() // (2 * len(slots)) // VECTOR
        # The number of programs, the kernel, and its arguments after the tensors, by the size and the alignments.
        self.launches: dict[tuple[object, ...], tuple[int, Compiled | None, tuple[object, ...]]] = {}

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None, rows: RowTensors = NO_ROWS) -> None:
        """Launch the kernel on the current stream. Within `loading`, only load it. Without results, nothing is sent.

        `x` and `out` are contiguous. In an all-reduce they have the same size, and may be the same memory. In a
        reduce-scatter, `x` has the size of all results; in an all-gather, `out` has the size of all parts. A rank sends
        a multiple of 16 bytes to a peer. With an epilogue, `out` is None if the sums themselves are not
        wanted, and `rows` are the other tensors. A program holds a row in registers.
        """
        result = out if rows.residual is None else rows.residual
        sent = x if self.collective == "allgather" else result
        assert sent is not None
        if not sent.numel():
            return
        tensors = x, out, *rows
        alignments = [None if t is None else t.data_ptr() % VECTOR == 0 for t in tensors]
        key = (sent.shape, *alignments)
        if key not in self.launches:
            self.launches[key] = self._prepare(sent, tensors, alignments)
        programs, compiled, arguments = self.launches[key]
        if only_loads():
            return
        if compiled is None:
            with launching(self.device):
                low_latency_kernel[(programs,)](*_in_one_axis(tensors), *arguments, num_warps=1)
            return
        bind_thread(self.device)
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        compiled.launch(programs, compiled.stream(self.device.index), (*addresses, *arguments))

    def _prepare(
        self, sent: torch.Tensor, tensors: Sequence[torch.Tensor | None], alignments: Sequence[bool | None]
    ) -> tuple[int, Compiled | None, tuple[object, ...]]:
        """Load the kernel. Return the number of programs, the kernel and arguments.

        `sent` is a tensor like the one that a rank sends to a peer.
        """
        width, size, columns = sent.element_size(), sent.numel(), sent.shape[-1]
        if size > MAX_ELEMENTS:
            raise ValueError(f"low_latency sends at most {MAX_ELEMENTS} elements to a rank, not {size}")
        sms, most, unit, eps, limit = min(PROGRAMS, limits(self.device).sms), MAX_WARPS, VECTOR // width, 0.0, 0.0
        if self.epilogue is None:
            bytes = triton.next_power_of_2(-(-size * width // sms))
            bytes = min(max(bytes, BLOCKS[0]), BLOCKS[1])
            blocks = -(-size * width // bytes)
        else:
            bytes, blocks = max(triton.next_power_of_2(columns), 32) * width, size // columns  # an element for a lane
            most *= 1 + (columns > LONGEST)
            unit = unit if columns % unit == 0 else 1
            eps, fp8 = self.epilogue.eps, self.epilogue.fp8
            limit = torch.finfo(FP8[fp8]).max if fp8 else 0.0
        warps = 1 if INTERPRETED else min(max(bytes // VECTOR // 32, 1), most)
        constants = (
            *(self.rank, len(self.slots), self.collective == "reduce_scatter", self.collective == "allgather"),
            *(GATHERED[sent.dtype], self.epilogue is not None),
            *(unit, bytes // width, eps, limit, LEAST_SCALE, PROGRAMS),
        )
        numbers = self.polls, size // unit, self.room, columns // unit
        slots: tuple[object, ...] = tuple(map(_bits, self.slots))
        quantized = tensors[-1]
        key = self.device, "low latency", *constants, warps, *alignments, quantized is not None and quantized.dtype
        arguments = *_in_one_axis(tensors), slots, self.calls, self.timeouts, *numbers, *constants
        compiled = loaded(key, self.device, low_latency_kernel, arguments, {"num_warps": warps})
        memory: tuple[object, ...] = slots, self.calls, self.timeouts
        if compiled is not None:
            addresses = tuple(slot.data_ptr() for slot in self.slots)
            memory = addresses, self.calls.data_ptr(), self.timeouts.data_ptr()
        return min(sms, blocks), compiled, (*memory, *numbers, *constants)


def _in_one_axis(tensors: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Yield the tensors of a call in one axis, as integers; the quantized rows, which come last, as numbers."""
    *others, quantized = tensors
    yield from (None if x is None else _bits(x) for x in others)
    yield None if quantized is None else quantized.view(-1)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in one axis, with integers in the place of numbers."""
    return x.view(-1).view(BITS[x.element_size()])
