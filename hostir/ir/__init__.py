"""The intermediate representation: types, statements, text and checks. Imports neither torch nor triton."""

from hostir.ir.check import check, prove, verify
from hostir.ir.op import Phase, Statement
from hostir.ir.program import Program, format_program, format_statement
from hostir.ir.source import Diagnostic, HostIRError, Span
from hostir.ir.text import parse
from hostir.ir.types import Axis, DType, Mesh, TensorType
from hostir.ir.values import Value

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
    "check",
    "format_program",
    "format_statement",
    "parse",
    "prove",
    "verify",
]
