"""Triton's interpreter, without work that takes two thirds of its time and changes nothing.

- For each launch, it goes through all members of the language's modules for the builtins that it wraps. Here it goes
  through the names that it found the first time.
- It wraps those that a function sees once more for each call within a launch. Here a launch wraps them all.
- It computes whether sums and products of integers overflow, and drops the result: only `debug` would look at it.
- It makes a dictionary of all types to look up one. Here each type is looked up once.
- It makes the type and the shape of every intermediate block anew. Here each type is made once, and has its shape.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter

builder = interpreter.interpreter_builder
assert not builder.options.debug  # else the overflows would be looked at


@cache
def builtins_of(part: Any) -> tuple[str, ...]:
    """Asked before anything is wrapped: what is wrapped is no builtin any more."""
    return tuple(name for name, member in inspect.getmembers(part) if is_builtin(member))


def patch_builtin(part: Any, *more: Any) -> None:
    for name in builtins_of(part):
        if is_builtin(member := getattr(part, name)):
            interpreter._patch_attr(part, name, member, *more)


def patch_all(patch: Any, fn: Any) -> Any:
    return patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def called_within_a_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


np_dtype = interpreter._get_np_dtype
np_dtype_of_elements = cache(np_dtype)


def np_dtype_looked_up_once(kind: Any) -> Any:
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return np_dtype(element) if isinstance(element, tl.pointer_type) else np_dtype_of_elements(element)


@cache
def block_type_made_once(element: Any, shape: tuple[int, ...]) -> Any:
    return block_type(element, list(shape))


@cache
def shape_made_once(shape: tuple[int, ...]) -> tuple[Any, tl.constexpr]:
    return tl.core.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(math.prod(shape))


def begin_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = shape_made_once(tuple(kind.shape) if kind.is_block() else ())


block_type = tl.block_type
tl.pointer_type.__hash__ = tl.dtype.__hash__
tl.block_type.with_element_ty = lambda self, element: block_type_made_once(element, tuple(self.shape))
builder.get_block_ty = lambda element, shape: block_type_made_once(element, tuple(shape))
tl.tensor.__init__ = begin_tensor
interpreter._patch_builtin = patch_builtin
interpreter._patch_lang = partial(patch_all, interpreter._patch_lang)
interpreter.InterpretedFunction.__call__ = called_within_a_launch
interpreter._get_np_dtype = np_dtype_looked_up_once
builder.options = replace(builder.options, sanitize_overflow=False)
