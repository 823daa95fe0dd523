"""Define passes, and run a list of them: each result is verified, dumped and passed to a watcher."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hostir import knobs
from hostir.check import prove, verify
from hostir.ir import parse
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import UNCHECKED, HostIRError, error, warn_once


@dataclass(frozen=True)
class Pass:
    """A pure function of a program. Its fields are its options; its docstring's first line says what it does."""

    name: ClassVar[str]
    explicit_reshards: ClassVar[bool] = True  # after it, every change of sharding is explicit

    @abstractmethod
    def run(self, program: Program) -> Program:
        """Return the transformed program."""


Watcher = Callable[[str, Program], None]


def run_passes(program: Program, passes: Sequence[Pass], watch: Watcher | None = None) -> Program:
    """Run the passes in order, and verify the result of each.

    The host program at the end is proved free of races, deadlocks and misuse of memory. HOSTIR_DUMP writes the program
    before and after every pass as numbered files that can be fed back in. HOSTIR_SPEC=0 verifies only at the end, 1
    after every pass, 2 also prints and parses after every pass and demands an equal program.
    """
    spec, folder = knobs.SPEC.get(), knobs.DUMP.get()
    verify(program)
    _dump(folder, 0, "fusion", program)
    for number, each in enumerate(passes, 1):
        program = each.run(program)
        if spec:
            _hold(each, program, spec)
        _dump(folder, number, each.name, program)
        if watch:
            watch(each.name, program)
    return _proved(verify(program, explicit=program.phase is Phase.HOST))


def _proved(program: Program) -> Program:
    """Prove the program for small sizes, and return it. Findings that only say "not checked" become a warning."""
    try:
        return prove(program)
    except HostIRError as findings:
        if any(found.kind != UNCHECKED for found in findings.diagnostics):
            raise
        for found in findings.diagnostics:
            warn_once(program.name, found.message, found.hint, RuntimeWarning)
        return program


def _hold(each: Pass, program: Program, spec: int) -> None:
    try:
        verify(program, explicit=each.explicit_reshards)
        if spec > 1 and parse(str(program)) != program:
            raise AssertionError(f"the text after {each.name} does not parse back to the same program:\n{program}")
    except HostIRError as wrong:
        wrong.add_note(f"after the pass '{each.name}', which left:\n{program}")
        raise


def _dump(folder: Path | None, number: int, name: str, program: Program) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{program.name}-{number:02}-{name}.hir").write_text(str(program))
    except OSError as problem:
        expected = "a folder that can be made and written to"
        raise error(f"HOSTIR_DUMP='{folder}': {problem.strerror}", expected=expected) from None
