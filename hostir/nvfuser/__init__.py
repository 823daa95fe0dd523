"""Read and print host programs in nvFuser's textual form of host IR.

`read_nvfuser` reads the output of `NVFUSER_DUMP=host_ir`, in the spellings of all versions so far. `print_nvfuser`
prints host programs in the current spelling. Reading a printed program gives an equal program, except for names and for
added frees of leaked buffers.

docs/nvfuser.md lists the spellings, and the interpretation of a dump where it is ambiguous. Anything that host programs
cannot express gives one diagnostic with its place. The only exception for a bad text is HostIRError.
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

    The program is named after the file. Raises HostIRError, with file:line:col and a caret, for a text that is not a
    dump, and for anything that a host program cannot express.
    """
    return DumpReader(parse_dump(text, file), file).program()


def print_nvfuser(program: Program) -> str:
    """Return a host program in nvFuser's spelling: deterministic, tensors numbered in the order of definition.

    Raises HostIRError for a fusion. Names, and comments of passes, do not survive.
    """
    return print_dump(program)
