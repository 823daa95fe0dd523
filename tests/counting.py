"""The work of a function as a number that is the same on every machine: the number of function calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any


def calls_of(work: Callable[[], Any], *closed: CodeType) -> int:
    """Return the number of functions that run in `work()`, including `work` and functions of the interpreter.

    A function with code in `closed` counts as one, together with everything that it calls.
    """
    count = inside = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count, inside
        if not inside:
            count += event == "call" or (event == "c_call" and argument is not sys.setprofile)
        if frame.f_code in closed:
            inside += {"call": 1, "return": -1}.get(event, 0)

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
