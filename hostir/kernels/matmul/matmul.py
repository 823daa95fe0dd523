"""The host side of a persistent Triton matmul, which reads strided views without copies.

Each program loops over tiles of the output. Tiles are grouped so that neighbours share operands in L2; the grouped
order and the persistent loop follow Triton's tutorials. Each of the last tiles may be split along K among several
programs. Each tile of the first blocks of rows may be split between two programs (hostir.kernels.matmul.kernel).

On Hopper and later, tiles move through TMA descriptors. A large tile is stored in two halves: that halves the staging
buffer, which leaves shared memory for one more pipeline stage. If a tensor breaks TMA's rules, the kernel uses masked
loads through pointers, which take any strides.

Rows of the first operand may still arrive while the kernel runs: see hostir.kernels.flags.ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton

from hostir.kernels.devices import (
    INTERPRETED,
    TooLargeError,
    check_device,
    limits,
    only_loads,
)
from hostir.kernels.flags.copies import PushKernel
from hostir.kernels.flags.done import DoneFlags, done_layout, done_rows
from hostir.kernels.flags.pushed import pushed_rows
from hostir.kernels.flags.ready import ReadyFlags, block_rows, ready_layout
from hostir.kernels.layout import launch_layout, rows_or_copy
from hostir.kernels.matmul.estimate import choose, rounded_up
from hostir.kernels.matmul.kernel import Constants, Strides
from hostir.kernels.matmul.operands import (
    DTYPES_8_BIT,
    Described,
    Rows,
    check,
    check_own_rows,
    describe,
    own_row_strides,
    place_own_rows,
    rows_of,
)
from hostir.kernels.matmul.prepared import MatmulCall, MatmulLaunch
from hostir.kernels.matmul.schedule import Grid
from hostir.kernels.matmul.tiles import INTERPRETER, MIN_OWN_ROWS, SCALE_BLOCK, Gemm, Tile, candidates
from hostir.kernels.matmul.workspaces import LINE
from hostir.kernels.parameters import TAPING
from hostir.kernels.repeats import Again
from hostir.kernels.scales import FlatScales, of_blocks

EXACT_RUN = 64  # float32 products per partial sum

_MAX_LAUNCHES = 4096
_launches: dict[tuple[object, ...], MatmulLaunch] = {}  # prepared launches, by everything that they depend on


class _Options(NamedTuple):
    """Options of a product: the arguments of `multiply` that are neither tensors nor flags.

    `tf32` is True if float32 is multiplied in TF32.
    """

    use_descriptors: bool | None
    tile: Tile | None
    tf32: bool
    adds: bool


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transpose_b: bool = False,
    ready: ReadyFlags | None = None,
    done: DoneFlags | None = None,
    own_rows: torch.Tensor | None = None,
    use_descriptors: bool | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute `out[..., N] = a[..., K] @ b (+ bias)`, accumulated in float32, on the current stream; return `out`.

    Args:
        a: `[..., K]`. The leading axes of `a` and `out` must merge in the same way: into one axis of rows, or into two
            axes `[batch, rows]`. Each merged axis may have any stride. Neither tensor is copied. K may have any stride.
        b: `[K, N]`, or the weight `[N, K]` if `transpose_b` is True. It may have any strides.
        out: `[..., N]` with the leading axes of `a`. It is overwritten, and must overlap neither itself nor another
            argument.
        bias: `[N]`, added before rounding.
        ready: flags for equal blocks of the flattened rows of `a`, which may still arrive. A tile begins when its rows
            are ready. Tiles are computed in the order of their blocks, from `ready.first` on. If blocks are lower than
            a tile, or `a` has several batches, a tile may span several blocks: it waits for all of them. With the same
            tile and the same splits, results are bitwise equal to a matmul without flags. If a block does not arrive,
            the kernel reports it in `ready.timeouts`. The tiles that need the block are then not written. The tiles
            that the same programs would have computed later are not written either. But split tiles are always written.
            They are computed from the data that is in the block's memory.
        done: completion flags for equal blocks of the flattened rows of `out`. The kernel raises each flag once its
            block is stored. Tiles are computed in the order of their blocks, from `done.first` on. But with `ready`,
            they are computed in the order of the blocks of `ready`. A tile may span several blocks. With the same tile
            and the same splits, results are bitwise equal to a matmul without flags. If rows that `ready` waits for do
            not arrive, the flags of the blocks that need these rows do not rise.
        own_rows: `[..., K]`, rows that replace block `ready.first`. The kernel does not wait for this block. If there
            are few rows, or no TMA descriptor can describe them, they are copied to their place in `a`. Otherwise they
            are read in place, and no tile spans several blocks. Then each block must consist of complete batches of
            rows, or all rows must be one batch.
        use_descriptors: True to move tiles with TMA descriptors, and to raise if this is not possible. False to use no
            descriptors. None to use them if the device and the layouts allow it.
        tile: the tile to use instead of the one that `choose` returns.

    All tensors have the same dtype: bfloat16, float16 or float32. float32 is multiplied exactly. But on a GPU it is
    multiplied in TF32 if `torch.backends.cuda.matmul` allows this at the time of the call. If `out` is empty, the
    kernel waits for no flags and raises none. Results repeat bit for bit.

    Raises TypeError for a dtype, and ValueError for a shape, a layout, a device, flags or a tile that do not fit.
    Raises TooLargeError if the kernel needs more shared memory or threads than the GPU has. If `tile` is None, it is
    raised only if the kernel is too large with every tile.
    """
    multiply(
        *(a, b.transpose(0, -1) if transpose_b else b, out),
        bias=bias,
        ready=ready,
        done=done,
        own_rows=own_rows,
        use_descriptors=use_descriptors,
        tile=tile,
    )
    return out


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ready: ReadyFlags | None = None,
    done: DoneFlags | None = None,
    own_rows: torch.Tensor | None = None,
    use_descriptors: bool | None = None,
    tile: Tile | None = None,
    scales: FlatScales | None = None,
    adds: bool = False,
    pushed: PushKernel | None = None,
) -> Again | None:
    """Compute the same as `matmul`, and return a function that repeats the call for the same layouts and addresses.

    Returns None if the call cannot be repeated like this: in the interpreter, if the call took more than one launch,
    and for float32, because torch's setting for TF32 may change.

    Args:
        scales: the scales of 8-bit operands.
        adds: True to add the product to the old values of `out`. The sum is rounded once.
        pushed: copies of pieces of `out` to peers. Each piece consists of complete rows. The kernel stores the pieces
            from registers, and raises the flags of the pieces when it ends. `out` must be contiguous, and `ready` and
            `done` must be None.

    `b` is `[K, N]`. The other arguments are as in `matmul`.
    """
    wide, moved = a.dtype == torch.float32, False
    tf32 = wide and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if wide and TAPING.writer is not None:
        TAPING.writer.incomplete()  # a later call may have another setting
    if own_rows is not None and not own_rows.is_contiguous():
        own_rows, moved = rows_or_copy(own_rows), True
    call = MatmulCall(a, b, out, own_rows, bias, scales, ready, done, pushed)
    options = _Options(use_descriptors, tile, tf32, adds)
    layouts = (
        *(launch_layout(a), launch_layout(b), launch_layout(out), launch_layout(own_rows), launch_layout(bias)),
        None if scales is None else (launch_layout(scales.of_a), launch_layout(scales.of_b), scales.fast),
        *(ready_layout(ready), done_layout(done), None if pushed is None else pushed.layout, options),
    )
    launch = _launches.get(layouts)
    if launch is None:
        launch = _loaded(call, options)
        if launch is None:
            assert ready is None or ready.ending is None, "a kernel must end the call"
            if not adds:
                _write_empty_product(out, bias)
            if pushed is not None:
                pushed(out)
            return None
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        _launches[layouts] = launch
    if own_rows is not None and launch.copies_own:
        assert ready is not None
        place_own_rows(own_rows, a, ready)
        call, moved = call._replace(own_rows=None), True
    if only_loads():
        return None
    again = launch.launch(call)
    return None if wide or moved else again


