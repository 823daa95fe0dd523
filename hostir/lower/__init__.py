"""Lowering: passes turn a fusion into a host program. Each pass is a pure function of a program.

A strategy and its passes are loaded when a name of this package is first used. So importing this package is fast.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from hostir.ir.program import Program
    from hostir.lower.strategies import (
        AUTO,
        CALLS,
        STRATEGIES,
        STREAMS,
        HasProgram,
        Strategy,
        lower,
        passes_of,
        run_passes,
    )

__all__ = [
    "AUTO",
    "CALLS",
    "STRATEGIES",
    "STREAMS",
    "HasProgram",
    "Pass",
    "Strategy",
    "lower",
    "passes_of",
    "run_passes",
]


@dataclass(frozen=True)
class Pass:
    """A pure function of a program.

    The fields of a pass are its options. The first line of its docstring describes the pass in listings.
    """

    name: ClassVar[str]
    explicit_reshards: ClassVar[bool] = True  # after it, every change of sharding is explicit

    @abstractmethod
    def run(self, program: Program) -> Program:
        """Return the transformed program."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hostir.lower' has no attribute '{name}'")
    globals()[name] = getattr(import_module("hostir.lower.strategies"), name)  # later accesses find it directly
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
