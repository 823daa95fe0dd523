"""The intermediate representation: types, statements and text. Imports neither torch nor triton."""

import hostir.ir.comm_ops
import hostir.ir.expert_ops
import hostir.ir.host_ops
import hostir.ir.message_ops
import hostir.ir.onesided_ops
import hostir.ir.scaled_ops
import hostir.ir.tensor_ops
import hostir.ir.view_ops  # noqa: F401  importing a module registers its statements
from hostir.ir.op import Phase, Statement, Value
from hostir.ir.program import Program, format_program, format_statement
from hostir.ir.source import Diagnostic, HostIRError, Span
from hostir.ir.types import Axis, DType, Mesh, TensorType

__all__ = [
    "Axis",
    "DType",
    "Diagnostic",
    "HostIRError",
    "Mesh",
    "Phase",
    "Program",
    "Span",
    "Statement",
    "TensorType",
    "Value",
    "format_program",
    "format_statement",
    "parse",
]

BOM = "\ufeff"  # some editors begin a file of UTF-8 with this mark


def parse(text: str, file: str = "<text>") -> Program:
    """Parse a program. Raises HostIRError with file:line:col, a caret and the expected text."""
    from hostir.ir.parser import read  # lark loads only when a text is read

    return read(text.removeprefix(BOM).replace("\r\n", "\n"), file)
