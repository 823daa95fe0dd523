"""Find tensors that hostir cannot use: tensors without plain strided memory, and tensors that overlap."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hostir.ir.regions import Region


class Odd(NamedTuple):
    """A kind of unsupported tensor, and a hint for the user. The kind is the end of a sentence "x is ..."."""

    what: str
    hint: str


def without_plain_memory(x: torch.Tensor) -> Odd | None:
    """Return the kind of a tensor without plain strided memory; None if the tensor has such memory."""
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


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two plain tensors of one device have a byte in common."""
    (low, high), (bottom, top) = _stretch(x), _stretch(y)
    if high <= bottom or top <= low:
        return False
    start = min(low, bottom)
    return _bytes_of(x, low - start).meets(_bytes_of(y, bottom - start))


def overlaps_itself(x: torch.Tensor) -> bool:
    """Return True if two elements of a tensor may share memory.

    They may share memory if the stride of some axis is not longer than the span of all axes with shorter strides.
    """
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach and x.numel():
            return True
        reach += (size - 1) * stride
    return False


def _stretch(x: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address after its last byte.

    The two are equal if the tensor has no elements.
    """
    start = x.data_ptr()
    if not x.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def _bytes_of(x: torch.Tensor, offset: int) -> Region:
    axes = [(size, stride * x.element_size()) for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    shape, strides = zip(*axes, (x.element_size(), 1), strict=True)
    return Region.of(offset, shape, strides)
