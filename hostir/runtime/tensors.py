"""What a caller gives that is no tensor, or none whose memory hostir can use as it is."""

from __future__ import annotations

from typing import NamedTuple

import torch

SHOWN = 60  # characters


class Odd(NamedTuple):
    """What a tensor is, and what to do."""

    what: str
    hint: str


def without_plain_memory(x: torch.Tensor) -> Odd | None:
    """What a tensor is whose elements do not lie in memory as shape and strides say; None for all others."""
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # a wrapper of other tensors
        hint = "pass what this rank has of it, .to_local()" if hasattr(x, "to_local") else "pass a plain one"
        return Odd(f"a {type(x).__name__}", hint)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return Odd("a tensor of torch.func", "call outside torch.vmap and its like")
    if torch.nn.parameter.is_lazy(x):
        return Odd("a parameter without a shape", "initialize it first")
    if x.is_nested:
        return Odd("a nested tensor", "pass a plain one")
    if x.layout is not torch.strided:
        return Odd(f"of layout {x.layout}", "pass it .to_dense()")
    if x.is_neg():
        return Odd("a view that negates its memory", "pass it .resolve_neg()")
    if x._is_zerotensor():
        return Odd("zeros without memory", "pass its .clone()")
    return None


def shown(x: object) -> str:
    """What is no tensor, in a line."""
    text = repr(x)
    fits = len(text) <= SHOWN and "\n" not in text
    return text if fits else f"of type {type(x).__module__}.{type(x).__qualname__}"
