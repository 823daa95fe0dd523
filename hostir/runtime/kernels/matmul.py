"""A persistent Triton matmul that reads and writes strided views in place.

Each program walks over tiles of the output, grouped so that neighbours share operands in L2 (the grouped ordering and
the persistent loop are those of Triton's tutorials). On Hopper and later, tiles move through TMA descriptors; storing a
large tile in two halves halves the staging buffer, which frees shared memory for one more pipeline stage. Where the
memory does not obey TMA's rules, masked loads through pointers serve any strides.

The rows of the first operand may still be on their way when the kernel starts: hostir.runtime.kernels.ready.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hostir.runtime.kernels.launch import INTERPRETED, check_device, launching, limits
from hostir.runtime.kernels.numerics import from_float32, to_float32
from hostir.runtime.kernels.operands import Described, Rows, check, describe, rows_of
from hostir.runtime.kernels.ready import ReadyFlags, block_rows, wait_for_rows
from hostir.runtime.kernels.tiles import INTERPRETER, Config, choose, in_blocks

EXACT_RUN = 64  # products of float32 that are summed up at a time

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _tile_position(tile, first_row, batches, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(batch, first row, first column) of output tile number `tile`: down a group of rows, then one tile right.

    Where `first_row`, counted through all batches, is not None, the tiles begin with it and come round to it again.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    batch = tile // (tiles_m * tiles_n)
    tile = tile % (tiles_m * tiles_n)
    first = tile // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    tile_m = first + within % height
    if first_row is not None:
        batch = (batch + first_row // M) % batches
        tile_m = (tile_m + first_row % M // BM) % tiles_m
    return batch, tile_m * BM, within // height * BN


@triton.jit
def _load_pointers(base, row, column, height, width, row_stride, column_stride, BR: tl.constexpr, BC: tl.constexpr):
    """The tile `[BR, BC]` at (row, column) of a `[height, width]` matrix, zero outside of it."""
    r = (row + tl.arange(0, BR)).to(tl.int64)[:, None]
    c = (column + tl.arange(0, BC)).to(tl.int64)[None, :]
    return tl.load(base + r * row_stride + c * column_stride, mask=(r < height) & (c < width), other=0.0)


@triton.jit
def _store_pointers(base, row, column, height, width, row_stride, column_stride, x, BR: tl.constexpr, BC: tl.constexpr):
    r = (row + tl.arange(0, BR)).to(tl.int64)[:, None]
    c = (column + tl.arange(0, BC)).to(tl.int64)[None, :]
    x = from_float32(x, base.dtype.element_ty)
    tl.store(base + r * row_stride + c * column_stride, x, mask=(r < height) & (c < width))


@triton.jit
def _load_descriptor(desc, batch, row, column, BATCHED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    if BATCHED:
        return tl.reshape(desc.load([batch, row, column]), (BR, BC))
    else:
        return desc.load([row, column])


@triton.jit
def _store_descriptor(desc, batch, row, column, x, BATCHED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    x = from_float32(x, desc.dtype)
    if BATCHED:
        desc.store([batch, row, column], tl.reshape(x, (1, BR, BC)))
    else:
        desc.store([row, column], x)


@triton.jit
def _dot(x, y, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:
        return tl.dot(to_float32(x), to_float32(y), acc, input_precision="ieee")
    else:
        return tl.dot(x, y, acc, input_precision=PRECISION)


@triton.jit
def _multiply(
    begin,
    stop,
    first_row,
    a,
    b,
    out,
    bias,
    bias_step,
    batches,
    M,
    N,
    K,
    strides,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_IS_NK: tl.constexpr,
    BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    RUN: tl.constexpr,
):
    """This program's share of the tiles from `begin`, which is one of its own, to before `stop`."""
    a_batch, a_row, a_column, b_row, b_column, out_batch, out_row, out_column = strides
    for tile in tl.range(begin, stop, tl.num_programs(0), flatten=DESCRIPTORS):
        batch, row, column = _tile_position(tile, first_row, batches, M, N, BM, BN, GROUP)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(tl.cdiv(K, BK)):
            k = step * BK
            if DESCRIPTORS:
                x = _load_descriptor(a, batch, row, k, BATCHED, BM, BK)
                if B_IS_NK:
                    y = b.load([column, k]).T
                else:
                    y = b.load([k, column])
            else:
                x = _load_pointers(a + batch.to(tl.int64) * a_batch, row, k, M, K, a_row, a_column, BM, BK)
                y = _load_pointers(b, k, column, K, N, b_row, b_column, BK, BN)
            acc = _dot(x, y, acc, PRECISION)
            if EXACT and step % RUN == RUN - 1:  # a sum of short sums errs less than one long sum
                total += acc
                acc = tl.zeros((BM, BN), dtype=tl.float32)
        if EXACT:
            acc += total
        if HAS_BIAS:
            acc += to_float32(_load_pointers(bias, 0, column, 1, N, 0, bias_step, 1, BN))
        if not DESCRIPTORS:
            base = out + batch.to(tl.int64) * out_batch
            _store_pointers(base, row, column, M, N, out_row, out_column, acc, BM, BN)
        elif HALVES:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            _store_descriptor(out, batch, row, column, left, BATCHED, BM, BN // 2)
            _store_descriptor(out, batch, row, column + BN // 2, right, BATCHED, BM, BN // 2)
        else:
            _store_descriptor(out, batch, row, column, acc, BATCHED, BM, BN)


@triton.jit(do_not_specialize=["batches", "M", "epoch", "first", "blocks", "height", "looks"])
def _matmul_kernel(
    a,  # DESCRIPTORS: descriptors of a, b (B_IS_NK: of its transpose) and out; else pointers
    b,
    out,
    bias,
    bias_step,
    flags,  # as in ReadyFlags, with READY only, as what follows down to looks
    stalls,
    epoch,
    first,
    blocks,
    height,  # rows of a block
    looks,
    batches,
    M,
    N,
    K,
    a_batch,  # strides, used with pointers only
    a_row,
    a_column,
    b_row,
    b_column,
    out_batch,
    out_row,
    out_column,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_IS_NK: tl.constexpr,
    BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    READY: tl.constexpr,  # rows come while the kernel runs
    FLAGS: tl.constexpr,  # the power of 2 that holds all blocks
    EPOCH_IN_MEMORY: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,  # float32 on plain FMAs
    RUN: tl.constexpr,  # steps of BK that EXACT sums up at a time
):
    tile = tl.program_id(0)
    tiles = batches * tl.cdiv(M, BM) * tl.cdiv(N, BN)
    strides = (a_batch, a_row, a_column, b_row, b_column, out_batch, out_row, out_column)
    if READY:
        if EPOCH_IN_MEMORY:
            epoch = tl.load(epoch)
        first_row = first * height
        # Where no tile spans two blocks, tiles are numbered block by block. Then those of a block, and of the blocks
        # behind it that have come as well, are one pipeline: a wait in its midst would keep Triton from building it.
        tiles_of_block = tl.where(height % M == 0, tiles // blocks, 0)
        while (tile < tiles) & (looks > 0):
            batch, row, _ = _tile_position(tile, first_row, batches, M, N, BM, BN, GROUP)
            come, looks = wait_for_rows(
                *(flags, stalls, epoch, first, blocks, height, looks),
                *(batch * M + row, batch * M + min(row + BM, M)),
                FLAGS=FLAGS,
                TMA=DESCRIPTORS,
            )
            stop = tl.where(looks > 0, max(come * tiles_of_block, tile + 1), tile)
            _multiply(
                *(tile, stop, first_row, a, b, out, bias, bias_step, batches, M, N, K, strides),
                *(BM, BN, BK, GROUP, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
            )
            tile += tl.cdiv(stop - tile, tl.num_programs(0)) * tl.num_programs(0)
    else:
        _multiply(
            *(tile, tiles, None, a, b, out, bias, bias_step, batches, M, N, K, strides),
            *(BM, BN, BK, GROUP, HALVES, DESCRIPTORS, B_IS_NK, BATCHED, HAS_BIAS, PRECISION, EXACT, RUN),
        )


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transpose_b: bool = False,
    ready: ReadyFlags | None = None,
    use_descriptors: bool | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """`out[..., N] = a[..., K] @ b (+ bias)`, accumulated in float32, on the current stream; returns `out`.

    Args:
        a: `[..., K]`. Its leading axes, together with those of `out`, must merge into rows of one stride, or into two
            axes `[batch, rows]` of any strides; then both are used in place. K may have any stride.
        b: `[K, N]`, or the weight `[N, K]` when `transpose_b`; any strides.
        out: `[..., N]` with the leading axes of `a`, overwritten; must overlap neither itself nor another argument.
        bias: `[N]`, added before rounding.
        ready: flags for equal blocks of the flattened rows of `a`, which may still be on their way: a tile is begun
            when its rows are there, and tiles are tried in the order of blocks, from `ready.first` on. A tile spans
            several blocks only if they are smaller than it, or `a` is a batch; it waits for all of them. The bits are
            those of the same tile without flags. Where a block stays away, `ready.stalls` says so in the end, and
            tiles are left out: all that need the block, and others that the same programs had yet to compute.
        use_descriptors: move tiles with TMA descriptors. None: wherever the device and the memory allow it.
            True: always, or raise. False: never.
        config: the tile, instead of the one that `choose` finds.

    All tensors have one dtype, bfloat16, float16 or float32. float32 is multiplied exactly, or in TF32 on a GPU if
    `torch.backends.cuda.matmul` says so when called. An empty `out` waits for no flags.

    Raises TypeError for a dtype, ValueError for a shape, a layout, a device or flags that do not fit.
    """
    device = check_device(a=a, b=b, out=out, bias=bias)
    check(a, b, out, bias, transpose_b)
    block = None if ready is None else block_rows(ready, out)
    weight = b.t() if transpose_b else b
    K, N = weight.shape
    if out.numel() == 0:
        return out
    if K == 0 and ready is None:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))

    rows = rows_of(a, out)
    bounds = limits(device)
    if use_descriptors is None and not bounds.tma:
        use_descriptors = False
    described = _described(a, weight, out, rows, use_descriptors)
    tf32 = a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if config is None and INTERPRETED:
        config = INTERPRETER
    elif config is None:
        config = choose(
            *(rows.M, N, K, a.dtype, bounds.sms),
            batch=rows.batches,
            block=block,
            descriptors=described is not None,
            tf32=tf32,
            shared_memory=bounds.shared_memory,
        )
    batches, M = in_blocks(rows.batches, rows.M, block, config.m)
    if M != rows.M:
        rows = rows.in_batches(M)
        described = _described(a, weight, out, rows, use_descriptors)
    tiles = batches * -(-M // config.m) * -(-N // config.n)
    operands: list[torch.Tensor | TensorDescriptor] = [a, weight, out]
    strides = [rows.a_batch, rows.a_row, a.stride(-1), *weight.stride(), rows.out_batch, rows.out_row, out.stride(-1)]
    if described is not None:
        blocks = (config.m, config.k), (config.k, config.n), (config.m, config.n // 2 if config.halves else config.n)
        operands = [layout.descriptor(block) for layout, block in zip(described, blocks, strict=True)]
        strides = [0] * len(strides)  # not used, so new strides shall not mean a new compilation
    waits: list[torch.Tensor | int | None] = [None] * 7
    if ready is not None:
        waits = [ready.flags, ready.stalls, ready.epoch, ready.first, ready.flags.numel(), block, ready.looks]
    with launching(device):
        _matmul_kernel[(min(bounds.sms, tiles),)](
            *operands,
            bias,
            0 if bias is None else bias.stride(0),
            *waits,
            batches,
            M,
            N,
            K,
            *strides,
            BM=config.m,
            BN=config.n,
            BK=config.k,
            GROUP=config.group,
            HALVES=config.halves,
            DESCRIPTORS=described is not None,
            B_IS_NK=described is not None and described[1].transposed,
            BATCHED=batches > 1,
            HAS_BIAS=bias is not None,
            READY=ready is not None,
            FLAGS=1 if ready is None else triton.next_power_of_2(ready.flags.numel()),
            EPOCH_IN_MEMORY=ready is not None and isinstance(ready.epoch, torch.Tensor),
            PRECISION="tf32" if tf32 else "ieee",
            EXACT=a.dtype == torch.float32 and not tf32,
            RUN=max(1, EXACT_RUN // config.k),
            num_stages=config.stages,
            num_warps=config.warps,
        )
    return out


def _described(
    a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: Rows, wanted: bool | None
) -> list[Described] | None:
    """How TMA sees the operands; None where it is not `wanted`, or cannot unless it must."""
    if wanted is False:
        return None
    described = describe(a, weight, out, rows)
    if not isinstance(described, str):
        return described
    if wanted:
        raise ValueError(f"matmul cannot use TMA descriptors: {described}")
    return None


def matmul_reference(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, transpose_b: bool = False
) -> torch.Tensor:
    """What `matmul` approximates: `[..., K] @ [K, N] (+ [N])` (or `[N, K]` when `transpose_b`), computed in float64."""
    product = a.double() @ (b.t() if transpose_b else b).double()
    return product if bias is None else product + bias.double()
