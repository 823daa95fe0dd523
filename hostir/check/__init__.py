"""Check complete programs: their structure, and the order of all events of host programs."""

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
    """Return all findings in program order, warnings last.

    The list is empty for a program that is right under every legal schedule. A program that cannot be checked for races
    gets an error of category `unchecked`.

    Args:
        program: a fusion or a host program. Only host programs of sound structure are checked for races, deadlocks and
            misuse of memory.
        explicit: passed on to `check_structure`.
        sizes: values of symbols; symbols left out get small values.
        calls: how many successive calls to check; by default enough to show the errors of any number of calls.
    """
    findings = check_structure(program, explicit=explicit)
    if findings or program.phase is not Phase.HOST:
        return findings or program.misfits(sizes or {})
    from hostir.check.proof import analyse_quickly  # loads numpy

    return analyse_quickly(program, sizes, calls).findings


def prove(program: Program, sizes: Mapping[str, int] | None = None) -> Program:
    """Return the program; raise a HostIRError with all errors that `check` finds in it. Warnings pass.

    A program that cannot be checked is refused like a wrong one. A proof is cached for all sizes that it covers
    (`hostir.check.signature`): a later call with any of these sizes takes about 100 us.

    Args:
        program: a fusion or a host program.
        sizes: values of symbols; symbols left out get small values.
    """
    verify(program)
    if program.phase is Phase.HOST:
        proof_of(program, sizes)
    return program


@dataclass(frozen=True)
class Proof:
    """A proof of a host program.

    Fields:
        sizes_key: the signature of all sizes that the proof covers. Other sizes have other signatures.
        resizable: True if calls with any of these sizes may use the same symmetric memory in any order. This is
            so if successive calls use each buffer one after another on all ranks, even if they use different parts.
    """

    sizes_key: SizesKey
    resizable: bool


def proof_of(program: Program, sizes: Mapping[str, int] | None = None) -> Proof:
    """Return the proof of a host program of sound structure; raise the same errors as `prove`."""
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
    """Clear all cached proofs, for tests and benchmarks."""
    _signature.cache_clear()
    forget_forms()


def _refused(unchecked: Diagnostic) -> Diagnostic:
    return replace(unchecked, hint=f"{unchecked.hint}; or run it unproved: check=False, --no-check")


__all__ = ["MAX_CALLS", "Proof", "check", "check_calls", "check_structure", "forget", "proof_of", "prove", "verify"]
