"""Lowering: from a fusion to a host program, by named passes, each a pure function of a program.

The passes are loaded when one of the names below is first used: `import hostir.ir` does not wait for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hostir.lower.passes import Pass, run_passes
    from hostir.lower.strategies import AUTO, STRATEGIES, STREAMS, HasProgram, lower, passes_of

_LATER = {
    **dict.fromkeys(("Pass", "run_passes"), "hostir.lower.passes"),
    **dict.fromkeys(("AUTO", "STRATEGIES", "STREAMS", "HasProgram", "lower", "passes_of"), "hostir.lower.strategies"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hostir.lower' has no attribute '{name}'")
    globals()[name] = getattr(import_module(_LATER[name]), name)  # found at once from then on
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = ["AUTO", "STRATEGIES", "STREAMS", "HasProgram", "Pass", "lower", "passes_of", "run_passes"]
