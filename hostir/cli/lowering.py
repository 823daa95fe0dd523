"""Load the program that a command line names. If it is a fusion, lower it with the strategy of `--strategy`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from hostir.cli.loading import load_named, print_once
from hostir.ir.op import Phase
from hostir.ir.program import Program, stated_hosts, with_hosts
from hostir.ir.source import error
from hostir.lower import AUTO, lower, passes_of
from hostir.lower.strategies import run_unproved


def load_to_lower(options: Namespace) -> tuple[Program, dict[str, int]]:
    """Load the program and the sizes as `load_named` does.

    Raises HostIRError if `--strategy` or `--streams` is invalid, or if either option is given for a host program.
    """
    program, sizes = load_named(options)
    refuse_lowering(program, options)
    if options.strategy == AUTO and options.streams is not None:
        raise error(f"--streams {options.streams}: '{AUTO}' chooses it too", hint="leave it out, or name a strategy")
    if program.phase is not Phase.HOST and options.strategy != AUTO:
        passes_of(**lowering_of(options))  # raises for misspelt options: wrong usage, not a finding about the program
    return on_hosts(program, options.hosts), sizes


def refuse_lowering(program: Program, options: Namespace) -> None:
    """Raise HostIRError if the command line says how to lower a host program."""
    given = [name for name in ("strategy", "streams") if getattr(options, name) is not None]
    if program.phase is Phase.HOST and given:
        raise error(f"@{program.name} is a host program already", hint=f"--{given[0]} is for lowering a fusion")


def on_hosts(program: Program, hosts: int | None) -> Program:
    """Return the program with meshes that state `hosts`, if given."""
    if hosts is None:
        return program
    if hosts < 1 or program.ranks % hosts:
        raise error(
            f"--hosts {hosts}: @{program.name} is for {program.ranks} ranks", expected="as many ranks on each host"
        )
    if (stated := stated_hosts(program)) and stated != hosts:
        raise error(f"--hosts {hosts}: the meshes of @{program.name} state {stated}", hint="leave it out")
    return with_hosts(program, hosts)


def lowering_of(options: Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `lower`. An option that the command line leaves out has no entry."""
    arguments = {"strategy": options.strategy, "streams": options.streams}
    return {name: value for name, value in arguments.items() if value is not None}


def lowered(program: Program, sizes: dict[str, int], options: Namespace, *, proved: bool = True) -> Program:
    """Lower a fusion, and return the host program. A host program is returned unchanged.

    A program that will not run need not be `proved`.
    """
    if program.phase is Phase.HOST:
        return program
    fusion = choose_strategy(program, sizes, options)
    if proved:
        return lower(fusion, **lowering_of(options))
    return run_unproved(fusion, passes_of(**lowering_of(options)))


def choose_strategy(program: Program, sizes: dict[str, int], options: Namespace) -> Program:
    """If `--strategy` is `auto`, choose a strategy, store it in `options`, and print the choice to stderr.

    The number of streams is also stored. For `hostir run`, the kernels are also stored. Return the fusion with the
    hosts for which the strategy was chosen.
    """
    if options.strategy != AUTO:
        return program
    from hostir.cli.auto import choice_for  # loads torch

    choice = choice_for(program, sizes, options)
    for reason in (*choice.fallbacks, *choice.notes):
        print_once(f"note: {reason}")
    print_once(f"note: {choice}")
    options.strategy, options.streams = choice.strategy, choice.streams
    if options.command == "run":
        options.kernels = choice.kernels
    return with_hosts(program, choice.hosts)
