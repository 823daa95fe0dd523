"""Run `hostir check`: report findings to people and tools, repair programs, draw pictures."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hostir.check import check_calls, check_structure
from hostir.check.proof import Analysis, Finding, analyse, analyse_quickly
from hostir.check.repair import difference, redundant, repair
from hostir.cli.loading import STANDARD, write
from hostir.cli.lowering import load_to_lower, lowered
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError, Span, error

# The command ----------------------------------------------------------------------------------------------------------
# `hostir check`: findings for people and for tools, schedules that show them, repairs, and a picture.


def check_command(
    program: Program, sizes: Mapping[str, int], lowered: Callable[[], Program], options: Namespace
) -> int:
    """Check a fusion and what it lowers to, or a host program; return the exit code, 1 where there are errors.

    With `--fix`, errors are repaired instead, and the exit code says whether that succeeded.
    """
    _check_options(options)
    structure = check_structure(program)
    if not structure:
        try:
            program = lowered()
        except HostIRError as refused:
            structure = list(refused.diagnostics)
    sizes = _known(program, sizes)
    if options.fix:
        return _fix(program, sizes, options)
    sound = not structure and program.phase is Phase.HOST
    prove = analyse if options.graph else analyse_quickly  # a picture has all ranks
    analysis = prove(program, sizes, options.calls) if sound else Analysis(structure)
    findings = _with_witnesses(program, analysis, options)
    if options.redundant and not findings:
        findings = redundant(program, sizes, options.calls)
    if options.graph:
        _draw(program, analysis, options.graph)
    _print(program, findings, analysis.sizes, options)
    return 1 if any(found.level == "error" for found in findings) else 0


def _check_options(options: Namespace) -> None:
    """Refuse options that do not go together, before anything takes time."""
    check_calls(options.calls, f"--calls {options.calls}")
    if options.out is not None and not options.fix:
        raise error("-o is for the repaired program", hint="--fix")
    if options.fix and (options.format != "text" or options.graph is not None):
        raise error("--fix prints the repaired program, and nothing else", hint="leave --format and --graph out")
    if options.graph is not None and Path(options.graph).suffix != ".svg":
        raise error(f"--graph {options.graph}", expected="a file ending in .svg")
    for out in filter(None, (options.out, options.graph)):
        if out == STANDARD:
            continue
        if Path(out).is_dir() or not Path(out).absolute().parent.is_dir():
            raise error(f"cannot write {out}", expected="a file in a folder that exists")


def _known(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return those of the given sizes that the program uses; raise for names that are not its symbols."""
    sizes = program.given_sizes(sizes)
    return {name: value for name, value in sizes.items() if name in program.size_names}


def _with_witnesses(program: Program, analysis: Analysis, options: Namespace) -> list[Diagnostic]:
    """Return the findings; those about orders get the command of a run that shows them."""
    if not any(isinstance(found, Finding) and found.level == "error" for found in analysis.findings):
        return analysis.findings

    from hostir.cli.witnesses import witnesses  # loads torch

    shown = witnesses(program, analysis.findings, analysis.sizes, analysis.calls)
    noted: list[Diagnostic] = []
    for n, found in enumerate(analysis.findings):
        if n in shown:
            seed, wrong = shown[n]
            note = f"shown by '{run_of(analysis, seed, options)}': {wrong}"
            found = replace(found, notes=(*found.notes, (None, note)))
        noted.append(found)
    return noted


def run_of(analysis: Analysis, seed: int, options: Namespace) -> str:
    """Return the command of a run under a seed."""
    given = dict(item.partition("=")[::2] for item in options.given) | {n: str(v) for n, v in analysis.sizes.items()}
    words = ["hostir", "run", options.file]
    for option, value in (("--from", options.form), ("--ranks", options.ranks), ("--strategy", options.strategy)):
        words += [option, str(value)] if value is not None else []
    words += ["--streams", str(options.streams)] if options.streams is not None else []
    words += [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    words += ["--no-check", "--repeat", str(analysis.calls), "--schedule-seed", str(seed)]
    return shlex.join(words)


def _fix(program: Program, sizes: Mapping[str, int], options: Namespace) -> int:
    """Repair the program: print the changes, and write the whole to `-o`, or behind them."""
    repaired = repair(program, sizes, options.calls)
    changed = difference(program, repaired)
    print(changed or f"@{program.name}: nothing to repair", end="" if changed.endswith("\n") else "\n", file=sys.stderr)
    if options.comments:
        said = f"the repaired program is without the comments of {options.file}: a program keeps none of its text's"
        print(Diagnostic(said, level="note"), file=sys.stderr)
    write(str(repaired), options.out)
    return 0


def _draw(program: Program, analysis: Analysis, out: str) -> None:
    if analysis.order is None:
        message = f"{out} was not drawn: @{program.name} has no order as long as its structure is not sound"
        print(Diagnostic(message, level="note"), file=sys.stderr)
        return
    from hostir.check.picture import draw  # loads networkx

    write(draw(program, analysis), out)


def _print(program: Program, findings: Sequence[Diagnostic], sizes: Mapping[str, int], options: Namespace) -> None:
    if options.format == "json":
        print_json(program.name, findings, sizes)
    elif findings:
        print("\n".join(map(str, findings)), file=sys.stderr)
    else:
        bound = f" for {', '.join(f'{name}={value}' for name, value in sorted(sizes.items()))}" if sizes else ""
        bound += "; what has no elements is neither made nor moved" if 0 in sizes.values() else ""
        count = sum(1 for _ in program.walk())
        print(f"@{program.name}: {count} statements, {program.ranks} ranks, nothing to report{bound}")


def print_json(program: str | None, findings: Sequence[Diagnostic], sizes: Mapping[str, int]) -> None:
    """Print findings as JSON; `program` is None where it could not be loaded."""
    print(json.dumps({"program": program, "sizes": dict(sizes), "findings": [as_json(d) for d in findings]}, indent=2))


def as_json(found: Diagnostic) -> dict[str, object]:
    """Return a finding as a JSON object."""
    return {
        "level": found.level,
        "kind": found.kind or "structure",
        "message": found.message,
        "where": _place(found.span),
        "expected": found.expected,
        "hint": found.hint,
        "times": found.times if isinstance(found, Finding) else 1,
        "notes": [{"where": _place(span), "text": text} for span, text in found.notes],
    }


def _place(span: Span | None) -> dict[str, object] | None:
    return {"file": span.file, "line": span.line, "column": span.column, "width": span.width} if span else None


def main(options: Namespace) -> int:
    """Run the command; return its exit code."""
    try:
        program, sizes = load_to_lower(options)
    except HostIRError as wrong:
        if options.format == "json":
            print_json(None, wrong.diagnostics, {})
        raise
    return check_command(program, sizes, lambda: lowered(program, sizes, options), options)
