"""Poisoned memory and error bounds, shared by the kernel tests in the interpreter and on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from hostir.kernels.devices import limits
from hostir.kernels.matmul import matmul as matmul_module
from hostir.kernels.matmul.matmul import matmul, matmul_reference
from hostir.kernels.matmul.tiles import Tile, candidates
from hostir.kernels.reduce import reduce_sum, reduce_sum_reference


def embedded(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    order: Sequence[int] | None = None,
    pad: Sequence[int] | None = None,
    offset: int = 0,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a view of `shape` inside a larger buffer full of NaN, and that buffer.

    `order` lists the axes from outermost to innermost in memory, `pad` adds unused elements to each axis, and `offset`
    comes before the first element.
    """
    order = range(len(shape)) if order is None else order
    pad = [0] * len(shape) if pad is None else pad
    sizes = [shape[axis] + pad[axis] for axis in order]
    buffer = torch.full((offset + math.prod(sizes),), math.nan, dtype=dtype, device=device)
    view = buffer[offset:].view(sizes).permute([list(order).index(axis) for axis in range(len(shape))])
    for axis, size in enumerate(shape):
        view = view.narrow(axis, 0, size)
    return view, buffer


def filled(
    shape: Sequence[int], dtype: torch.dtype, *, integers: bool = False, device: str = "cpu", **layout: object
) -> torch.Tensor:
    """Return a view with the layout of `embedded`, filled with random numbers (small integers if `integers`)."""
    view, _ = embedded(shape, dtype, device=device, **layout)
    if integers:
        return view.copy_(torch.randint(-4, 5, tuple(shape), device=device))
    return view.copy_(torch.randn(tuple(shape), device=device))


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the distance between neighbouring numbers of `dtype` at `value`."""
    return 2.0 ** math.floor(math.log2(value)) * torch.finfo(dtype).eps if value else torch.finfo(dtype).tiny


def assert_as_accurate(ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that the largest error of `ours` is at most 1.1 times the largest error of `torchs`, plus one unit.

    If few sums cancel, luck decides which float32 accumulation is more accurate. So another unit of float32 at the
    largest `magnitude` is allowed.
    """
    if exact.numel() == 0:
        return
    error = (ours.double() - exact).abs().max().item()
    unit = ulp(exact.abs().max().item(), ours.dtype) + ulp(magnitude.max().item(), torch.float32)
    allowed = 1.1 * (torchs.double() - exact).abs().max().item() + unit
    assert error <= allowed, f"largest error {error}, allowed {allowed}"


def assert_only_view_written(view: torch.Tensor, buffer: torch.Tensor) -> None:
    """Assert that all of `view` is finite, and that the rest of its `buffer` still holds NaN."""
    assert view.isfinite().all()
    assert buffer.isnan().sum().item() == buffer.numel() - view.numel()


@contextlib.contextmanager
def user_allows(setting: str, allowed: bool) -> Iterator[None]:
    """Set one of torch's settings for cuBLAS within the context."""
    before = getattr(torch.backends.cuda.matmul, setting)
    setattr(torch.backends.cuda.matmul, setting, allowed)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, setting, before)


def tiles_of(dtype: torch.dtype, *, descriptors: bool, adds: bool = False) -> tuple[Tile, ...]:
    """Return the candidate tiles for operands of a torch dtype; `adds` as in `multiply`."""
    names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    return candidates(names[dtype], descriptors=descriptors, adds=adds)


@contextlib.contextmanager
def multiprocessors(sms: int) -> Iterator[None]:
    """Make `matmul` use only `sms` SMs within the context. It then also launches at most `sms` programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_module, "limits", lambda device: dataclasses.replace(limits(device), sms=sms))
        patch.setattr(matmul_module, "_launches", {})  # launches prepared before use other SMs
        yield


def parts() -> int:
    """Return the number of parts of split tiles in the last prepared matmul; 0 if no tile is split."""
    call = [*matmul_module._launches.values()][-1]
    count = 0 if call.schedule is None else call.schedule[2]
    assert (count > 0, count == 2) == (call.constants.SPLIT, call.constants.PAIRS)
    return count


def programs_of_last() -> int:
    """Return the number of programs of the last prepared matmul."""
    return [*matmul_module._launches.values()][-1].programs


def check_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    buffer: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transpose_b: bool = False,
    use_descriptors: bool | None = None,
    tile: Tile | None = None,
) -> None:
    """Run `matmul` into `out` and compare it with torch and float64."""
    result = matmul(a, b, out, bias=bias, transpose_b=transpose_b, use_descriptors=use_descriptors, tile=tile)
    assert result is out
    assert_only_view_written(out, buffer)
    # torch gets copies: on a CPU, its bfloat16 product of padded matrices reads the NaN between their rows.
    weight = (b if transpose_b else b.t()).contiguous()
    plain = torch.nn.functional.linear(a.contiguous(), weight, bias)
    exact = matmul_reference(a, b, bias=bias, transpose_b=transpose_b)
    magnitude = matmul_reference(a.abs(), b.abs(), bias=None if bias is None else bias.abs(), transpose_b=transpose_b)
    assert_as_accurate(out, plain, exact, magnitude)


def check_reduce_sum(x: torch.Tensor, out: torch.Tensor, buffer: torch.Tensor, axis: int) -> None:
    """Run `reduce_sum` into `out` and compare it with torch and float64."""
    assert reduce_sum(x, out, axis) is out
    assert_only_view_written(out, buffer)
    assert_as_accurate(out, x.sum(axis), reduce_sum_reference(x, axis), reduce_sum_reference(x.abs(), axis))
