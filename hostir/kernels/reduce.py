"""Sum over one axis in Triton, for example over the partial results that a reduce-scatter has received."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hostir.kernels import aten
from hostir.kernels.devices import (
    INTERPRETED,
    Compiled,
    StandIn,
    bind_thread,
    check_device,
    launch,
    launching,
    limits,
    load,
    only_loads,
)
from hostir.kernels.flags.done import (
    MISSED,
    DoneFlags,
    Raised,
    count,
    done_layout,
    done_rows,
    raise_flags,
    stores_ended,
)
from hostir.kernels.flags.ready import Awaited, ReadyFlags, block_rows, poll, ready_layout
from hostir.kernels.flags.signals import Ending, end_call
from hostir.kernels.layout import collapse, launch_layout
from hostir.kernels.matmul.conversions import from_float32, to_float32
from hostir.kernels.matmul.workspaces import workspace
from hostir.kernels.repeats import Again

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# First kernel: sums of many elements, or of neighbours in memory. A program keeps several partial sums, and adds them
# up at the end.

# Bytes that one program loads at a time: 8 loads of 16 bytes in flight in each of 128 threads.
_TILE = 16 << 10


@triton.jit
def _reduce_sum_kernel(
    x, out, P, Q, R, x_p, x_q, x_r, out_p, out_q, BQ: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr
):
    """Compute `out[p, q] = sum over r of x[p, q, r]`. A program computes `BQ` elements of `out` for one `p`.

    P, Q and R are the sizes of the axes, and `x_p` to `out_q` are strides. BR is the number of elements along R that
    are loaded at a time. If WIDE is True, the sum is accumulated in float64.
    """
    tiles = tl.cdiv(Q, BQ)
    program = tl.program_id(0).to(tl.int64)
    p = program // tiles
    q = (program % tiles * BQ + tl.arange(0, BQ))[None, :]
    r = tl.arange(0, BR).to(tl.int64)[:, None]
    x += p * x_p
    acc = tl.zeros((BR, BQ), dtype=tl.float64 if WIDE else tl.float32)
    for start in range(0, R, BR):
        values = tl.load(x + q * x_q + (start + r) * x_r, mask=(q < Q) & (start + r < R), other=0.0)
        acc += to_float32(values).to(acc.dtype)
    total = tl.sum(acc, axis=0)[None, :].to(tl.float32)
    tl.store(out + p * out_p + q * out_q, from_float32(total, out.dtype.element_ty), mask=q < Q)


# Second kernel: sums of a few tensors, the sources, in their order, element by element, at the speed of memory.
#
# A fixed number of programs goes through the output block by block. Sources may still arrive while the kernel runs: a
# program waits for the flags of a block in all sources before it reads the first source. So the order of arrival does
# not change the bits.

MAX_SOURCES = 64  # more sources are added by the first kernel, if there are no flags
_UNROLLED = 16  # sources that are loaded at once, before any is added
_IN_FLIGHT = 64 << 10  # bytes that a program loads at once: its share of memory latency times memory bandwidth
_WARPS = 16
_INTERPRETED = tl.constexpr(INTERPRETED)


class SumPart(NamedTuple):
    """A tensor that the kernel reads or writes: its address, and the strides of its merged axes, outermost first."""

    base: Any
    strides: Any


class SumConstants(NamedTuple):
    """The compile-time constants of `sum_kernel`.

    Fields:
        SOURCES: the number of sources.
        UNROLLED: all sources are loaded before any is added.
        OWN: the source that `own_rows` replace; -1 if there are no `own_rows`.
        BLOCK: the number of elements of the output that a program computes at a time.
        VECTOR: the number of elements in 16 bytes, if all sizes, strides and addresses are multiples of 16 bytes; else
            1.
        AXES: the number of axes into which the axes of the output were merged.
        READY: 0 without ready flags. Otherwise the number of flags that a block waits for, rounded up to a power of 2.
            A block waits for one flag of each source.
        DONE: the kernel raises completion flags of blocks.
        ENDS: 0, or the size of the `CallEnd` that the kernel carries out.
        OVERLAPS: the kernel may have started before the previous kernel of the stream has ended.
        WIDE: sums are accumulated in float64.
        ACTIVATION: the function that is applied at the end; empty for none.
    """

    SOURCES: int
    UNROLLED: bool
    OWN: int
    BLOCK: int
    VECTOR: int
    AXES: int
    READY: int
    DONE: bool
    ENDS: int
    OVERLAPS: bool
    WIDE: bool
    ACTIVATION: str


@triton.jit
def _offset(part, sizes, place, C: tl.constexpr):
    """Return the offset in memory of the element with the flat index `place`."""
    AXES: tl.constexpr = C.AXES
    at = place % sizes[AXES - 1] * part.strides[AXES - 1]
    place //= sizes[AXES - 1]
    for i in tl.static_range(1, AXES):
        at += place % sizes[AXES - 1 - i] * part.strides[AXES - 1 - i]
        place //= sizes[AXES - 1 - i]
    return at


@triton.jit
def _pointers(part, at, number, C: tl.constexpr):
    """Return pointers to elements of one run along the last axis. The run begins at offset `at` in memory.

    `number` holds the index of each element in the run.
    """
    AXES: tl.constexpr = C.AXES
    # Rounding changes nothing, but tells the compiler that 16 bytes can be moved at a time.
    return part.base + at // C.VECTOR * C.VECTOR + number * part.strides[AXES - 1]


@triton.jit
def _load(part, at, number, mask, C: tl.constexpr):
    """Load the elements that `_pointers` points to, and convert them to the type in which sums are accumulated.

    The load bypasses L1, because each element is read only once.
    """
    x = tl.load(_pointers(part, at, number, C), mask=mask, other=0.0, cache_modifier=".cg")
    return to_float32(x).to(tl.float64 if C.WIDE else tl.float32)


@triton.jit
def _activate(x, C: tl.constexpr):
    """Apply the activation to float32 elements."""
    if C.ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)  # NaN stays NaN
    elif C.ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif C.ACTIVATION == "silu":
        return x / (1 + tl.exp(-x))
    else:
        return x


@triton.jit
def _add_source(total, x, at, own_rows, at_own, number, mask, source, C: tl.constexpr):
    """Add one source, or the `own_rows` that replace it, to `total`."""
    if source == C.OWN:
        total += _load(own_rows, at_own, number, mask, C)
    else:
        total += _load(x, at, number, mask, C)
    return total


@triton.jit
def _add_sources(x, own_rows, addend, out, sizes, place, size, step, C: tl.constexpr):
    """Compute and store `size` elements of the output, from flat index `place` on.

    `step` is the stride between sources. The elements lie in one run of the last axis.
    """
    SOURCES: tl.constexpr = C.SOURCES
    number = tl.arange(0, C.BLOCK)
    mask = number < size // C.VECTOR * C.VECTOR
    at, at_own = _offset(x, sizes, place, C), _offset(own_rows, sizes, place, C)
    if C.OWN == 0:
        total = _load(own_rows, at_own, number, mask, C)
    else:
        total = _load(x, at, number, mask, C)
    if C.UNROLLED:
        for source in tl.static_range(1, SOURCES):
            at += step
            total = _add_source(total, x, at, own_rows, at_own, number, mask, source, C)
    else:
        for source in range(1, SOURCES):
            at += step
            total = _add_source(total, x, at, own_rows, at_own, number, mask, source, C)
    if addend is not None:
        total += _load(addend, _offset(addend, sizes, place, C), number, mask, C)
    total = from_float32(_activate(total.to(tl.float32), C), out.base.dtype.element_ty)
    tl.store(_pointers(out, _offset(out, sizes, place, C), number, C), total, mask=mask)


@triton.jit
def _wait_for_sources(awaited, polls, block, C: tl.constexpr):
    """Wait for a block of every source except source OWN. Return the number of polls left; 0 if the program gave up."""
    source = tl.arange(0, C.READY)
    needed = (source < C.SOURCES) & (source != C.OWN)
    _, polls = poll(awaited, polls, source * awaited.blocks + block, needed, needed)
    return polls


@triton.jit
def _count_pieces(raised, block, needed, more):
    """Wait until this program's stores are in memory, and then count `more` pieces of a block as stored.

    The block has `needed` pieces. `count` describes `more`, and raises the flag of a complete block.
    """
    block = stores_ended(block, 1, False) + tl.arange(0, 1)
    count(raised, block, block >= 0, needed, more)


_VARYING = ["epoch", "waits", "polls", "raised_epoch", "raises", "first", "blocks"]


@triton.jit(do_not_specialize=_VARYING)
def sum_kernel(
    x,  # x, own_rows, addend (None without) and out are SumParts
    own_rows,
    addend,
    out,
    sizes,  # sizes of the merged axes of the output, outermost first
    step,  # stride between sources
    segments,  # segments of a block; a segment lies within one run of the last axis
    length,  # elements of a segment
    first,  # the block to begin with
    flags,  # flags to polls are set with READY only: fields of ReadyFlags; waits is the number of flags of a source
    timeouts,
    epoch,
    waits,
    polls,
    raised_flags,  # raised_flags to counts are set with DONE only: fields of Raised; raises is the number of flags
    raised_epoch,
    raises,
    ending,  # an Ending, with ENDS only
    counts,
    blocks,  # blocks of the output; each has flags, or is an equal part of a block with flags
    C: tl.constexpr,  # SumConstants
):
    """Compute this program's pieces of the output, block by block. A piece has at most BLOCK elements."""
    of_segment = tl.cdiv(length, C.BLOCK)
    of_block = segments * of_segment
    pieces, programs = blocks * of_block, tl.num_programs(0)
    piece = tl.program_id(0)
    left = polls if C.READY else 1
    awaited = Awaited(flags, timeouts, epoch, 0, waits, None)
    raised = Raised(raised_flags, raised_epoch, None, counts)
    while piece < pieces:
        number = piece // of_block
        block, stop = (first + number) % blocks, (number + 1) * of_block
        if C.READY:  # a program that has given up polls each further flag once
            left = _wait_for_sources(awaited, tl.maximum(left, 1), block // (blocks // waits), C)
        mine = tl.cdiv(stop - piece, programs)
        for i in range(tl.where(left > 0, mine, 0)):
            within = piece + i * programs - number * of_block
            place = (block * segments + within // of_segment).to(tl.int64) * length
            begin = within % of_segment * C.BLOCK
            _add_sources(x, own_rows, addend, out, sizes, place + begin, min(length - begin, C.BLOCK), step, C)
        if C.DONE:
            parts = blocks // raises
            more = mine + tl.where(left > 0, 0, MISSED)
            _count_pieces(raised, block // parts, of_block * parts, more)
        piece += mine * programs
    if C.OVERLAPS and not _INTERPRETED:
        gdc_wait()  # so that later work of the stream also comes after the previous kernel
    if C.ENDS:
        end_call(ending, C.ENDS)


@dataclass
class SumLaunch:
    """A prepared launch of `sum_kernel`, for tensors of one layout.

    Fields:
        programs: size of the grid.
        sizes: sizes of the merged axes of the output.
        strides: strides of x, `own_rows`, the addend (None without) and the output.
        numbers: the values of the kernel's parameters `step`, `segments` and `length`.
        waits, raises, blocks: the values of the kernel's parameters with these names. `waits` is None without ready
            flags, and `raises` is None without completion flags.
        constants: the kernel's compile-time constants.
        options: Triton's compile options.
    """

    device: torch.device
    programs: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    numbers: tuple[int, ...]
    waits: int | None
    raises: int | None
    blocks: int
    constants: SumConstants
    options: Mapping[str, Any]
    compiled: Compiled | None = field(default=None, init=False)

    def __call__(
        self, tensors: Sequence[torch.Tensor | None], ready: ReadyFlags | None, done: DoneFlags | None
    ) -> Again | None:
        """Launch the kernel for `tensors` (x, own_rows, an addend, out) on the current stream.

        Load it first if necessary. In the context of `loading`, only load it.

        Returns a function that launches the kernel again for the same addresses, on the stream that is current at that
        time. Returns None if the kernel was only loaded, and in the interpreter.
        """
        if self.compiled is None:
            self._load(tensors, ready, done)
        if self.compiled is None or only_loads():
            return None
        again = partial(self._start, self.compiled, self._arguments(tensors, ready, done, _address))
        again()
        return again

    def _load(self, tensors: Sequence[torch.Tensor | None], ready: ReadyFlags | None, done: DoneFlags | None) -> None:
        """Compile and load the kernel; in the interpreter, run it."""
        arguments, last = self._arguments(tensors, ready, done, lambda t: t), (self.blocks, self.constants)
        with launching(self.device):
            if INTERPRETED:
                sum_kernel[(self.programs,)](*arguments, self._counts(0), *last, **self.options)
                return
            counts = None if done is None else StandIn.of((1,), (1,), torch.int64, self.device)
            self.compiled = load(sum_kernel, (*arguments, counts, *last), self.options)

    def _start(self, compiled: Compiled, arguments: Sequence[Any]) -> None:
        if torch.cuda.current_device() != self.device.index:
            with launching(self.device):
                self._start(compiled, arguments)
            return
        bind_thread(self.device)
        stream = compiled.stream(self.device.index)
        counts = self._counts(stream)  # kept alive until the kernel is launched
        compiled.launch(
            self.programs,
            stream,
            (*arguments, None if counts is None else counts.data_ptr(), self.blocks, self.constants),
        )

    def _counts(self, stream: int) -> torch.Tensor | None:
        """Return the memory in which one launch on a stream counts the stored pieces of each block.

        The tensor has an int64 for each block with a completion flag. All its elements are 0. Returns None without
        completion flags.
        """
        if self.raises is None:
            return None
        _, tickets = workspace(self.device, stream, 0, 2 * self.raises)
        return tickets[: 2 * self.raises].view(torch.int64)

    def _arguments(
        self,
        tensors: Sequence[torch.Tensor | None],
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pointer: Callable[[torch.Tensor], Any],
    ) -> tuple[Any, ...]:
        """Return the arguments for the kernel's parameters that precede `counts`.

        `pointer` converts a tensor to an argument.
        """
        pairs = zip(tensors, self.strides, strict=True)
        parts = [None if t is None else SumPart(pointer(t), strides) for t, strides in pairs]
        waits: tuple[Any, ...] = (None,) * 5
        if ready is not None:
            waits = (pointer(ready.flags), pointer(ready.timeouts), ready.epoch, self.waits, ready.polls)
        raised: tuple[Any, ...] = (None,) * 3
        if done is not None:
            raised = (pointer(done.flags), done.epoch, self.raises)
        first = 0 if done is None or ready is not None else done.first * (self.blocks // len(done.flags))
        return (*parts, self.sizes, *self.numbers, first, *waits, *raised, Ending.of(ready, pointer))


_address = methodcaller("data_ptr")

_MAX_LAUNCHES = 1024
_launches: dict[tuple[object, ...], SumLaunch] = {}  # prepared launches, by everything that they depend on


def _sum_sources(
    x: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None,
    activation: str,
    ready: ReadyFlags | None,
    done: DoneFlags | None,
    own_rows: torch.Tensor | None,
) -> Again | None:
    """Compute `out = activation(x.sum(0) + addend)` by `sum_kernel`, which adds the sources `x[i]` in their order.

    The arguments are as in `reduce_sum`. Returns the same as `SumLaunch.__call__`.
    """
    layouts = *map(launch_layout, (x, out, addend, own_rows)), activation, ready_layout(ready), done_layout(done)
    launch = _launches.get(layouts)
    if launch is None:
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        launch = _launches[layouts] = _prepare(x, out, addend, activation, ready, done, own_rows)
    return launch((x, x if own_rows is None else own_rows, addend, out), ready, done)


def _prepare(
    x: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None,
    activation: str,
    ready: ReadyFlags | None,
    done: DoneFlags | None,
    own_rows: torch.Tensor | None,
) -> SumLaunch:
    """Return a prepared launch. It serves all calls of `_sum_sources` with arguments of the same layouts."""
    device = out.device
    waits = None if ready is None else len(ready.flags) // len(x)
    raises = None if done is None else len(done.flags)
    blocks = math.lcm(waits or 1, raises or 1)
    tensors = x[0], x[0] if own_rows is None else own_rows, out if addend is None else addend, out
    levels = collapse(out.shape, *(t.stride() for t in tensors)) or [(1,) * 5]
    sizes, *strides = zip(*levels, strict=True)
    length = math.gcd(sizes[-1], out.numel() // blocks)
    vector = 16 // x.element_size()
    numbers = [length, x.stride(0), *(n for steps in strides for n in steps[:-1])]
    aligned = (
        all(n % vector == 0 for n in numbers)
        and all(steps[-1] == 1 for steps in strides)
        and all(t.data_ptr() % 16 == 0 for t in tensors)
    )
    bounds = limits(device)
    overlapped = ready.overlapped_sms if ready is not None and bounds.tma else 0
    sms = max(1, bounds.sms - overlapped - (0 if ready is None else ready.reserved_sms))
    most = max(_IN_FLIGHT // min(len(x), _UNROLLED) // x.element_size(), 128)
    block = min(triton.next_power_of_2(min(length, -(-out.numel() // sms))), 1 << (most.bit_length() - 1))
    pieces = -(-length // block) * (out.numel() // length)
    warps = 1 if INTERPRETED else max(1, min(_WARPS, block // (32 * vector)))
    return SumLaunch(
        device=device,
        programs=min(sms, pieces),
        sizes=sizes,
        strides=(*strides[:2], None if addend is None else strides[2], strides[3]),
        numbers=(x.stride(0), out.numel() // blocks // length, length),
        waits=waits,
        raises=raises,
        blocks=blocks,
        constants=SumConstants(
            SOURCES=len(x),
            UNROLLED=len(x) <= _UNROLLED,
            OWN=-1 if own_rows is None or ready is None else ready.source,
            BLOCK=block,
            VECTOR=vector if aligned and block % vector == 0 else 1,
            AXES=len(levels),
            READY=0 if waits is None else triton.next_power_of_2(len(x)),
            DONE=raises is not None,
            ENDS=0 if ready is None else ready.ends,
            OVERLAPS=overlapped > 0,
            WIDE=x.dtype == torch.float32,
            ACTIVATION=activation,
        ),
        options={"num_warps": warps, **({"launch_pdl": True} if overlapped else {})},
    )


def reduce_sum(
    x: torch.Tensor,
    out: torch.Tensor,
    axis: int,
    *,
    addend: torch.Tensor | None = None,
    activation: str = "",
    ready: ReadyFlags | None = None,
    done: DoneFlags | None = None,
    own_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `out = activation(x.sum(axis) + addend)` on the current stream; return `out`.

    Sums of 16-bit inputs are accumulated in float32. Sums of float32 inputs are accumulated in float64, because a plain
    loop in float32 would be less accurate than torch's cascade. Float64 costs no time here, because memory bandwidth
    limits the kernel.

    Args:
        x: a tensor of bfloat16, float16 or float32, with any shape and strides.
        out: a tensor with the shape of `x` without `axis`, and with any strides. It is overwritten. It must overlap
            neither itself nor `x`. It has dtype bfloat16, float16 or float32, and need not have the dtype of `x`.
        axis: the axis to sum over. It counts from the end if it is negative. An axis of size 0 gives zeros.
        addend: a tensor of the dtype of `x`. It is broadcast to the shape of `out`, and added before rounding.
        activation: `relu`, `gelu` or `silu`, applied in float32 before rounding; empty for none.
        ready: flags for equal blocks of the flattened rows of `x`, which may still arrive. The sources are the indices
            of axis 0; each has the same number of flags. A block of `out` waits for the same block of every source.
            Results are bitwise equal to a sum without flags. If a block does not arrive, the kernel reports it in
            `ready.timeouts`. Blocks of `out` that need the missing block are then not written, or only in part. The
            programs that gave up also skip each later block that is not ready when they come to it.
        done: completion flags for equal blocks of the flattened rows of `out`. The kernel raises each flag once its
            block is stored. Blocks are computed in order, from `done.first` on. But with `ready`, they are computed
            from block 0 on.
        own_rows: rows that replace source `ready.source`. The kernel does not wait for this source. The rows may have
            any shape with the same number of rows and the same last axis.

    Sources are added in their order if there are at most MAX_SOURCES of them and they are not neighbours in memory. In
    all cases, the order of summation depends only on shapes and strides, so results repeat bit for bit. Raises
    TypeError for a dtype, and ValueError for a shape, an axis, a device or flags that do not fit.
    """
    add_up(x, out, axis, addend=addend, activation=activation, ready=ready, done=done, own_rows=own_rows)
    return out


def add_up(
    x: torch.Tensor,
    out: torch.Tensor,
    axis: int,
    *,
    addend: torch.Tensor | None = None,
    activation: str = "",
    ready: ReadyFlags | None = None,
    done: DoneFlags | None = None,
    own_rows: torch.Tensor | None = None,
) -> Again | None:
    """Compute the same as `reduce_sum`, and return a function that repeats the call for the same layouts and addresses.

    Returns None if the call cannot be repeated like this: if it took more than one launch, and in the interpreter.
    """
    device = check_device(x=x, out=out, own_rows=own_rows, addend=addend)
    if x.dtype not in DTYPES or out.dtype not in DTYPES:
        raise TypeError(f"reduce_sum expects {', '.join(map(str, DTYPES))}; got x {x.dtype}, out {out.dtype}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"reduce_sum expects an axis of shape {list(x.shape)}, got axis {axis}")
    axis %= x.ndim
    kept = [*x.shape[:axis], *x.shape[axis + 1 :]]
    if list(out.shape) != kept:
        raise ValueError(f"the sum of {list(x.shape)} over axis {axis} has shape {kept}, but out {list(out.shape)}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out overlaps itself: shape {list(out.shape)}, strides {list(out.stride())}")
    if ready is not None or done is not None or own_rows is not None:
        _check_blocks(x, out, axis, ready, done, own_rows)
    assert ready is None or ready.ending is None or (out.numel() and x.shape[axis]), "a kernel must end the call"
    if out.numel() == 0:
        return None
    if not x.shape[axis]:
        aten.sum(out, x, addend, axis=axis, activation=activation)
        if done is not None:
            raise_flags(done, None)
        return None
    if addend is not None:
        addend = addend.expand_as(out)
    if ready is not None or done is not None or adds_in_order(x, out, axis):
        moved = own_rows is not None and own_rows.shape != out.shape
        if own_rows is not None and moved:
            own_rows = own_rows.reshape(out.shape)  # a view if possible
        again = _sum_sources(x.movedim(axis, 0), out, addend, activation, ready, done, own_rows)
        return None if moved else again
    if addend is not None or activation:
        total = torch.empty_like(out, dtype=torch.float32)
        add_up(x, total, axis)
        aten.add_up(out, (total,), addend, activation)
        return None

    R, x_r = x.shape[axis], x.stride(axis)
    levels = collapse(kept, [*x.stride()[:axis], *x.stride()[axis + 1 :]], out.stride())
    *outer, (P, x_p, out_p), (Q, x_q, out_q) = [(1, 0, 0)] * max(0, 2 - len(levels)) + levels
    along = x_r < x_q  # True if the summed axis has the smaller stride
    tile = _TILE // x.element_size()
    BR = min(triton.next_power_of_2(R), 1024 if along else 8)
    BQ = min(triton.next_power_of_2(Q), tile // BR)
    with launching(device):
        # The kernel takes two kept axes, which nearly always suffice. Each position along further axes is a launch.
        for position in itertools.product(*(range(size) for size, _, _ in outer)):
            x_at = sum(i * step for i, (_, step, _) in zip(position, outer, strict=True))
            out_at = sum(i * step for i, (_, _, step) in zip(position, outer, strict=True))
            launch(
                *(_reduce_sum_kernel, P * -(-Q // BQ)),
                x.as_strided((1,), (1,), x.storage_offset() + x_at),
                out.as_strided((1,), (1,), out.storage_offset() + out_at),
                *(P, Q, R, x_p, x_q, x_r, out_p, out_q),
                BQ=BQ,
                BR=BR,
                WIDE=x.dtype == torch.float32,
            )
    return None


def _check_blocks(
    x: torch.Tensor,
    out: torch.Tensor,
    axis: int,
    ready: ReadyFlags | None,
    done: DoneFlags | None,
    own_rows: torch.Tensor | None,
) -> None:
    """Raise TypeError or ValueError unless flags and `own_rows` fit the sum."""
    if done is not None:
        done_rows(done, out)
    if ready is None:
        if own_rows is not None:
            raise ValueError("own rows replace a source: expected flags of sources (ready) as well")
        return
    block_rows(ready, x)
    if axis != 0 or len(ready.flags) % max(1, len(x)):
        raise ValueError(
            f"expected as many flags for each of {x.shape[0]} sources along axis 0, got {len(ready.flags)}"
        )
    if own_rows is None:
        return
    if (
        own_rows.dtype != x.dtype
        or own_rows.shape[-1:] != x.shape[-1:]
        or own_rows.shape[:-1].numel() != out.shape[:-1].numel()
    ):
        wanted = f"{[out.shape[:-1].numel(), *x.shape[-1:]]} of {x.dtype}"
        raise ValueError(f"expected own rows {wanted}, got {list(own_rows.shape)} of {own_rows.dtype}")
    if not 0 <= ready.source < len(x):
        raise ValueError(f"there is no source {ready.source}: expected 0 to {len(x) - 1}")


def adds_in_order(x: torch.Tensor, out: torch.Tensor, axis: int) -> bool:
    """Return True if `sum_kernel` suits a sum without flags.

    There must be at most MAX_SOURCES sources. The distance in memory between two sources must be at least the distance
    between neighbouring elements of a source.
    """
    kept = [i for i in range(x.ndim) if i != axis]
    levels = collapse(out.shape, [x.stride(i) for i in kept], out.stride())
    return x.shape[axis] <= MAX_SOURCES and (not levels or x.stride(axis) >= levels[-1][1])


def reduce_sum_reference(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the sum over `axis`, computed in float64: the reference for `reduce_sum`."""
    return x.double().sum(axis)
