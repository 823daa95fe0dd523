"""The command line: `hostir lower | check | run | tune | explain | timeline | ops`.

Exit codes:

- 0: success
- 1: a finding, or a result that differs from its reference
- 2: wrong usage, input that cannot be read, a program that breaks the rules of the language, output that cannot be
  written, or too little memory
- 130: interrupted
- 141: the reader of the output has closed the pipe
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn, TextIO

import hostir
from hostir import knobs
from hostir.ir.source import HostIRError, did_you_mean, error
from hostir.ir.text import VERSION
from hostir.lower import AUTO, CALLS, STREAMS
from hostir.lower.strategies import strategies

FORMATS = ("hir", "nvfuser", "dot")
DEVICES = ("cpu", "cuda")
# The function of each command. Its module is loaded when the command runs, because some modules load torch.
COMMANDS = {
    "lower": "hostir.cli.lower:main",
    "check": "hostir.cli.check:main",
    "run": "hostir.cli.run:main",
    "tune": "hostir.cli.tune:main",
    "explain": "hostir.cli.explain:main",
    "timeline": "hostir.cli.timeline:main",
    "ops": "hostir.cli.ops:main",
}
FORMAT_WARNING = warnings.formatwarning  # Python's function, which `_run_command` replaces by `_formatted`
KERNELS = "auto, triton, cublas or aten (default: HOSTIR_KERNELS, or auto)"


CHOICES = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
UNKNOWN = re.compile(r"unrecognized arguments: (--\S+)")
UNWRITABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EBADF,
)  # errors that writing raises, and hardly anything else
INTERRUPTED, UNREAD = 130, 141  # the exit codes of shells for SIGINT and SIGPIPE
HOSTS = (
    "the number of hosts, each with the GPUs of --machine (default: 1, or as few as the ranks need if --machine has no "
    "number of GPUs)"
)
LISTENING = 5.0  # seconds that ranks wait while rank 0 prints: a launcher ends all ranks when the first one exits


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = ""
        if choices := CHOICES.search(message):
            hint = did_you_mean(choices[1], (choice.strip(" '") for choice in choices[2].split(",")))
        elif unknown := UNKNOWN.search(message):
            hint = did_you_mean(unknown[1].partition("=")[0], self._option_string_actions)
        raise error(message, hint=hint or f"{self.prog} --help")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. The subcommand's parser reports unknown arguments, and suggests its options."""
    parser, commands = _parsers()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the command line, and the parsers of the subcommands by name."""
    parser = _Parser(prog="hostir", description="Lowers, checks and runs sharded tensor programs.")
    version = f"hostir {hostir.__version__} (text version {VERSION})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    source, lowering = _source_options(), _lowering_options()
    optional = _source_options(optional=True)
    subcommands: dict[str, tuple[Callable[[_Parser], None], list[_Parser], str]] = {
        "lower": (_lower_options, [source, lowering], "print the host program of a fusion"),
        "check": (_check_options, [source, lowering], "prove a program free of races, deadlocks and misuse of memory"),
        "run": (_run_options, [source, lowering], "run on simulated ranks, or under torchrun on real ranks"),
        "tune": (_tune_options, [optional], "under torchrun: measure all strategies, and keep the times for 'auto'"),
        "explain": (_explain_options, [source], "show the choice of 'auto', the times, and impossible strategies"),
        "timeline": (_timeline_options, [source, lowering], "predict when each statement runs, on a known machine"),
        "ops": (_ops_options, [], "the language reference"),
    }
    for name, (add_options, parents, summary) in subcommands.items():
        add_options(commands.add_parser(name, parents=parents, help=summary))
    return parser, commands.choices


def _source_options(*, optional: bool = False) -> _Parser:
    """Return the options that name a program. If `optional` is True, a program need not be named."""
    parser = _Parser(add_help=False)
    about = "a .py with a fusion, a .hir text, or an nvFuser dump; - reads a text from standard input"
    parser.add_argument("file", metavar="FILE[:NAME]", nargs="?" if optional else None, help=about)
    parser.add_argument("--from", dest="form", choices=["hir", "nvfuser"], help="the form of a text (default: hir)")
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the fusion's function, or a size",
    )
    parser.add_argument("--ranks", type=int, help="the number of ranks, for a parameter named 'ranks'")
    return parser


def _lowering_options() -> _Parser:
    parser = _Parser(add_help=False)
    parser.add_argument("--strategy", help=f"one of: {', '.join(strategies())}, {AUTO} (default: pipeline)")
    parser.add_argument("--streams", type=int, help=f"the most worker streams (default: {STREAMS})")
    parser.add_argument("--hosts", type=int, help="the number of hosts, with equally many ranks in each (default: 1)")
    return parser


def _lower_options(parser: _Parser) -> None:
    stages = parser.add_mutually_exclusive_group()
    stages.add_argument("--after", metavar="PASS", help="print the program after this pass")
    stages.add_argument("--all", action="store_true", help="print the program after every pass")
    parser.add_argument("--format", choices=FORMATS, default="hir")
    parser.add_argument("-o", dest="out", metavar="OUT", help="write to a file; - is standard output")


def _check_options(parser: _Parser) -> None:
    calls = "the number of consecutive calls, up to 32 (default: enough to represent any number)"
    parser.add_argument("--calls", type=int, help=calls)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--graph", metavar="OUT", help="draw the order of events, with conflicts in red, as an .svg")
    repairs = parser.add_mutually_exclusive_group()
    repairs.add_argument("--fix", action="store_true", help="insert the least synchronisation that makes it clean")
    repairs.add_argument(
        "--redundant", action="store_true", help="name the synchronisation that a clean program does not need"
    )
    parser.add_argument("-o", dest="out", metavar="OUT", help="the file for the program of --fix (default: print it)")


def _run_options(parser: _Parser) -> None:
    compared = "compare with the unsharded result, or for a text of single ranks with simulated ranks"
    parser.add_argument("--compare", action="store_true", help=compared)
    parser.add_argument(
        "--schedule-seed",
        type=int,
        default=0,
        metavar="N",
        help="the seed for the order of operations on simulated ranks (0: program order)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of the inputs")
    parser.add_argument(
        "--no-check", action="store_true", help="run a program without a proof, and report the races that occur"
    )
    parser.add_argument("--kernels", help=KERNELS)
    parser.add_argument("--device", choices=DEVICES, help="default: cuda under torchrun, if there is a GPU, else cpu")
    parser.add_argument("--trace", metavar="OUT", help="write a timeline: a .json for Perfetto, or an .svg picture")
    parser.add_argument("--repeat", type=int, default=1, help="the number of runs, each with other inputs")
    parser.add_argument("--json", action="store_true")


def _tune_options(parser: _Parser) -> None:
    parser.add_argument("--kernels", help=KERNELS)
    parser.add_argument("--device", choices=DEVICES, help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--runs", type=int, help="timed runs of each candidate (default: 30 on a GPU, 7 on a CPU)")
    parser.add_argument("--again", action="store_true", help="measure again what the cache holds")
    calibrate = "first time memory, a matmul, an all-gather and the host, and scale the estimates of this machine"
    parser.add_argument("--calibrate", action="store_true", help=calibrate)


def _explain_options(parser: _Parser) -> None:
    parser.add_argument("--kernels", help=KERNELS)
    parser.add_argument("--device", choices=DEVICES, help="this machine's CPU or GPUs (default: GPUs, if enough)")
    parser.add_argument("--machine", help="a known machine instead of this one, such as h200x8")
    parser.add_argument("--hosts", type=int, help=HOSTS)
    parser.add_argument(
        "--calls", choices=CALLS, default=CALLS[0], help="the way calls are made (default: out, with out=)"
    )
    parser.add_argument("--json", action="store_true")


def _timeline_options(parser: _Parser) -> None:
    parser.add_argument("--kernels", help=KERNELS)
    parser.add_argument("--machine", help="a known machine, such as h100x8 (default: h200)")
    parser.add_argument(
        "--against", action="append", default=[], metavar="STRATEGY", help="compare with another strategy"
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank whose statements are printed (default: 0)")
    parser.add_argument("--trace", metavar="OUT", help="write all ranks' statements as a .json for Perfetto")
    parser.add_argument("-o", dest="out", metavar="OUT", help="draw all ranks' statements as an .svg picture")
    parser.add_argument("--json", action="store_true")


def _ops_options(parser: _Parser) -> None:
    parser.add_argument("--markdown", action="store_true")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Print every mistake of the user as one message."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the process ends
    try:
        code = _run_command(arguments)
        sys.stdout.flush()  # a full disk can still be reported here
        return code
    except BrokenPipeError:
        _drop(sys.stdout)
        return UNREAD
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, UnicodeEncodeError) as problem:
        if isinstance(problem, OSError) and problem.errno not in UNWRITABLE:
            raise
        _drop(sys.stdout)
        _print_error(str(error(f"cannot write the output: {getattr(problem, 'strerror', None) or problem}")))
        return 2


def _run_command(arguments: Sequence[str] | None) -> int:
    try:
        options = _parse(arguments)
        warnings.formatwarning = _formatted
        knobs.check_environment()
        module, _, function = COMMANDS[options.command].partition(":")
        return int(getattr(import_module(module), function)(options))
    except SystemExit:  # from --help and --version
        sys.stdout.flush()
        raise
    except HostIRError as problem:
        return _report(problem)
    except (MemoryError, RuntimeError) as problem:
        from hostir.call.room import lacks_memory, out_of_memory  # loads torch

        if not lacks_memory(problem):
            raise
        return _report(out_of_memory(problem))


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return the text of a warning. It has a file and a line only if these are in the user's code."""
    return (
        f"{message}\n"
        if filename in ("sys", __file__, sys.argv[0])
        else FORMAT_WARNING(message, category, filename, lineno, line)
    )


def _report(problem: HostIRError) -> int:
    """Print an error, and return the exit code. If several ranks raise the same error, only one rank prints it."""
    findings = all(diagnostic.category for diagnostic in problem.diagnostics)
    rank = os.environ.get("RANK", "0")
    if findings or not _joined_a_job():  # all ranks have the same findings; other errors may differ between hosts
        rank = rank if findings else os.environ.get("LOCAL_RANK", rank)
        if rank.isdecimal() and rank != "0":
            time.sleep(LISTENING if "WORLD_SIZE" in os.environ else 0)
            return 1 if findings else 2
    # One write for all lines, because several ranks may write.
    _print_error("\n".join(map(str, (problem, *getattr(problem, "__notes__", ())))))
    return 1 if findings else 2


def _joined_a_job() -> bool:
    """Return True if this rank has begun to join a job.

    Before that, all ranks of a host read the same files, so they raise the same errors.
    """
    session = sys.modules.get("hostir.job.session")
    return session is not None and session.begun


def _print_error(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:  # nobody reads stderr
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Redirect a stream to /dev/null. Otherwise Python would fail at exit, when it writes the buffered text."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
