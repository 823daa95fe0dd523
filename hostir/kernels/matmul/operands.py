"""Operands of a matmul: their checks, their rows as batches, and their TMA descriptors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from hostir.kernels.flags.ready import ReadyFlags
from hostir.kernels.layout import collapse, descriptor_strides, rows_or_copy, with_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPES_8_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Rows:
    """The leading axes of `a` and `out`, merged into `batches` batches of `M` rows, and their strides in elements."""

    batches: int
    M: int
    a_batch: int
    a_row: int
    out_batch: int
    out_row: int

    def in_batches(self, height: int) -> Rows:
        """Split the rows of a single batch into batches of `height` rows."""
        return replace(
            self,
            batches=self.M // height,
            M=height,
            a_batch=height * self.a_row,
            out_batch=height * self.out_row,
        )


def check(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, scaled: bool) -> None:
    """Raise TypeError or ValueError unless dtypes and shapes fit a matmul, or a scaled matmul if `scaled`."""
    dtypes = {name: t.dtype for name, t in (("a", a), ("b", b), ("out", out), ("bias", bias)) if t is not None}
    dtype_names = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    fits = {name: dtype in (DTYPES_8_BIT if name in "ab" else DTYPES) for name, dtype in dtypes.items()}
    if scaled and not all(fits.values()):
        expected = f"{', '.join(map(str, DTYPES_8_BIT))}, and out and bias of {', '.join(map(str, DTYPES))}"
        raise TypeError(f"a scaled matmul expects a and b of {expected}; got {dtype_names}")
    if not scaled and (a.dtype not in DTYPES or set(dtypes.values()) != {a.dtype}):
        raise TypeError(f"matmul expects one dtype of {', '.join(map(str, DTYPES))}; got {dtype_names}")
    if b.ndim != 2:
        raise ValueError(f"matmul expects b to have 2 axes, got shape {list(b.shape)}")
    K, N = b.shape
    wanted = f"[..., {K}] @ {[K, N]}"
    if a.ndim == 0 or a.shape[-1] != K:
        raise ValueError(f"matmul expects {wanted}, got a of shape {list(a.shape)}")
    if out.shape != (*a.shape[:-1], N):
        raise ValueError(f"{wanted} gives {[*a.shape[:-1], N]}, but out has shape {list(out.shape)}")
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"matmul expects a bias of shape {[N]}, got {list(bias.shape)}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out overlaps itself: shape {list(out.shape)}, strides {list(out.stride())}")


def check_own_rows(own_rows: torch.Tensor, a: torch.Tensor, block: int | None) -> None:
    """Raise TypeError or ValueError unless `own_rows` can replace one block of `a`."""
    if own_rows.dtype != a.dtype:
        raise TypeError(f"expected own rows of {a.dtype}, the dtype of a, got {own_rows.dtype}")
    if block is None:
        raise ValueError("own rows replace a block: expected flags of blocks (ready) as well")
    if own_rows.shape[-1:] != a.shape[-1:] or own_rows.shape[:-1].numel() != block:
        raise ValueError(f"expected own rows {[block, a.shape[-1]]}, got shape {list(own_rows.shape)}")


def place_own_rows(own_rows: torch.Tensor, a: torch.Tensor, ready: ReadyFlags) -> None:
    """Copy `own_rows` into block `ready.first` of `a`, on the current stream."""
    for place, rows in with_rows(a, a, ready.first, len(ready.flags), own_rows):
        place.copy_(rows)


def own_row_strides(own_rows: torch.Tensor, rows: Rows) -> tuple[int, int, int]:
    """Return the batch, row and column strides of `own_rows`. Its leading axes must merge into one axis."""
    row, column = rows_or_copy(own_rows).stride()
    return rows.M * row, row, column


def rows_of(a: torch.Tensor, out: torch.Tensor) -> Rows:
    """Return the leading axes of `a` and `out`, merged into batches of rows. Raises ValueError if they do not merge."""
    levels = collapse(a.shape[:-1], a.stride()[:-1], out.stride()[:-1])
    if len(levels) > 2:
        raise ValueError(
            f"the leading axes of a (shape {list(a.shape)}, strides {list(a.stride())}) and out (strides "
            f"{list(out.stride())}) do not merge into [batch, rows]; make both contiguous, or multiply slice by slice"
        )
    single = (1, 0, 0)
    (batches, a_batch, out_batch), (M, a_row, out_row) = (single, single, *levels)[-2:]
    return Rows(batches, M, a_batch, a_row, out_batch, out_row)


@dataclass(frozen=True)
class Described:
    """The layout of a TMA descriptor of a matrix or a batch of matrices.

    Fields:
        shape: the sizes, outermost first.
        strides: the strides in elements.
        transposed: True if this is the layout of the matrix's transpose.
    """

    shape: list[int]
    strides: list[int]
    transposed: bool = False

    def descriptor(self, tensor: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
        """Return a descriptor of `tensor`, which has the described layout, for tiles of shape `block`."""
        rows, columns = reversed(block) if self.transposed else block
        leading = [1] * (len(self.shape) - 2)
        return TensorDescriptor(tensor, self.shape, self.strides, [*leading, rows, columns])


def describe(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, own_rows: torch.Tensor | None, rows: Rows
) -> list[Described] | str:
    """Return the TMA layouts of `a`, `b` `[K, N]`, `out` and `own_rows`, or the reason why TMA cannot describe them."""
    K, N = b.shape
    transposed = isinstance(descriptor_strides(b, b.shape, b.stride()), str)
    seen = b.t() if transposed else b
    single = rows.batches == 1
    leading = (rows.batches, rows.M)[single:]
    matrices = {
        "a": (a, (*leading, K), (*(rows.a_batch, rows.a_row)[single:], a.stride(-1))),
        "b": (seen, seen.shape, seen.stride()),
        "out": (out, (*leading, N), (*(rows.out_batch, rows.out_row)[single:], out.stride(-1))),
    }
    if own_rows is not None:
        own_shape = (own_rows.shape[:-1].numel() // rows.M, rows.M)[single:] if rows.M else (0,)
        matrices["own_rows"] = (own_rows, (*own_shape, K), own_row_strides(own_rows, rows)[single:])
    described = []
    for name, (tensor, shape, strides) in matrices.items():
        legal = descriptor_strides(tensor, shape, strides) if 0 not in shape else "it holds nothing"
        if not isinstance(legal, str) and name == "out" and N * tensor.element_size() % 16:
            # Seen on an H200: TMA writes all of the last 16 bytes of a row, over memory that may be someone else's.
            legal = f"its rows of {N} elements end within 16 bytes"
        if isinstance(legal, str):
            return f"{name} (shape {list(tensor.shape)}, strides {list(tensor.stride())}): {legal}"
        described.append(Described(list(shape), legal, transposed and name == "b"))
    return described
