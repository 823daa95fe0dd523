"""Check programs: the structure of every program, and the order of all events of a host program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from hostir.check.limits import MAX_CALLS, check_calls
from hostir.check.signature import Signature, SizesKey, forget_forms
from hostir.check.structure import check_structure, verify
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import UNCHECKED, Diagnostic, HostIRError


def check(
    program: Program, *, explicit: bool = False, sizes: Mapping[str, int] | None = None, calls: int | None = None
) -> list[Diagnostic]:
    """Return all errors and warnings about a program: first the errors, then the warnings, both in program order.

    The list is empty if the program is correct in every order in which its streams and ranks may run. If the program
    cannot be checked for races, the list has an error of category `unchecked`.

    Args:
        program: a fusion or a host program. A host program without structural errors is also checked for races,
            deadlocks and misuse of memory.
        explicit: True to require that a fusion states every change of sharding (see `check_structure`).
        sizes: values of symbols. Symbols that are left out get small values.
        calls: the number of consecutive calls to check. By default, this is the number that is enough to find every
            error that any number of calls can have.
    """
    findings = check_structure(program, explicit=explicit)
    if findings or program.phase is not Phase.HOST:
        return findings or program.misfits(sizes or {})
    from hostir.check.proof import analyse_quickly  # loads numpy

    return analyse_quickly(program, sizes, calls).findings


def prove(program: Program, sizes: Mapping[str, int] | None = None) -> Program:
    """Return the program if `check` finds no errors in it; otherwise raise a HostIRError with all errors.

    Warnings do not count as errors. A program that cannot be checked counts as wrong. A proof is cached for all sizes
    that it covers (see `hostir.check.signature`). A later call with any of these sizes takes about 100 us.

    Args:
        program: a fusion or a host program.
        sizes: values of symbols. Symbols that are left out get small values.
    """
    verify(program)
    if program.phase is Phase.HOST:
        proof_of(program, sizes)
    return program


@dataclass(frozen=True)
class Proof:
    """A proof of a host program.

    Fields:
        sizes_key: the signature of all sizes that the proof covers. Sizes that it does not cover have other signatures.
        resizable: True if calls with different sizes may share symmetric buffers, provided that the proof covers these
            sizes. This requires that each call ends its accesses to a buffer before the next call accesses any part of
            the buffer.
    """

    sizes_key: SizesKey
    resizable: bool


def proof_of(program: Program, sizes: Mapping[str, int] | None = None) -> Proof:
    """Return the proof of a host program that has no structural errors. Raise the same errors as `prove`."""
    known = _signature(program)
    bound = {name: value for name, value in (sizes or {}).items() if name in known.names}
    program.check_whole(bound)
    if bound.keys() != known.names:
        from hostir.check.small_sizes import small_sizes

        bound = small_sizes(program, bound) or bound
    key = known.of(bound)
    if key not in known.proved:
        from hostir.check.proof import analyse_quickly  # loads numpy

        analysis = analyse_quickly(program, bound)
        if errors := [each for each in analysis.findings if each.level == "error"]:
            raise HostIRError(*(_refused(each) if each.category == UNCHECKED else each for each in errors))
        known.proved[key] = analysis.resizable
    return Proof(key, known.proved[key])


@lru_cache(maxsize=256)
def _signature(program: Program) -> Signature:
    return Signature(program)


def forget() -> None:
    """Clear the cache of proofs, for tests and benchmarks."""
    _signature.cache_clear()
    forget_forms()


def _refused(unchecked: Diagnostic) -> Diagnostic:
    return replace(unchecked, hint=f"{unchecked.hint}; or run it unproved: check=False, --no-check")


__all__ = ["MAX_CALLS", "Proof", "check", "check_calls", "check_structure", "forget", "proof_of", "prove", "verify"]
