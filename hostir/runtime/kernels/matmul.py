"""A persistent Triton matmul that reads and writes strided views in place.

Each program walks over tiles of the output, grouped so that neighbours share operands in L2 (the grouped ordering and
the persistent loop are those of Triton's tutorials); the last tiles may be split among several programs each, and those
of rows that come first among two (hostir.runtime.kernels.split). On Hopper and later, tiles move through TMA
descriptors; storing a large tile in two halves halves the staging buffer, which frees shared memory for one more
pipeline stage. Where the memory does not obey TMA's rules, masked loads through pointers serve any strides.

The rows of the first operand may still be on their way when the kernel starts: hostir.runtime.kernels.ready.
"""

from __future__ import annotations

import torch
import triton

from hostir.runtime.kernels.kernel import Again
from hostir.runtime.kernels.launch import INTERPRETED, check_device, limits
from hostir.runtime.kernels.layout import rows_or_copy
from hostir.runtime.kernels.matmul_call import Call, Matrices
from hostir.runtime.kernels.operands import Described, Rows, check, check_own, describe, own_strides, place_own, rows_of
from hostir.runtime.kernels.ready import ReadyFlags, block_rows
from hostir.runtime.kernels.split import schedule
from hostir.runtime.kernels.tile_choice import choose
from hostir.runtime.kernels.tiles import FEWEST_APART, INTERPRETER, Ahead, Config, in_blocks

EXACT_RUN = 64  # products of float32 that are summed up at a time

