"""The native launcher, which runs segments of tapes in C.

Triton builds it from `launcher.c`, with the same C compiler that Triton itself needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostir.ir.source import warn_once
from hostir.machines.cuda.tape import Segment

SOURCE = Path(__file__).with_name("launcher.c")
DRIVER = "libcuda.so.1"


class DriverError(RuntimeError):
    """The error of a failed driver call of a tape.

    Fields:
        place: the field `place` of the `TapeEntry` that failed.
    """

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


def build() -> Any:
    """Return the launcher's module. Triton builds it, or takes it from its cache."""
    import triton.backends.nvidia
    from triton.runtime.build import compile_module_from_src

    headers = Path(triton.backends.nvidia.__file__).parent / "include"
    return compile_module_from_src(SOURCE.read_text(), "hostir_launcher", include_dirs=[str(headers)])


@functools.cache
def launcher(driver: str = DRIVER) -> Any:
    """Return the launcher's module, in which the driver's library is open.

    Returns None and warns once if the module cannot be built, or if the library cannot be opened.
    """
    try:
        module = build()
        module.open(driver, DriverError)
    except Exception as problem:  # whatever a compiler, Triton or the loader raises
        reason = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else 'no reason'}"
        message = f"Calls are issued by Python, which takes longer: the native launcher cannot be built ({reason})."
        warn_once(("native launcher", reason), message, "HOSTIR_NATIVE=0 says so without this warning")
        return None
    return module


def native(module: Any, segment: Segment, streams: tuple[int, ...]) -> Callable[[list[Any]], None]:
    """Return a function that issues a segment. Its argument is a list of registers, which hold tensors or addresses.

    The number of a slot is the number of a register. The function raises DriverError for the first entry that fails.
    It makes the CUDA context current in which `native` is called.

    Args:
        module: the result of `launcher`.
        segment: the segment.
        streams: the handle of each stream of the tape.
    """
    run: Callable[[list[Any]], None] = module.Tape(segment.rows, segment.patches, segment.slots, streams).run
    return run
