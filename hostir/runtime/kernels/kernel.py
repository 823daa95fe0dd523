"""What a kernel is, and how one that an operation of a plan calls again and again costs the host little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Again = Callable[[], None]
Kernel = Callable[..., Again | None]  # f(out, *operands, **options)

KEPT = 64  # sets of addresses


def repeating(kernel: Kernel, **options: Any) -> Callable[..., None]:
    """A kernel for one operation, which is given tensors of the same layouts in every call.

    A kernel may return what does the same again for such tensors at the same addresses, on the stream that is current
    then; it holds none of them. Where they lie where they have lain before, that is all that is called.
    """
    known: dict[tuple[int, ...], Again] = {}

    def call(*tensors: torch.Tensor | None) -> None:
        where = tuple([0 if x is None else x.data_ptr() for x in tensors])
        again = known.get(where)
        if again is not None:
            again()
        elif (again := kernel(*tensors, **options)) is not None:
            if len(known) >= KEPT:
                known.clear()
            known[where] = again

    return call
