"""Print a host program in nvFuser's current spelling. docs/nvfuser.md lists the spellings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hostir.ir import comm_ops as comm
from hostir.ir import host_ops as host
from hostir.ir import tensor_ops as ops
from hostir.ir import view_ops as views
from hostir.ir.op import Bin, Expr, Lit, Phase, Ref, Statement, Value
from hostir.ir.program import Names, Program
from hostir.ir.sizes import ONE, Size
from hostir.ir.source import error
from hostir.ir.types import FLAG, Axis, Kind, Mesh, TensorType
from hostir.nvfuser.parse import CASTS, COMPUTE, INFIX
from hostir.nvfuser.parts import FLOATS
from hostir.nvfuser.read import COLLECTIVES, TRANSFERS
from hostir.nvfuser.streams import STREAMS

INDENT = "  "
TYPES = {cls: name for name, cls in (*COLLECTIVES.items(), *TRANSFERS.items())}
DTYPES = {dtype.name: name for name, dtype in FLOATS.items()}
FLOAT_OF = {ours: name for name, ours in CASTS.items()}
# The keywords of the computations for which nvFuser's form has a spelling.
SPELLED = {"cast", *INFIX.values(), *(ours for ours, *_ in COMPUTE.values())}


@dataclass(frozen=True)
class Printed:
    """The printed text of a tensor, in parts.

    Fields:
        head: the name with memory and dtype, such as `T0_g_float`.
        lead: the device axes that hold the terms of a partial sum.
        axes: the IterDomains of each axis of the tensor, outermost first.
        mesh: the DeviceMesh; empty if the type has no mesh.
    """

    head: str
    lead: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    mesh: str

    def __str__(self) -> str:
        return f"{self.head}[{', '.join([*self.lead, *(d for axis in self.axes for d in axis)])}]{self.mesh}"


class DumpPrinter:
    """Prints one host program.

    Tensors, axes, streams and communications are numbered in the order of their definitions.

    Fields:
        program: the program.
        names: the names that the dump already uses.
        shown: a map from the name of each tensor to its printed text.
        other: a map from the name of each stream, handle and index to its printed name.
        domains: the number of IterDomains that have been printed so far.
        tensors, streams, handles: the numbers of tensors, streams and communications that have been defined so far.
        uses_pool: True if a stream of the pool has been printed.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = Names(program.size_names)
        self.shown: dict[str, Printed] = {}
        self.other: dict[str, str] = {}
        self.domains = 0
        self.tensors = 0
        self.streams = 0
        self.handles = 0
        self.uses_pool = False

    def text(self) -> str:
        inputs = ", ".join(str(self.define(v, "g")) for v in self.program.inputs)
        body = list(self.block(self.program.body, 1))
        outputs = ", ".join(str(self.shown[v.name]) for v in self.program.outputs)
        lines = [f"%HostIrContainer {{ ({inputs}) -> ({outputs}) :", *body, "} // %HostIrContainer"]
        if self.program.streams != (STREAMS if self.uses_pool else 0):
            lines += ["Index definitions:", f"{INDENT}numberOfStreams = {self.program.streams}"]
        return "\n".join(lines) + "\n"

    def define(self, value: Value, memory: str, order: tuple[int, ...] | None = None) -> Printed:
        """Assign the next numbers to a new tensor and its axes, and return its printed text.

        Args:
            value: the tensor.
            memory: the letter that nvFuser prints for the memory: g for a buffer, l for a view.
            order: a value for each axis. Axes are numbered in ascending order of these values; by default from left to
                right. A permute passes the position of each axis in the operand.
        """
        type = value.tensor
        if type.dtype == FLAG:
            raise error("nvFuser's form has no spelling for flags", value.span)
        if type.dtype.name not in DTYPES:
            raise error(
                f"nvFuser's form has no spelling for tensors of {type.dtype}: {value}",
                value.span,
                expected=f"one of: {', '.join(DTYPES)}",
                hint="print it in hostir's own form",
            )
        over = [m for m in type.mesh.axes if m in type.partial] if type.mesh else []
        lead = tuple(f"{self.domain(f'ideviceIdx.{_letter(type.mesh, m)}', _ranks(type, m))}rf" for m in over)
        axes: dict[int, tuple[str, ...]] = {}
        for k in sorted(range(len(type.axes)), key=lambda k: order[k] if order else k):
            axes[k] = self.axis(type.axes[k], type.mesh)
        head = f"T{self.tensors}_{memory}_{DTYPES[type.dtype.name]}"
        self.tensors += 1
        mesh = f" (DeviceMesh{_devices(type.mesh)})" if type.mesh else ""
        self.shown[value.name] = Printed(head, lead, tuple(axes[k] for k in range(len(axes))), mesh)
        return self.shown[value.name]

    def domain(self, head: str, extent: object) -> str:
        self.domains += 1
        return f"{head}{self.domains - 1}{{{extent}}}"

    def axis(
        self, axis: Axis, mesh: Mesh | None, iter_type: str = "i", cut: tuple[int, Size] | None = None
    ) -> tuple[str, ...]:
        """Return the printed IterDomains of an axis, outermost first.

        A sharded axis, and an axis that is cut into slices, is printed as several IterDomains.

        Args:
            axis: the axis.
            mesh: the mesh of the tensor.
            iter_type: i for a plain axis, r for a reduced axis.
            cut: the number of IterDomains before the stream axis, and the number of slices; None if the axis is not
                cut into slices.
        """
        parts: list[tuple[str, Size]] = []
        for factor in axis.factors:
            if factor.on and mesh:
                ranks = Size(mesh.size(factor.on))
                parts += [(f"deviceIdx.{_letter(mesh, factor.on)}", ranks), ("S", factor.extent / ranks)]
            else:
                parts.append(("S", factor.extent))
        parts = [p for k, p in enumerate(parts) if p[0] != "S" or not p[1].is_one or k == 0]
        uncut = axis.extent
        if cut:
            parts.insert(cut[0], ("streamIdx", cut[1]))
            uncut = uncut * cut[1]
        if len(parts) == 1:
            return (self.domain(iter_type + parts[0][0], _size(parts[0][1])),)
        if parts[-1][0] != "S":
            parts.append(("S", ONE))
        shown, rest = [], _size(uncut)
        for on, extent in parts[:-1]:
            shown.append(self.domain(iter_type + on, _size(extent)))
            rest = f"( ceilDiv({rest}, {_size(extent)}) )"
        return (*shown, self.domain(f"{iter_type}S", rest))

    def block(self, body: Iterable[Statement], depth: int) -> Iterator[str]:
        for s in body:
            if isinstance(s, host.For):
                yield f"{INDENT * depth}FOR {self.index_name(s.index)} from 0 to {_size(s.count)}:"
                yield from self.block(s.body, depth + 1)
            else:
                yield from (INDENT * depth + line for line in self.statement(s))

    def index_name(self, index: Value) -> str:
        n = 0
        while f"i{n}" in self.names.taken:
            n += 1
        self.other[index.name] = self.names.fresh(f"i{n}")
        return self.other[index.name]

    def statement(self, s: Statement) -> list[str]:
        match s:
            case host.Allocate(out=out):
                return [f"{self.define(out, 'g')} = ALLOCATE(mem_type=global, zero_init=false)"]
            case host.FreeBuffer(x=x):
                return ["Deallocate {", f"{INDENT}{self.tensor(x)}", "}"]
            case host.CurrentStream(out=out):
                self.other[out.name] = f"Stream {self.streams:#x}"
                self.streams += 1
                return [f"{self.other[out.name]} = GetCurrentStream()"]
            case host.SetStream(stream=stream):
                return [f"SetCurrentStream({self.stream(stream)})"]
            case host.Synchronize(stream=stream):
                return [f"Synchronize({self.stream(stream)})"]
            case host.Delay(microseconds=microseconds):
                return [f"Delay({microseconds})"]
            case host.Wait(handle=handle):
                return [f"Wait({self.other[handle.name]})"]
            case comm.Communication() if s.workspace is None:
                return self.communication(s)
            case views.ViewStatement():
                return self.view(s)
            case ops.TensorOp() if s.keyword() in SPELLED and not (isinstance(s, ops.Contraction) and s.ready):
                return self.computation(s)
        what = f"{s.keyword()} ... ready" if isinstance(s, ops.Contraction) and s.ready else s.keyword()
        what += " ... by" if s.workspace else ""
        raise error(
            f"nvFuser's form has no spelling for '{what}'",
            s.span,
            expected="a computation that nvFuser has, or what all ranks of a team do alike: no signals, no copies",
        )

    def tensor(self, value: Value) -> Printed:
        return self.shown[value.name]

    def view(self, s: views.ViewStatement) -> list[str]:
        x = self.tensor(s.x)
        if isinstance(s, host.Select):
            out, index = self.define(s.out, "l"), self.index(s.index)
            return _assign(out, f"HirAliasSelect( {x}, axis = {x.axes[s.axis][0]}, index = {index} )")
        if isinstance(s, host.Chunk):
            return [f"{self.chunk(s)} = ShardByStream({x}, stream_index={self.index(s.index)})"]
        if isinstance(s, views.Permute):
            return _assign(self.define(s.out, "l", s.axes), f"Set.Permute( {x}, cache_op=Streaming )")
        out = self.define(s.out, "l")
        if isinstance(s, host.AsPartial):
            return [f"{out} = AsPartial({x}, over=deviceIdx.{_letter(s.x.tensor.mesh, s.over)})"]
        if isinstance(s, host.Dense):
            return _assign(out, f"Dense( {x} )")
        if isinstance(s, views.Shard):
            return _assign(out, f"Set( {x}, cache_op=Streaming )")
        return [f"{out} = view( {x} )"]

    def chunk(self, s: host.Chunk) -> Printed:
        """Return the printed result of a chunk.

        As in nvFuser, the axis keeps its full extent. It is printed as a stream axis and the parts around it.
        """
        out = self.define(s.out, "l")
        cut = 0
        for factor in s.x.tensor.axes[s.axis].factors:
            if factor.on is None:
                break
            cut += 1
            if not s.x.tensor.local_factor(factor).is_one:
                break
        axis = self.axis(s.out.tensor.axes[s.axis], s.out.tensor.mesh, cut=(cut, s.count))
        axes = (*out.axes[: s.axis], axis, *out.axes[s.axis + 1 :])
        self.shown[s.out.name] = Printed(out.head, out.lead, axes, out.mesh)
        return self.shown[s.out.name]

    def computation(self, s: ops.TensorOp) -> list[str]:
        out = self.tensor(s.out)
        first, *rest = (self.tensor(v) for v in s.operands)
        if isinstance(s, ops.Matmul):
            if s.addend is not None:
                raise s.fail("nvFuser's form has no spelling for a matmul that adds to its result")
            return [str(out), f"   = matmul({first},", f"            {rest[0]})"]
        if isinstance(s, ops.Linear):
            lines = [str(out), f"   = linear({first},"]
            return [*lines, *(f"            {t}{',' if t != rest[-1] else ')'}" for t in rest)]
        if isinstance(s, ops.Binary):
            return [str(out), f"   = {first}", f"   {'+' if isinstance(s, ops.Add) else '*'} {rest[0]};"]
        if isinstance(s, ops.Sum):
            return _assign(
                self.summed(s, out), f"reduction( {first}, op = add, initial value = float(0), allreduce = false )"
            )
        if isinstance(s, ops.Cast):
            source, target = FLOAT_OF[s.x.tensor.dtype.name], FLOAT_OF[s.dtype]
            plain = source != target and {source, target} == {"double", "float"}
            return _assign(out, f"({target})({first});" if plain else f"__{source}2{target}({first});")
        if isinstance(s, (ops.Scale, ops.Offset)):
            raise s.fail(f"nvFuser's form has no spelling here for {s.keyword()}, which computes with a number")
        if isinstance(s, ops.DenseCopy):
            return _assign(out, f"Set( {first}, cache_op=Streaming )")
        return _assign(out, f"{s.keyword()}({first});")

    def summed(self, s: ops.Sum, out: Printed) -> Printed:
        """Return the printed result of a sum. As in nvFuser, the printed result shows the reduced axis, too."""
        reduced = self.axis(s.x.tensor.axes[s.axis], s.x.tensor.mesh, iter_type="r")
        return Printed(out.head, out.lead, (*out.axes[: s.axis], reduced, *out.axes[s.axis :]), out.mesh)

    def communication(self, s: comm.Communication) -> list[str]:
        name = f"Communication {self.handles}"
        self.handles += 1
        x, out = s.x.tensor, s.out.tensor
        root = None
        if isinstance(s, comm.Collective):
            team = s.mesh.team(s.mesh.devices[0], s.over)
        else:
            source, target = (m.devices if m else () for m in (x.mesh, out.mesh))
            team = tuple(sorted({*source, *target}))
            common = [d for d in source if d in target]
            root = {"gather": target, "scatter": (*common, *source)}.get(s.keyword(), source)[0]
        lead = f"type={TYPES[type(s)]}, team=({' '.join(map(str, team))}), "
        lead += f"root={root}, " if root is not None else ""
        line = f"{name} ({lead}input={self.tensor(s.x)}, output={self.tensor(s.out)}, backend=NCCL)"
        if s.handle is None:
            return [line, f"Wait({name})"]
        self.other[s.handle.name] = name
        return [line]

    def stream(self, expr: Expr) -> str:
        if isinstance(expr, Ref) and expr.value.type is Kind.STREAM:
            return self.other[expr.value.name]
        self.uses_pool = True
        if isinstance(expr, Bin) and expr.op == "%" and expr.right == Lit(self.program.streams):
            return f"Stream ( {self.index(expr.left)} % numberOfStreams )"
        return f"Stream {self.index(expr)}"

    def index(self, expr: Expr) -> str:
        if isinstance(expr, Bin):
            return f"( {self.index(expr.left)} {expr.op} {self.index(expr.right)} )"
        return str(expr) if isinstance(expr, Lit) else self.other[expr.value.name]


