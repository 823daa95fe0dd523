"""The rows of one block of a tensor, where a computation goes block by block."""

from __future__ import annotations

import torch

from hostir.runtime.kernels.layout import rows, rows_or_copy


def block_of(x: torch.Tensor, other: torch.Tensor, block: int, blocks: int) -> list[torch.Tensor]:
    """The rows of one of equal blocks: one tensor where the rows of both tensors have one stride, else several.

    Tensors of equal leading axes are cut alike.
    """
    flat = rows(x)
    if flat is not None and rows(other) is not None:
        height = len(flat) // blocks
        return [flat[block * height : (block + 1) * height]]
    height = x.shape[:-1].numel() // blocks
    return _rows_of(x, block * height, (block + 1) * height)


def with_rows(
    out: torch.Tensor, a: torch.Tensor, block: int, blocks: int, own: torch.Tensor | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One of equal blocks of the rows of `out`, and the rows of `a`, or else of `own`, of which it is a product."""
    outs = block_of(out, a, block, blocks)
    if own is None:
        return list(zip(outs, block_of(a, out, block, blocks), strict=True))
    parts = rows_or_copy(own).split([part.shape[:-1].numel() for part in outs])
    return [(part, mine.view(*part.shape[:-1], own.shape[-1])) for part, mine in zip(outs, parts, strict=True)]


def with_all_rows(
    out: torch.Tensor, a: torch.Tensor, blocks: int, first: int, own: torch.Tensor | None = None
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """`with_rows` of every block, `own` for block `first`: in one go, for less of the host's time."""
    outs, parts = rows(out), rows(a)
    if outs is None or parts is None or not len(outs):
        return [with_rows(out, a, block, blocks, own if block == first else None) for block in range(blocks)]
    height = len(outs) // blocks
    pairs = list(zip(outs.split(height), parts.split(height), strict=True))
    if own is not None:
        pairs[first] = pairs[first][0], rows_or_copy(own)
    return [[pair] for pair in pairs]


def _rows_of(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """Rows `start` to `stop` of the flattened leading axes, as views of several axes."""
    inner = x.shape[1:-1].numel()
    if start == stop:
        return []
    if start % inner == 0 and stop % inner == 0:
        return [x[start // inner : stop // inner]]
    cuts = [
        (i, max(start - i * inner, 0), min(stop - i * inner, inner)) for i in range(start // inner, -(-stop // inner))
    ]
    return [part for i, low, high in cuts for part in _rows_of(x[i], low, high)]
