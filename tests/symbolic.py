"""Patterns with a symbolic number of rows, and layouts of inputs that are not contiguous."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import hostir as hi
from examples import patterns
from hostir.ir import HostIRError, Program
from hostir.kernels.dtypes import undefined
from hostir.lower import STRATEGIES

WIDTHS = {"K": 24, "N": 48, "H": 48}  # divisible by 1, 2, 3, 4 and 8 ranks with 2 slices


def weight_gradient(ranks: int = 4, M: int | str = "M", K: int = 24, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Return `x.T @ dy` with rows, the contracted axis, sharded."""
    with hi.Fusion("weight_gradient") as fusion:
        x, dy = hi.tensor("x", [M, K], dtype), hi.tensor("dy", [M, N], dtype)
        dw = hi.permute(x, (1, 0)) @ dy
        fusion.output(dw)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(0, mesh)
    dy.shard(0, mesh)
    dw.set_device_mesh(mesh)
    return fusion


PATTERNS: tuple[Callable[..., hi.Fusion], ...] = (*patterns.PATTERNS, *patterns.EXPERTS, weight_gradient)


def lowered(pattern: Callable[..., hi.Fusion], ranks: int, dtype: str = "f32") -> Iterator[tuple[Program, Program]]:
    """Yield the fusion with its program by each strategy that accepts it."""
    names = pattern.__code__.co_varnames[: pattern.__code__.co_argcount]
    arguments: dict[str, Any] = {"ranks": ranks, "S": 2, "M": "M", "dtype": dtype, **WIDTHS}
    fusion = pattern(**{name: value for name, value in arguments.items() if name in names})
    programs: list[Program] = []
    for strategy in STRATEGIES:
        with warnings.catch_warnings(), contextlib.suppress(HostIRError):  # a strategy that overlaps nothing refuses
            warnings.simplefilter("ignore")  # warnings about communications that are not overlapped
            streams = 1 if strategy == "chain" else None  # it takes any number of rows only if it cuts no blocks
            programs.append(hi.lower(fusion, strategy, streams))
    assert len(programs) >= 2, "sequential and pipeline accept all fusions"
    yield from ((fusion.program(), p) for p in programs)


# Layouts ----------------------------------------------------------------------------------------------------------
def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else x


def every_other_column(x: torch.Tensor) -> torch.Tensor:
    return _within(
        torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device), x, (..., slice(0, None, 2))
    )


def every_other_row(x: torch.Tensor) -> torch.Tensor:
    return _within(torch.empty(2 * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device), x, (slice(1, None, 2),))


def sliced(x: torch.Tensor) -> torch.Tensor:
    return _within(torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device), x, (..., slice(1, -2)))


def expanded(x: torch.Tensor) -> torch.Tensor:
    """Return the first row, expanded to the shape of `x`."""
    return x[:1].expand(x.shape)


LAYOUTS: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
    by_columns,
    every_other_column,
    every_other_row,
    sliced,
    expanded,
)


def _within(memory: torch.Tensor, x: torch.Tensor, where: Any) -> torch.Tensor:
    view = memory.fill_(undefined(memory.dtype))[where]
    return view.copy_(x)
