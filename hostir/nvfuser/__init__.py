"""Read and print host programs in nvFuser's textual form of host IR.

`read_nvfuser` reads what `NVFUSER_DUMP=host_ir` prints, in the spellings of its versions so far; `print_nvfuser` prints
any host program in today's. Reading what we print gives an equal program, up to names and frees of what it leaked.

docs/nvfuser.md lists the spellings, and says how a dump is understood where it leaves something open. Anything that
host programs cannot express gives one diagnostic with its place. No text raises anything but HostIRError.
"""

from __future__ import annotations

from hostir.ir.program import Program
from hostir.ir.source import Diagnostic
from hostir.nvfuser.parse import parse_dump
from hostir.nvfuser.print import print_dump
from hostir.nvfuser.read import DumpReader

__all__ = ["print_nvfuser", "read_nvfuser"]


def read_nvfuser(text: str, file: str = "<text>") -> tuple[Program, list[Diagnostic]]:
    """Read a dump of nvFuser's host IR. Return the host program, and warnings about what was left out of it.

    The program is named after the file. Raises HostIRError, with file:line:col and a caret, for a text that is no dump
    and for anything that a host program cannot express.
    """
    return DumpReader(parse_dump(text, file), file).program()


def print_nvfuser(program: Program) -> str:
    """Return a host program in nvFuser's spelling: deterministic, tensors numbered in the order of definition.

    Raises HostIRError for a fusion. Names, and comments of passes, do not survive.
    """
    return print_dump(program)