_MOST_CALLS = 4096
_calls: dict[tuple[object, ...], Call] = {}


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transpose_b: bool = False,
    ready: ReadyFlags | None = None,
    own: torch.Tensor | None = None,
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
            those of the same tile without flags, if it is split alike. Where a block stays away, `ready.stalls` says
            so in the end, and tiles are left out, all that need the block and others that the same programs had yet to
            compute; of those that are split, it is multiplied as it is.
        own: `[..., K]`, the rows of block `ready.first`, which is not waited for. Where they are few, or no TMA
            descriptor fits them alone, they are copied to their place in `a`, and what was there is lost; else they are
            read where they are, no tile spans several blocks, and each block must be some whole batches of rows, or all
            rows one batch.
        use_descriptors: move tiles with TMA descriptors. None: wherever the device and the memory allow it.
            True: always, or raise. False: never.
        config: the tile, instead of the one that `choose` finds.

    All tensors have one dtype, bfloat16, float16 or float32. float32 is multiplied exactly, or in TF32 on a GPU if
    `torch.backends.cuda.matmul` says so when called. An empty `out` waits for no flags. Results repeat bit for bit.

    Raises TypeError for a dtype, ValueError for a shape, a layout, a device, flags or a tile that do not fit.
    """
    multiply(
        *(a, b, out),
        bias=bias,
        transpose_b=transpose_b,
        ready=ready,
        own=own,
        use_descriptors=use_descriptors,
        config=config,
    )
    return out


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transpose_b: bool = False,
    ready: ReadyFlags | None = None,
    own: torch.Tensor | None = None,
    use_descriptors: bool | None = None,
    config: Config | None = None,
) -> Again | None:
    """As `matmul`. Returns what does the same again for tensors of the same layouts at the same addresses.

    None where more than one launch is needed, where a setting may change what is launched, or the kernel was compiled.
    """
    wide, moved = a.dtype == torch.float32, False
    tf32 = wide and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if own is not None and not own.is_contiguous():
        own, moved = rows_or_copy(own), True
    kind = (
        *(_lies(a), _lies(b), _lies(out), None if bias is None else _lies(bias), transpose_b),
        *(None if ready is None else _waits(ready), None if own is None else _lies(own)),
        *(use_descriptors, config, tf32),
    )
    call = _calls.get(kind)
    if call is None:
        call = _prepare((a, b, out, own), bias, transpose_b, ready, use_descriptors, config, tf32)
        if call is None:
            if bias is None:
                out.zero_()
            else:
                out.copy_(bias.expand_as(out))
            return None
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[kind] = call
    if own is not None and call.copies_own:
        assert ready is not None
        place_own(own, a, ready)
        own, moved = None, True
    again = call.launch((a, b, out, own), bias, ready)
    return None if wide or moved else again


def _lies(t: torch.Tensor) -> tuple[object, ...]:
    """All that a launch depends on of a tensor, except for where it lies."""
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0


def _waits(ready: ReadyFlags) -> tuple[object, ...]:
    """All that a launch depends on of its flags, except for where they lie and for the epoch within its type."""
    stalls = ready.stalls
    pinned = stalls.device.type == "cpu" and stalls.is_pinned()
    narrow = -(1 << 31) <= ready.epoch < 1 << 31  # Triton compiles another kernel for an int64
    return _lies(ready.flags), _lies(stalls), pinned, narrow, ready.first, ready.looks, ready.beside, ready.spare


def _prepare(
    matrices: Matrices,
    bias: torch.Tensor | None,
    transpose_b: bool,
    ready: ReadyFlags | None,
    use_descriptors: bool | None,
    config: Config | None,
    tf32: bool,
) -> Call | None:
    """How to launch such a matmul; None where there is nothing to multiply, only a bias or zeros to write."""
    a, b, out, own = matrices
    device = check_device(a=a, b=b, out=out, bias=bias, own=own)
    check(a, b, out, bias, transpose_b)
    block = None if ready is None else block_rows(ready, out)
    there = own is not None
    if own is not None:
        check_own(own, a, block)
        if own.shape[:-1].numel() < FEWEST_APART:
            own = None
    weight = b.t() if transpose_b else b
    K, N = weight.shape
    if out.numel() == 0 or (K == 0 and ready is None):
        return None
    rows = rows_of(a, out)
    if own is not None and block and rows.batches > 1 and block % rows.M:
        raise ValueError(f"own rows of {block} are no whole batches of {rows.M}")
    bounds = limits(device)
    if not bounds.tma:
        if use_descriptors:
            raise ValueError(f"matmul cannot use TMA descriptors: {device} has no TMA")
        use_descriptors = False
    described = _described((a, weight, out, own), rows, use_descriptors)
    if described is None and own is not None and use_descriptors is None:
        described = _described((a, weight, out, None), rows, None)
        own = own if described is None else None
    copies_own = there and own is None
    # Programmatic dependent launch is as old as TMA; a copy comes between the kernel before and this one.
    beside = ready.beside if ready is not None and bounds.tma and not copies_own else 0
    sms = max(1, bounds.sms - beside - (0 if ready is None else ready.spare))
    if config is None and INTERPRETED:
        config = INTERPRETER
    elif config is None:
        config = choose(
            *(rows.M, N, K, a.dtype, sms),
            batch=rows.batches,
            block=block,
            apart=own is not None,
            descriptors=described is not None,
            tf32=tf32,
            shared_memory=bounds.shared_memory,
        )
    batches, M = in_blocks(rows.batches, rows.M, block, config.m, own is not None)
    if M != rows.M:
        rows = rows.in_batches(M)
        described = _described((a, weight, out, own), rows, use_descriptors)
    if bias is not None and batches > 1:
        fits = {"descriptors": described is not None, "biased_batch": True}
        config = config.fitting(a.element_size(), bounds.shared_memory, **fits)
    tiles = batches * -(-M // config.m) * -(-N // config.n)
    ahead = Ahead.of(config, batches, M, N, block, own is not None)
    plan = schedule(tiles + ahead.early, -(-K // config.k), sms, min(config.split, tiles - ahead.tiles), config.parts)
    left = tiles + ahead.early - plan.whole
    slots = left * (1 if plan.parts == 2 else plan.parts) + ahead.early
    of_own = (0, 0, 0) if own is None else own_strides(own, rows)
    of_a = (rows.a_batch, rows.a_row, a.stride(-1))
    strides = (*of_own, *of_a, *weight.stride(), rows.out_batch, rows.out_row, out.stride(-1))
    halved = config.n // 2 if config.halves else config.n
    return Call(
        device=device,
        programs=plan.programs,
        described=described,
        blocks=((config.m, config.k), (config.k, config.n), (config.m, halved), (config.m, config.k)),
        bias_step=0 if bias is None else bias.stride(0),
        block=block,
        schedule=(tiles - left, left, plan.parts) if slots else None,
        sums=slots * config.m * config.n,
        tickets=left + ahead.early,
        copies_own=copies_own,
        # With descriptors strides are not used, so new strides shall not mean a new compilation.
        sizes=(ahead.blocks, config.group, batches, M, N, K, *(strides if described is None else [0] * len(strides))),
        constants={
            "BM": config.m,
            "BN": config.n,
            "BK": config.k,
            "HALVES": config.halves,
            "DESCRIPTORS": described is not None,
            "B_IS_NK": described is not None and described[1].transposed,
            "BATCHED": batches > 1,
            "HAS_BIAS": bias is not None,
            "SPLIT": left > 0,
            "PAIRS": plan.parts == 2,
            "READY": ready is not None,
            "OWN": there,
            "FLAGS": 1 if ready is None else triton.next_power_of_2(ready.flags.numel()),
            "EARLY": ahead.early > 0,
            "BESIDE": beside > 0,
            "PRECISION": "tf32" if tf32 else "ieee",
            "EXACT": a.dtype == torch.float32 and not tf32,
            "RUN": max(1, EXACT_RUN // config.k),
        },
        options={"num_stages": config.stages, "num_warps": config.warps, **({"launch_pdl": True} if beside else {})},
    )


def _described(matrices: Matrices, rows: Rows, wanted: bool | None) -> list[Described] | None:
    """How TMA sees a, `[K, N]`, out and own; None where it is not `wanted`, or cannot unless it must."""
    if wanted is False:
        return None
    described = describe(*matrices, rows)
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
