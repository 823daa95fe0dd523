"""Kernels of the table, and calls of a kernel that can be repeated without checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass


ATEN = "use ATen: kernels='aten' in Python, --kernels aten on the command line"


# Kernels, and repeated calls of one at little host time.

Again = Callable[[], None]
Kernel = Callable[..., Again | None]  # f(out, *operands, **options)

MAX_REPEATS = 64  # sets of addresses that `repeating` remembers


def repeating(kernel: Kernel, **options: Any) -> Callable[..., None]:
    """Return a cached form of a kernel, for calls whose tensors have the same layouts every time.

    A kernel may return a function that repeats the call for such tensors at the same addresses, on the stream that is
    then current; it holds no reference to them. A call at known addresses calls only this function.
    """
    known: dict[tuple[int, ...], Again] = {}

    def call(*tensors: torch.Tensor | None) -> None:
        where = tuple([0 if x is None else x.data_ptr() for x in tensors])
        again = known.get(where)
        if again is not None:
            again()
        elif (again := kernel(*tensors, **options)) is not None:
            if len(known) >= MAX_REPEATS:
                known.clear()
            known[where] = again

    return call