def print_dump(program: Program) -> str:
    """Return the text of a host program in nvFuser's form. Raise a HostIRError for a fusion."""
    if program.phase is not Phase.HOST:
        raise error(f"@{program.name} is a fusion; nvFuser's form prints host programs", hint="lower it first")
    return DumpPrinter(program).text()


def _assign(out: Printed, call: str) -> list[str]:
    return [str(out), f"   = {call}"]


def _letter(mesh: Mesh | None, mark: str) -> str:
    return "x" if mesh is None or mesh.axes.index(mark) == len(mesh.axes) - 1 else "y"


def _ranks(type: TensorType, mark: str) -> int:
    return type.mesh.size(mark) if type.mesh else 1


def _devices(mesh: Mesh) -> str:
    if len(mesh.shape) > 2:
        raise error(f"nvFuser's form has no spelling for a mesh of {len(mesh.shape)} axes", expected="one or two axes")
    if len(mesh.shape) == 1:
        return f"{{{' '.join(map(str, mesh.devices))}}}"
    n = mesh.shape[1]
    rows = (" ".join(map(str, mesh.devices[k : k + n])) for k in range(0, len(mesh.devices), n))
    return f"{{{''.join(f'{{{row}}}' for row in rows)}}}"


def _size(size: Size) -> str:
    """Return the text of a size. As in nvFuser, each product or quotient of two operands is in parentheses."""
    up = [name for name, power in size.symbols for _ in range(power)]
    down = [name for name, power in size.symbols for _ in range(-power)]
    up = [str(size.num), *up] if size.num != 1 or not up else up
    text = up[0]
    for name in up[1:]:
        text = f"( {text} * {name} )"
    for name in [str(size.den)] * (size.den != 1) + down:
        text = f"( {text} / {name} )"
    return text
