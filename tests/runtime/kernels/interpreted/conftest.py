"""Triton's interpreter, without a search that takes a quarter of its time and finds the same every time.

For each launch, and for each call of a function within one, it goes through all members of the language's modules for
the builtins that it wraps. Here it goes through the names that it found the first time.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def builtins_of(part: Any) -> tuple[str, ...]:
    """Asked before anything is wrapped: what is wrapped is no builtin any more."""
    return tuple(name for name, member in inspect.getmembers(part) if is_builtin(member))


def patch_builtin(part: Any, *more: Any) -> None:
    for name in builtins_of(part):
        if is_builtin(member := getattr(part, name)):
            interpreter._patch_attr(part, name, member, *more)


interpreter._patch_builtin = patch_builtin
