"""The canonical text and how it is read. Grammar and printer are made from the statements' own templates.

hostir 1
mesh @mesh [didx] = 0 1
program @name(%a: bf16[2@didx, 64]) -> (%c) streams 2 {
  ...
}
"""

from __future__ import annotations

import hostir.ir.comm_ops
import hostir.ir.host_ops
import hostir.ir.onesided_ops
import hostir.ir.p2p_ops
import hostir.ir.tensor_ops
import hostir.ir.view_ops  # noqa: F401  the vocabulary registers itself
from hostir.ir.program import Program

BOM = "\ufeff"  # some editors begin a file of UTF-8 with this mark


def parse(text: str, file: str = "<text>") -> Program:
    """Reads a program. Raises HostIRError with file:line:col, a caret and what was expected."""
    from hostir.ir.parser import read  # lark loads only when a text is read

    return read(text.removeprefix(BOM).replace("\r\n", "\n"), file)
