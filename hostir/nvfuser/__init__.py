"""Read and print host programs in nvFuser's textual form of host IR.

`read_nvfuser` reads the output of `NVFUSER_DUMP=host_ir`. It accepts the spellings of all versions of nvFuser so far.
`print_nvfuser` prints a host program in the current spelling. If this text is read again, the result is the same
program except for two things: the names differ, and buffers that the program never freed are freed.

docs/nvfuser.md lists the spellings, and says how an ambiguous dump is read. Reading raises HostIRError with one
diagnostic for a text that is not a dump, and for a dump that a host program cannot express.
"""

from __future__ import annotations

from hostir.ir.program import Program
from hostir.ir.source import Diagnostic
from hostir.nvfuser.parse import parse_dump
from hostir.nvfuser.print import print_dump
from hostir.nvfuser.read import DumpReader

__all__ = ["print_nvfuser", "read_nvfuser"]


def read_nvfuser(text: str, file: str = "<text>") -> tuple[Program, list[Diagnostic]]:
    """Read a dump of nvFuser's host IR; return the host program, and warnings about outputs that were left out.

    An output is left out if it exists only inside a loop. The program is named after the file. Raises HostIRError with
    file:line:col and a caret, if the text is not a dump or if a host program cannot express it.
    """
    return DumpReader(parse_dump(text, file), file).program()


def print_nvfuser(program: Program) -> str:
    """Return the text of a host program in nvFuser's current spelling.

    Tensors are numbered in the order of their definitions. The program's names, and the comments of passes, are lost.
    Raises HostIRError for a fusion, and for statements that nvFuser's form cannot express.
    """
    return print_dump(program)
