"""Torch's own kernels of operators that `hostir.torch.install` takes over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_kept: dict[tuple[str, str], Callable[..., Any]] = {}  # torch's kernels, by operator and type of device


def keep(name: str) -> None:
    """Keep torch's kernels of an operator of `torch.ops.symm_mem`, before other kernels take their places."""
    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key):
            kernel = torch.library.get_kernel(f"symm_mem::{name}", key)
            _kept[name, key.name.lower()] = partial(kernel.call_boxed, torch._C.DispatchKeySet(key))


def drop() -> None:
    """Drop the kept kernels, because torch's kernels are in place again."""
    _kept.clear()


def is_kept(name: str, device: torch.device) -> bool:
    """Return True if a kernel of torch's is kept for this operator and this type of device."""
    return (name, device.type) in _kept


def own(name: str) -> Callable[..., Any]:
    """Return a function that runs torch's own kernel of an operator of `torch.ops.symm_mem`.

    It does so both before and after another kernel has taken the place of torch's kernel.
    """
    overload = getattr(torch.ops.symm_mem, name).default
    return lambda x, *args: _kept.get((name, x.device.type), overload)(x, *args)
