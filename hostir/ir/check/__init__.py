"""Checks of whole programs: their structure, and of host programs the orders between all that they do."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache

from hostir.ir.check.structure import check_structure, verify
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import UNCHECKED, Diagnostic, HostIRError


def check(
    program: Program, *, settled: bool = False, sizes: Mapping[str, int] | None = None, calls: int | None = None
) -> list[Diagnostic]:
    """Every finding, in program order, warnings last; empty for a program that is right in every legal schedule.

    That a program could not be looked at for races is an error, of kind `unchecked`.

    Args:
        program: of either phase. Only host programs whose structure is sound are looked at for races, deadlocks and
            misuse of memory.
        settled: as for `check_structure`.
        sizes: of symbols; those left out get small values.
        calls: how many calls follow each other; unless given, as many as show what any number would.
    """
    found = check_structure(program, settled=settled)
    if found:
        return found
    return _orders(program, sizes, calls)


def _orders(program: Program, sizes: Mapping[str, int] | None, calls: int | None = None) -> list[Diagnostic]:
    """Findings about a program of sound structure."""
    if program.phase is not Phase.HOST:
        return []
    from hostir.ir.check.orders import look  # loads numpy

    return look(program, sizes, calls).findings


def prove(program: Program, sizes: Mapping[str, int] | None = None) -> Program:
    """The program itself, or a HostIRError with all that `check` finds wrong with it. Warnings pass.

    What is too long to be looked at, or has no small sizes, passes as well, with a RuntimeWarning.
    """
    for unchecked in _prove(program, tuple(sorted((sizes or {}).items()))):
        warnings.warn(f"{unchecked.message} ({unchecked.hint})", RuntimeWarning, stacklevel=2)
    return program


@lru_cache(maxsize=256)
def _prove(program: Program, sizes: tuple[tuple[str, int], ...]) -> tuple[Diagnostic, ...]:
    verify(program)
    errors = [found for found in _orders(program, dict(sizes)) if found.level == "error"]
    if wrong := [found for found in errors if found.kind != UNCHECKED]:
        raise HostIRError(*wrong)
    return tuple(errors)


__all__ = ["check", "check_structure", "prove", "verify"]
