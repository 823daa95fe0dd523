"""Run `hostir check`: report findings to people or tools, repair a program, or draw its order."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hostir.check import check_calls, check_structure
from hostir.check.findings import Finding
from hostir.check.proof import Analysis, analyse, analyse_quickly
from hostir.cli.loading import STANDARD, write
from hostir.cli.lowering import load_to_lower, lowered
from hostir.ir.op import Phase
from hostir.ir.program import Program
from hostir.ir.source import Diagnostic, HostIRError, Span, error
from hostir.repair.repair import difference, redundant, repair


def check_command(
    program: Program, sizes: Mapping[str, int], lowered: Callable[[], Program], options: Namespace
) -> int:
    """Check a program, print the findings, and return the exit code: 1 if a finding is an error, else 0.

    With `--fix`, repair the program instead. The exit code is 0 if the repair succeeds.

    Args:
        program: a host program or a fusion.
        sizes: the sizes that `--set` binds.
        lowered: returns the host program. It is called only if the structure of `program` is sound.
        options: the options of the command line.
    """
    _check_options(options)
    structure = check_structure(program)
    if not structure:
        try:
            program = lowered()
        except HostIRError as refusal:
            structure = list(refusal.diagnostics)
    sizes = _sizes_of(program, sizes)
    if options.fix:
        return _fix(program, sizes, options)
    sound = not structure and program.phase is Phase.HOST
    prove = analyse if options.graph else analyse_quickly  # the picture shows all ranks
    analysis = prove(program, sizes, options.calls) if sound else Analysis(structure)
    findings = _with_witnesses(program, analysis, options)
    if options.redundant and not findings:
        findings = redundant(program, sizes, options.calls)
    if options.graph:
        _draw(program, analysis, options.graph)
    _print(program, findings, analysis.sizes, options)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _check_options(options: Namespace) -> None:
    """Raise HostIRError for invalid options, and for options that exclude each other, before any slow step."""
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


def _sizes_of(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the items of `sizes` that the program uses.

    Raise HostIRError for a name that the program does not have.
    """
    sizes = program.given_sizes(sizes)
    return {name: value for name, value in sizes.items() if name in program.size_names}


def _with_witnesses(program: Program, analysis: Analysis, options: Namespace) -> list[Diagnostic]:
    """Return the findings. If a simulated run shows a finding, add a note with the command that repeats this run."""
    if not any(isinstance(finding, Finding) and finding.level == "error" for finding in analysis.findings):
        return analysis.findings

    from hostir.cli.witnesses import witnesses  # loads torch

    shown = witnesses(program, analysis.findings, analysis.sizes, analysis.calls)
    findings: list[Diagnostic] = []
    for n, finding in enumerate(analysis.findings):
        if n in shown:
            seed, problem = shown[n]
            note = f"shown by '{run_of(analysis, seed, options)}': {problem}"
            finding = replace(finding, notes=(*finding.notes, (None, note)))
        findings.append(finding)
    return findings


def run_of(analysis: Analysis, seed: int, options: Namespace) -> str:
    """Return the command line that runs the program on simulated ranks with this schedule seed."""
    assignments = dict(text.partition("=")[::2] for text in options.assignments)
    assignments |= {name: str(value) for name, value in analysis.sizes.items()}
    words = ["hostir", "run", options.file]
    for option, value in (("--from", options.form), ("--ranks", options.ranks), ("--strategy", options.strategy)):
        words += [option, str(value)] if value is not None else []
    words += ["--streams", str(options.streams)] if options.streams is not None else []
    words += ["--hosts", str(options.hosts)] if options.hosts is not None else []
    words += [word for name, value in assignments.items() for word in ("--set", f"{name}={value}")]
    words += ["--no-check", "--repeat", str(analysis.calls), "--schedule-seed", str(seed)]
    return shlex.join(words)


def _fix(program: Program, sizes: Mapping[str, int], options: Namespace) -> int:
    """Repair the program: print the changes to stderr, and write the repaired program to `-o` or standard output."""
    repaired = repair(program, sizes, options.calls)
    changes = difference(program, repaired)
    print(changes or f"@{program.name}: nothing to repair", end="" if changes.endswith("\n") else "\n", file=sys.stderr)
    if options.comments:
        message = f"the repaired program has lost the comments of {options.file}: programs do not keep comments"
        print(Diagnostic(message, level="note"), file=sys.stderr)
    write(str(repaired), options.out)
    return 0


def _draw(program: Program, analysis: Analysis, out: str) -> None:
    if analysis.order is None:
        message = f"{out} was not drawn: @{program.name} has no order until its structure is sound"
        print(Diagnostic(message, level="note"), file=sys.stderr)
        return
    from hostir.cli.pictures.drawing import draw  # loads networkx

    write(draw(program, analysis), out)


def _print(program: Program, findings: Sequence[Diagnostic], sizes: Mapping[str, int], options: Namespace) -> None:
    if options.format == "json":
        print_json(program.name, findings, sizes)
    elif findings:
        print("\n".join(map(str, findings)), file=sys.stderr)
    else:
        bound = f" for {', '.join(f'{name}={value}' for name, value in sorted(sizes.items()))}" if sizes else ""
        bound += "; tensors without elements are neither made nor moved" if 0 in sizes.values() else ""
        count = sum(1 for _ in program.walk())
        print(f"@{program.name}: {count} statements, {program.ranks} ranks, nothing to report{bound}")


def print_json(program: str | None, findings: Sequence[Diagnostic], sizes: Mapping[str, int]) -> None:
    """Print findings as JSON. `program` is the program's name; None if it could not be loaded."""
    print(json.dumps({"program": program, "sizes": dict(sizes), "findings": [as_json(d) for d in findings]}, indent=2))


def as_json(finding: Diagnostic) -> dict[str, object]:
    """Return a finding as a JSON object."""
    return {
        "level": finding.level,
        "kind": finding.category or "structure",
        "message": finding.message,
        "where": _place(finding.span),
        "expected": finding.expected,
        "hint": finding.hint,
        "times": finding.times if isinstance(finding, Finding) else 1,
        "notes": [{"where": _place(span), "text": text} for span, text in finding.notes],
    }


def _place(span: Span | None) -> dict[str, object] | None:
    return {"file": span.file, "line": span.line, "column": span.column, "width": span.width} if span else None


def main(options: Namespace) -> int:
    """Run `hostir check`; return its exit code."""
    try:
        program, sizes = load_to_lower(options)
    except HostIRError as problem:
        if options.format == "json":
            print_json(None, problem.diagnostics, {})
        raise
    return check_command(program, sizes, lambda: lowered(program, sizes, options), options)