def _write_empty_product(out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Write the result of a matmul that needs no kernel: zeros or the bias."""
    if bias is None:
        out.zero_()
    else:
        out.copy_(bias.expand_as(out))


def _dtype_name(t: torch.Tensor, tf32: bool, stepwise: bool) -> str:
    """Return the name that `Gemm.dtype` uses for the dtype of an operand.

    If `tf32` is True, the name of float32 is `tf32` instead of `f32`. If `stepwise` is True, the name of an 8-bit dtype
    is `f8s` instead of `f8`.
    """
    if t.dtype in DTYPES_8_BIT:
        return "f8s" if stepwise else "f8"
    return {torch.bfloat16: "bf16", torch.float16: "f16"}.get(t.dtype, "tf32" if tf32 else "f32")


def _loaded(call: MatmulCall, options: _Options) -> MatmulLaunch | None:
    """Prepare a launch and load its kernel. Return None if no kernel is needed.

    No kernel is needed if `out` is empty, or if K is 0 and there are no flags.

    If the kernel is too large for the GPU, the best of the other tiles is tried. All ranks with the same layouts end up
    with the same tile. Raises TooLargeError if the kernel is too large with every tile.
    """
    too_large: dict[Tile, TooLargeError] = {}
    while True:
        launch = _prepare(call, options, too_large)
        if launch is None or INTERPRETED:
            return launch
        assert launch.tile.unsplit not in too_large, "a tile that is too large is not taken again"
        try:
            launch.load(call._replace(own_rows=None) if launch.copies_own else call)
        except TooLargeError as problem:
            if options.tile is not None:
                raise
            too_large[launch.tile.unsplit] = problem
        else:
            return launch


def _prepare(call: MatmulCall, options: _Options, too_large: Mapping[Tile, TooLargeError]) -> MatmulLaunch | None:
    """Prepare a launch with a tile that is not in `too_large`. Return None if no kernel is needed."""
    a, b, out, own_rows, bias, scales, ready, done, pushed = call
    use_descriptors, tile, tf32, adds = options
    scale_a, scale_b, fast = scales or (None, None, False)
    device = check_device(a=a, b=b, out=out, bias=bias, own_rows=own_rows, scale_a=scale_a, scale_b=scale_b)
    check(a, b, out, bias, scales is not None)
    block = None if ready is None else block_rows(ready, out)
    raised_block = None if done is None else done_rows(done, out)
    if pushed is not None and (ready is not None or done is not None):
        raise ValueError("a matmul that copies to peers cannot wait for flags (ready), or raise flags of blocks (done)")
    pushed_block = None if pushed is None else pushed_rows(pushed, out)
    has_own = own_rows is not None
    if own_rows is not None:
        check_own_rows(own_rows, a, block)
        if own_rows.shape[:-1].numel() < MIN_OWN_ROWS:
            own_rows = None
    K, N = b.shape
    if out.numel() == 0 or (K == 0 and ready is None and done is None):
        return None
    rows = rows_of(a, out)
    if own_rows is not None and block and rows.batches > 1 and block % rows.M:
        raise ValueError(f"expected own rows that are complete batches of {rows.M} rows, got {block} rows")
    bounds = limits(device)
    if scales is not None and not bounds.fp8:
        raise ValueError(f"a scaled matmul needs tensor cores for 8-bit floats: {device} has none")
    if not bounds.tma:
        if use_descriptors:
            raise ValueError(f"matmul cannot use TMA descriptors: {device} has no TMA")
        use_descriptors = False
    described = _described((a, b, out, own_rows), rows, use_descriptors)
    if described is None and own_rows is not None and use_descriptors is None:
        described = _described((a, b, out, None), rows, None)
        own_rows = own_rows if described is None else None
    copies_own = has_own and own_rows is None
    # Programmatic dependent launch came with TMA, on Hopper. A copy of `own_rows` would run between the previous kernel
    # and this one, so the two could not overlap.
    overlapped = ready.overlapped_sms if ready is not None and bounds.tma and not copies_own else 0
    sms = max(1, bounds.sms - overlapped - (0 if ready is None else ready.reserved_sms))
    blockwise = scales is not None and of_blocks(scales, N)
    stepwise = scales is not None and not fast
    name, result = _dtype_name(a, tf32, stepwise or blockwise), out.element_size()
    gemm = Gemm(rows.M, N, K, name, rows.batches, block, own_rows is not None, overlapped > 0, result)
    if tile is None and INTERPRETED:
        tile = INTERPRETER
    elif tile is None:
        every = candidates(
            gemm.dtype,
            descriptors=described is not None,
            shared_memory=bounds.shared_memory,
            result=result,
            adds=adds,
        )
        fitting = tuple(t for t in every if t not in too_large)
        if not fitting:
            raise too_large[every[-1]]
        tile = choose(rounded_up(gemm, fitting), sms, fitting)
    if blockwise and (SCALE_BLOCK % tile.n or SCALE_BLOCK % tile.k):
        raise ValueError(f"scales of blocks need tiles whose columns and steps divide {SCALE_BLOCK}, got {tile}")
    grid = Grid.of(tile, gemm)
    if grid.rows != rows.M:
        rows = rows.in_batches(grid.rows)
        described = _described((a, b, out, own_rows), rows, use_descriptors)
    plan = grid.schedule(tile, sms)
    left = grid.tiles + grid.early - plan.unsplit
    slots = left * (1 if plan.parts == 2 else plan.parts) + grid.early
    strides = Strides(None, None, None, None)
    if described is None:
        of_a, of_out = (rows.a_batch, rows.a_row, a.stride(-1)), (rows.out_batch, rows.out_row, out.stride(-1))
        strides = Strides(
            None if own_rows is None else own_row_strides(own_rows, rows), of_a, tuple(b.stride()), of_out
        )
    halved = tile.n // 2 if tile.halves else tile.n
    tickets, group = left + grid.early, tile.group
    counts = -(-tickets // LINE) * LINE
    if done is not None:
        assert raised_block is not None
        tickets = counts + 2 * len(done.flags)
        high = -(-raised_block // tile.m)  # rows of tiles in a block. The groups of a block get about equal heights.
        group = -(-high // -(-high // group))
    return MatmulLaunch(
        tile=tile,
        device=device,
        programs=plan.programs,
        described=described,
        blocks=((tile.m, tile.k), (tile.k, tile.n), (tile.m, halved), (tile.m, tile.k)),
        bias_step=0 if bias is None else bias.stride(0),
        scale_steps=() if scales is None else (*scales.of_a.stride(), *scales.of_b.stride()),
        block=block,
        raised_block=raised_block,
        schedule=(grid.tiles - left, left, plan.parts) if slots else None,
        sums=slots * tile.m * tile.n,
        tickets=tickets,
        counts=counts,
        pushed_block=pushed_block,
        copies_own=copies_own,
        sizes=(grid.early_blocks, group, grid.batches, grid.rows, N, K),
        strides=strides,
        constants=Constants(
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            HALVES=tile.halves,
            DESCRIPTORS=described is not None,
            B_IS_NK=described is not None and described[1].transposed,
            BATCHED=grid.batches > 1,
            HAS_BIAS=bias is not None,
            SPLIT=left > 0,
            PAIRS=plan.parts == 2,
            READY=ready is not None,
            OWN=has_own,
            FLAGS=1 if ready is None else triton.next_power_of_2(ready.flags.numel()),
            EARLY=grid.early > 0,
            DONE=0 if not raised_block else triton.next_power_of_2(grid.span(tile, raised_block)),
            OVERLAPS=overlapped > 0,
            PRECISION="tf32" if tf32 else "ieee",
            EXACT=gemm.dtype == "f32",
            RUN=max(1, EXACT_RUN // tile.k),
            SCALES="" if scales is None else "blocks" if blockwise else "rows",
            STEPWISE=stepwise,
            PUSHED=0 if pushed is None else triton.next_power_of_2(pushed.count),
            ALIGNED=pushed is not None and pushed.layout[2],
            ADDS=adds,
            ENDS=0 if ready is None else ready.ends,
        ),
        options={"num_stages": tile.stages, "num_warps": tile.warps, **({"launch_pdl": True} if overlapped else {})},
    )


def _described(
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], rows: Rows, wanted: bool | None
) -> list[Described] | None:
    """Return the TMA layouts of a, b, out and `own_rows`, or None if the kernel must use pointers.

    `wanted` is the argument `use_descriptors` of `matmul`. Raises ValueError if it is True and TMA's rules do not allow
    descriptors.
    """
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
    """Return `a @ b (+ bias)` in float64, the reference for `matmul`. `b` is `[N, K]` if `transpose_b`."""
    product = a.double() @ (b.t() if transpose_b else b).double()
    return product if bias is None else product + bias.double()
