"""The work of a function as a number that is the same on every machine: the number of function calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(work: Callable[[], Any]) -> int:
    """Return the number of functions that run in `work()`, including `work` and functions of the interpreter."""
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" or (event == "c_call" and argument is not sys.setprofile)

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
