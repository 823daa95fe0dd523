"""Checks of whole programs: their structure, and of host programs the orders between all that they do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from hostir.ir.check.structure import check_structure, verify
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError


def check(
    program: Program, *, settled: bool = False, sizes: Mapping[str, int] | None = None, calls: int = 2
) -> list[Diagnostic]:
    """Every finding, in program order, warnings last; empty for a program that is right in every legal schedule.

    Args:
        program: of either phase. Only host programs whose structure is sound are looked at for races, deadlocks and
            misuse of memory.
        settled: as for `check_structure`.
        sizes: of symbols; those left out get small values.
        calls: how many calls follow each other.
    """
    found = check_structure(program, settled=settled)
    if found or program.phase is not Phase.HOST:
        return found
    from hostir.ir.check.orders import analyse  # loads numpy

    return analyse(program, sizes, calls).findings


def prove(program: Program, sizes: Mapping[str, int] | None = None) -> Program:
    """The program itself, or a HostIRError with all that `check` finds wrong with it. Warnings pass."""
    _prove(program, tuple(sorted((sizes or {}).items())))
    return program


@lru_cache(maxsize=256)
def _prove(program: Program, sizes: tuple[tuple[str, int], ...]) -> None:
    if wrong := [found for found in check(program, sizes=dict(sizes)) if found.level == "error"]:
        raise HostIRError(*wrong)


__all__ = ["check", "check_structure", "prove", "verify"]
