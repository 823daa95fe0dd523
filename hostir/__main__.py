"""The command line: `hostir lower | check | run | tune | explain | ops`.

Exit codes: 0 good; 1 a finding or a mismatch; 2 bad usage, input that cannot be read or whose structure is unsound,
or output or memory that cannot be written or allocated; 130 interrupted; 141 the reader of the output has gone.
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
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, TextIO

import hostir
from hostir import knobs
from hostir.ir.program import VERSION
from hostir.ir.source import HostIRError, did_you_mean, error
from hostir.lower import AUTO, CALLS, STRATEGIES, STREAMS

FORMATS = ("hir", "nvfuser", "dot")
DEVICES = ("cpu", "cuda")
# The function of each command, loaded when it runs: some load torch.
COMMANDS = {
    "lower": "hostir.cli.lower:main",
    "check": "hostir.cli.check:main",
    "run": "hostir.cli.run:main",
    "tune": "hostir.cli.tune:main",
    "explain": "hostir.cli.explain:main",
    "ops": "hostir.cli.ops:main",
}
FORMAT = warnings.formatwarning  # Python's own
KERNELS = "auto, triton, cublas or aten (default: HOSTIR_KERNELS, or auto)"


CHOICES = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
UNKNOWN = re.compile(r"unrecognized arguments: (--\S+)")
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # what writing raises, and little else
INTERRUPTED, UNREAD = 130, 141  # as shells call the ends by SIGINT and SIGPIPE
LISTENING = 5.0  # seconds: rank 0 has printed by then; a launcher ends the other ranks when the first one exits


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        near = ""
        if choices := CHOICES.search(message):
            near = did_you_mean(choices[1], (choice.strip(" '") for choice in choices[2].split(",")))
        elif unknown := UNKNOWN.search(message):
            near = did_you_mean(unknown[1].partition("=")[0], self._option_string_actions)
        raise error(message, hint=near or f"{self.prog} --help")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; the subcommand's parser reports what it does not know, and suggests its own options."""
    parser, commands = _parsers()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the command line, and those of the subcommands by name."""
    parser = _Parser(prog="hostir", description="Lowers, checks and runs sharded tensor programs.")
    version = f"hostir {hostir.__version__} (text version {VERSION})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    source = _Parser(add_help=False)
    about = "a .py with a fusion, a .hir text, or an nvFuser dump; - reads a text from standard input"
    source.add_argument("file", metavar="FILE[:NAME]", help=about)
    source.add_argument("--from", dest="form", choices=["hir", "nvfuser"], help="how to read a text (default: hir)")
    source.add_argument(
        "--set",
        dest="given",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the fusion's function, or a size",
    )
    source.add_argument("--ranks", type=int, help="the number of ranks: what a parameter named 'ranks' gets")

    lowering = _Parser(add_help=False)
    lowering.add_argument("--strategy", help=f"one of: {', '.join(STRATEGIES)}, {AUTO} (default: pipeline)")
    lowering.add_argument("--streams", type=int, help=f"the most worker streams (default: {STREAMS})")

    low = commands.add_parser("lower", parents=[source, lowering], help="print the host program of a fusion")
    stages = low.add_mutually_exclusive_group()
    stages.add_argument("--after", metavar="PASS", help="print the program after this pass")
    stages.add_argument("--all", action="store_true", help="print the program after every pass")
    low.add_argument("--format", choices=FORMATS, default="hir")
    low.add_argument("-o", dest="out", metavar="OUT", help="write to a file; - is standard output")

    chk = commands.add_parser(
        "check", parents=[source, lowering], help="prove a program free of races, deadlocks and misuse of memory"
    )
    chk.add_argument("--calls", type=int, help="calls that follow each other, up to 32 (default: as many as show all)")
    chk.add_argument("--format", choices=["text", "json"], default="text")
    chk.add_argument("--graph", metavar="OUT", help="draw what comes before what, and conflicts in red: an .svg")
    repairs = chk.add_mutually_exclusive_group()
    repairs.add_argument("--fix", action="store_true", help="insert the least synchronisation that makes it clean")
    repairs.add_argument("--redundant", action="store_true", help="name synchronisation that a clean program can spare")
    chk.add_argument("-o", dest="out", metavar="OUT", help="where --fix writes the program (default: print it)")

    run = commands.add_parser(
        "run", parents=[source, lowering], help="run on simulated ranks, or under torchrun on real ones"
    )
    compared = "compare with the unsharded result, or a text of single ranks with what simulated ranks give"
    run.add_argument("--compare", action="store_true", help=compared)
    run.add_argument(
        "--schedule-seed",
        type=int,
        default=0,
        metavar="N",
        help="the order in which simulated ranks run what may run in any order (0: program order)",
    )
    run.add_argument("--seed", type=int, default=0, help="of the inputs")
    run.add_argument("--no-check", action="store_true", help="run a program that is not proved right, and watch it")
    run.add_argument("--kernels", help=KERNELS)
    run.add_argument("--device", choices=DEVICES, help="default: cuda under torchrun where there is one, else cpu")
    run.add_argument("--trace", metavar="OUT", help="write a timeline: .json for Perfetto, .svg to look at")
    run.add_argument("--repeat", type=int, default=1, help="run this often, with fresh inputs each time")
    run.add_argument("--json", action="store_true")

    tune = commands.add_parser(
        "tune", parents=[source], help="under torchrun: measure all strategies, and keep the times for --strategy auto"
    )
    tune.add_argument("--kernels", help=KERNELS)
    tune.add_argument("--device", choices=DEVICES, help="default: cuda where there is one, else cpu")
    tune.add_argument("--runs", type=int, help="timed runs of each (default: 30 on a GPU, 7 on a CPU)")
    tune.add_argument("--again", action="store_true", help="measure anew what the cache holds")

    explain = commands.add_parser(
        "explain", parents=[source], help="say what --strategy auto takes, from which times, and why not the rest"
    )
    explain.add_argument("--kernels", help=KERNELS)
    explain.add_argument("--device", choices=DEVICES, help="this machine's CPU or GPUs (default: GPUs, if enough)")
    explain.add_argument("--machine", help="a known machine instead of this one, such as h200x8")
    explain.add_argument(
        "--calls", choices=CALLS, default=CALLS[0], help="how calls are made (default: out, with out=)"
    )
    explain.add_argument("--json", action="store_true")

    ops = commands.add_parser("ops", help="the language reference")
    ops.add_argument("--markdown", action="store_true")
    return parser, commands.choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; every mistake is one message."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started this has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for as long as the process lives
    try:
        code = _run_command(arguments)
        sys.stdout.flush()  # here a full disk can still be reported
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
    except SystemExit:  # of --help and --version
        sys.stdout.flush()
        raise
    except HostIRError as wrong:
        return _refused(wrong)
    except (MemoryError, RuntimeError) as problem:
        from hostir.runtime.sharding import lacks_memory, out_of_memory  # loads torch

        if not lacks_memory(problem):
            raise
        return _refused(out_of_memory(problem))


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning; leave out its place if that is this command and no line of the user's (`warn_user`)."""
    return (
        f"{message}\n"
        if filename in ("sys", __file__, sys.argv[0])
        else FORMAT(message, category, filename, lineno, line)
    )


def _refused(wrong: HostIRError) -> int:
    """Print an error, once where several processes find the same; return the exit code."""
    findings = all(found.kind for found in wrong.diagnostics)
    rank = os.environ.get("RANK", "0")
    if findings or not _on_its_own():  # the same on all ranks; on all of a host, as files may differ
        rank = rank if findings else os.environ.get("LOCAL_RANK", rank)
        if rank != "0":
            time.sleep(LISTENING if "WORLD_SIZE" in os.environ else 0)
            return 1 if findings else 2
    # In one piece, as several ranks may be writing.
    _print_error("\n".join(map(str, (wrong, *getattr(wrong, "__notes__", ())))))
    return 1 if findings else 2


def _on_its_own() -> bool:
    """Whether this rank has begun to do what others may not; until then it only reads what all ranks read."""
    session = sys.modules.get("hostir.runtime.session")
    return session is not None and session.begun


def _print_error(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:  # there is nobody to report to
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Discard the unwritten rest of a stream, on which Python would fail at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
