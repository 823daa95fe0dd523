"""A persistent Triton matmul that reads and writes strided views in place.

Each program walks over tiles of the output, grouped so that neighbours share operands in L2 (the grouped ordering and
the persistent loop are those of Triton's tutorials). On Hopper and later, tiles move through TMA descriptors; storing a
large tile in two halves halves the staging buffer, which frees shared memory for one more pipeline stage. Where the
memory does not obey TMA's rules, masked loads through pointers serve any strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hostir.runtime.kernels.launch import INTERPRETED, check_device, launching, limits
from hostir.runtime.kernels.layout import collapse, descriptor_strides
from hostir.runtime.kernels.numerics import from_float32, to_float32
from hostir.runtime.kernels.tiles import INTERPRETER, Config, choose

EXACT_RUN = 64  # products of float32 that are summed up at a time
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _tile_position(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(batch, first row, first column) of output tile number `tile`: down a group of rows, then one tile right."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    batch = tile // (tiles_m * tiles_n)
    tile = tile % (tiles_m * tiles_n)
    first = tile // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return batch, (first + within % height) * BM, within // height * BN


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


@triton.jit(do_not_specialize=["batches", "M"])
def _matmul_kernel(
    a,  # DESCRIPTORS: descriptors of a, b (B_IS_NK: of its transpose) and out; else pointers
    b,
    out,
    bias,
    bias_step,
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
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,  # float32 on plain FMAs
    RUN: tl.constexpr,  # steps of BK that EXACT sums up at a time
):
    tiles = batches * tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        batch, row, column = _tile_position(tile, M, N, BM, BN, GROUP)
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


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transpose_b: bool = False,
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
        use_descriptors: move tiles with TMA descriptors. None: wherever the device and the memory allow it.
            True: always, or raise. False: never.
        config: the tile, instead of the one that `choose` finds.

    All tensors have one dtype, bfloat16, float16 or float32. float32 is multiplied exactly, or in TF32 on a GPU if
    `torch.backends.cuda.matmul` says so when called.

    Raises TypeError for a dtype, ValueError for a shape, a layout or a device that does not fit.
    """
    device = check_device(a=a, b=b, out=out, bias=bias)
    _check(a, b, out, bias, transpose_b)
    weight = b.t() if transpose_b else b
    K, N = weight.shape
    if out.numel() == 0:
        return out
    if K == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))

    (batches, a_batch, out_batch), (M, a_row, out_row) = _batch_and_rows(a, out)
    bounds = limits(device)
    described: list[_Described] | str | None = None
    if bounds.tma if use_descriptors is None else use_descriptors:
        described = _describe(a, weight, out, batches, M, (a_batch, a_row), (out_batch, out_row))
    if isinstance(described, str):
        if use_descriptors:
            raise ValueError(f"matmul cannot use TMA descriptors: {described}")
        described = None
    tf32 = a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if config is None and INTERPRETED:
        config = INTERPRETER
    elif config is None:
        config = choose(
            *(M, N, K, a.dtype, bounds.sms),
            batch=batches,
            descriptors=described is not None,
            tf32=tf32,
            shared_memory=bounds.shared_memory,
        )
    tiles = batches * -(-M // config.m) * -(-N // config.n)
    operands: list[torch.Tensor | TensorDescriptor] = [a, weight, out]
    strides = [a_batch, a_row, a.stride(-1), *weight.stride(), out_batch, out_row, out.stride(-1)]
    if described is not None:
        blocks = (config.m, config.k), (config.k, config.n), (config.m, config.n // 2 if config.halves else config.n)
        operands = [layout.descriptor(block) for layout, block in zip(described, blocks, strict=True)]
        strides = [0] * len(strides)  # not used, so new strides shall not mean a new compilation
    with launching(device):
        _matmul_kernel[(min(bounds.sms, tiles),)](
            *operands,
            bias,
            0 if bias is None else bias.stride(0),
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
            PRECISION="tf32" if tf32 else "ieee",
            EXACT=a.dtype == torch.float32 and not tf32,
            RUN=max(1, EXACT_RUN // config.k),
            num_stages=config.stages,
            num_warps=config.warps,
        )
    return out


def matmul_reference(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, transpose_b: bool = False
) -> torch.Tensor:
    """What `matmul` approximates: `[..., K] @ [K, N] (+ [N])` (or `[N, K]` when `transpose_b`), computed in float64."""
    product = a.double() @ (b.t() if transpose_b else b).double()
    return product if bias is None else product + bias.double()


def _check(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, transpose_b: bool) -> None:
    """Raise TypeError or ValueError unless dtypes and shapes make a matmul."""
    dtypes = {name: t.dtype for name, t in (("a", a), ("b", b), ("out", out), ("bias", bias)) if t is not None}
    if a.dtype not in DTYPES or set(dtypes.values()) != {a.dtype}:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"matmul expects one dtype of {', '.join(map(str, DTYPES))}; got {found}")
    if b.ndim != 2:
        raise ValueError(f"matmul expects b to have 2 axes, got shape {list(b.shape)}")
    N, K = b.shape if transpose_b else reversed(b.shape)
    wanted = f"[..., {K}] @ {'transposed ' if transpose_b else ''}{list(b.shape)}"
    if a.ndim == 0 or a.shape[-1] != K:
        raise ValueError(f"matmul expects {wanted}, got a of shape {list(a.shape)}")
    if out.shape != (*a.shape[:-1], N):
        raise ValueError(f"{wanted} gives {[*a.shape[:-1], N]}, but out has shape {list(out.shape)}")
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"matmul expects a bias of shape {[N]}, got {list(bias.shape)}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out overlaps itself: shape {list(out.shape)}, strides {list(out.stride())}")


def _batch_and_rows(a: torch.Tensor, out: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leading axes of `a` and `out` as `(batches, stride in a, stride in out)` and the same for rows."""
    levels = collapse(a.shape[:-1], a.stride()[:-1], out.stride()[:-1])
    if len(levels) > 2:
        raise ValueError(
            f"the leading axes of a (shape {list(a.shape)}, strides {list(a.stride())}) and out (strides "
            f"{list(out.stride())}) do not merge into [batch, rows]; make both contiguous, or multiply slice by slice"
        )
    single = (1, 0, 0)
    batch, row = (single, single, *levels)[-2:]
    return batch, row


@dataclass(frozen=True)
class _Described:
    """A matrix, or a batch of them, that obeys TMA's rules; `transposed` when the descriptor sees it transposed."""

    tensor: torch.Tensor
    shape: list[int]
    strides: list[int]
    transposed: bool = False

    def descriptor(self, block: tuple[int, int]) -> TensorDescriptor:
        """A descriptor for tiles of shape `block`, made anew for each launch: it must not outlive the tensor."""
        rows, columns = reversed(block) if self.transposed else block
        leading = [1] * (len(self.shape) - 2)
        return TensorDescriptor(self.tensor, self.shape, self.strides, [*leading, rows, columns])


def _describe(
    a: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    batches: int,
    M: int,
    a_strides: tuple[int, int],
    out_strides: tuple[int, int],
) -> list[_Described] | str:
    """How TMA sees `a`, `weight` `[K, N]` and `out`, or why it cannot."""
    K, N = weight.shape
    transposed = isinstance(descriptor_strides(weight, weight.shape, weight.stride()), str)
    seen = weight.t() if transposed else weight
    leading = (batches, M)[batches == 1 :]
    matrices = {
        "a": (a, (*leading, K), (*a_strides[batches == 1 :], a.stride(-1))),
        "b": (seen, seen.shape, seen.stride()),
        "out": (out, (*leading, N), (*out_strides[batches == 1 :], out.stride(-1))),
    }
    described = []
    for name, (tensor, shape, strides) in matrices.items():
        legal = descriptor_strides(tensor, shape, strides)
        if not isinstance(legal, str) and name == "out" and N * tensor.element_size() % 16:
            # Seen on an H200: the last 16 bytes of a row are written whole, over what may be someone else's memory.
            legal = f"its rows of {N} elements end within 16 bytes"
        if isinstance(legal, str):
            return f"{name} (shape {list(tensor.shape)}, strides {list(tensor.stride())}): {legal}"
        described.append(_Described(tensor, list(shape), legal, transposed and name == "b"))
    return described
