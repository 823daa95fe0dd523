"""What a user should know of a job that runs all the same: said once."""

from __future__ import annotations

import sys
import warnings

from hostir.ir.source import Diagnostic
from hostir.knobs import speaks


class FallbackWarning(UserWarning):
    """Something runs otherwise than was hoped, and slower."""


_told: set[tuple[str, str]] = set()


def warn_once(key: str, message: str, hint: str = "", category: type[Warning] = FallbackWarning) -> None:
    """Warns of a message once for a key, on rank 0 only, at the line of the user's call."""
    if not speaks() or (key, message) in _told:
        return
    _told.add((key, message))
    warnings.warn(str(Diagnostic(message, hint=hint, level="warning")), category, stacklevel=_depth())


def _depth() -> int:
    """How many frames up the user's code is, for a warning raised by the caller."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "hostir":
        depth, frame = depth + 1, frame.f_back
    return depth
