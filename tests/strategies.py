"""Hypothesis strategies: random programs for tests of the text, and random sharded fusions for tests of lowering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

import hostir as hi
from hostir.ir import Axis, HostIRError, Mesh, Phase, Program, Statement, TensorType, Value
from hostir.ir.comm_ops import Reshard
from hostir.ir.op import REGISTRY, Bin, Codec, Expr, Lit, Ref, codecs_of, defaults_of
from hostir.ir.sizes import ONE, Size
from hostir.ir.text import FieldPart, OptionalPart, SyntaxPart, template
from hostir.ir.types import DTYPES, FLAG, STREAM, Factor, Kind

Draw = Callable[..., Any]

# Programs have any registered statement with operands that its codecs allow. They parse and print, but have no meaning.
# A new statement is covered as soon as it is registered.
WORDS = [
    "a",
    "b_1",
    "x",
    "M",
    "K",
    "didx",
    "tp",
    "to",
    "axis",
    "over",
    "on",
    "in",
    "streams",
    "hosts",
    "matmul",
    "wait",
    "auto",
]
MESHES = (
    Mesh("mesh", ("didx",), (4,), (0, 1, 2, 3)),
    Mesh("grid", ("dp", "tp"), (2, 3), (5, 4, 3, 2, 1, 0)),
    Mesh("row", ("over", "on"), (1, 2), (7, 8)),
    Mesh("one", ("x",), (1,), (6,)),
    Mesh("cube", ("dp", "cp", "tp"), (2, 1, 2), (0, 2, 1, 3)),
)

names = st.sampled_from(WORDS)


@st.composite
def sizes(draw: Draw, multiple_of: int = 1, quotients: bool = True) -> Size:
    size = Size(draw(st.integers(1, 9)) * multiple_of)
    for name in draw(st.lists(st.sampled_from(["M", "K", "on", "streams", "hosts"]), max_size=3)):
        size = size * Size.of(name) if not quotients or draw(st.booleans()) else size / Size.of(name)
    return size / draw(st.integers(1, 5)) if quotients and size.symbols and draw(st.booleans()) else size


@dataclass
class Text:
    """A program under construction: its meshes, and the values in scope."""

    phase: Phase
    meshes: tuple[Mesh, ...]
    values: list[Value] = field(default_factory=list)
    count: int = 0

    def define(self, draw: Draw, type: TensorType | Kind) -> Value:
        taken = {v.name for v in self.values}
        free = [name for name in WORDS if name not in taken]
        if free and draw(st.booleans()):
            value = Value(draw(st.sampled_from(free)), type)
        else:
            self.count += 1
            value = Value(f"v{self.count}", type)
        self.values.append(value)
        return value

    def tensor_type(self, draw: Draw) -> TensorType:
        fusion = self.phase is Phase.FUSION
        mesh = draw(st.sampled_from([*self.meshes, *([None] if fusion else [])]))
        marks = list(mesh.axes if mesh else ()) + ([STREAM] if fusion else [])
        marks = draw(st.permutations(marks))
        axes = []
        for _ in range(draw(st.integers(0, 4))):
            factors, count = [], draw(st.sampled_from([1, 1, 1, 2, 3]))
            for _ in range(count):
                on = marks.pop() if marks and draw(st.integers(0, 2)) == 0 else None
                ranks = mesh.size(on) if mesh and on in mesh.axes else 1
                # A quotient could cancel against a neighbouring factor that ranks must divide.
                factors.append(Factor(draw(sizes(ranks, quotients=count == 1)), on))
            axes.append(Axis(tuple(factors)))
        partial = tuple(sorted(m for m in marks if m != STREAM and draw(st.integers(0, 4)) == 0))
        dtypes = [*DTYPES.values(), *([] if fusion else [FLAG])]
        return TensorType(draw(st.sampled_from(dtypes)), tuple(axes), mesh, partial)

    def expr(self, draw: Draw, depth: int = 2) -> Expr:
        refs = [v for v in self.values if v.type in (Kind.INDEX, Kind.STREAM)]
        if depth and draw(st.integers(0, 2)) == 0:
            op = draw(st.sampled_from("+-*/%"))
            return Bin(op, self.expr(draw, depth - 1), self.expr(draw, depth - 1))
        if refs and draw(st.booleans()):
            return Ref(draw(st.sampled_from(refs)))
        return Lit(draw(st.integers(0, 99)))


@st.composite
def programs(draw: Draw) -> Program:
    """Draw a program of either phase with up to about twenty statements."""
    phase = draw(st.sampled_from(list(Phase)))
    text = Text(phase, tuple(draw(st.lists(st.sampled_from(MESHES), min_size=1, unique=True))))
    inputs = [text.define(draw, text.tensor_type(draw)) for _ in range(draw(st.integers(1, 3)))]
    body = _block(draw, text, depth=0)
    tensors = [v for v in text.values if isinstance(v.type, TensorType)]
    outputs = draw(st.lists(st.sampled_from(tensors), max_size=3))
    streams = draw(st.integers(0, 4)) if phase is Phase.HOST else 0
    return Program(draw(names), phase, text.meshes, tuple(inputs), tuple(outputs), body, streams)


def _block(draw: Draw, text: Text, depth: int) -> tuple[Statement, ...]:
    classes = [cls for cls in REGISTRY.values() if text.phase in cls.phases]
    if depth == 2:
        classes = [cls for cls in classes if Codec.BLOCK not in codecs_of(cls).values()]
    count = draw(st.integers(0, 8 if depth == 0 else 3))
    return tuple(_statement(draw, text, draw(st.sampled_from(classes)), depth) for _ in range(count))


def _statement(draw: Draw, text: Text, cls: type[Statement], depth: int) -> Statement:
    codecs, fields = codecs_of(cls), dict(defaults_of(cls))
    parts = template(cls.form(text.phase))
    outer, defined = list(text.values), None
    for part in _chosen(draw, parts):
        codec = codecs[part.name]
        if codec is Codec.DEFINE or (codec is Codec.WRITE and text.phase is Phase.FUSION):
            defined = part.name
            fields[part.name] = Value("_", Kind.INDEX)
            if part is not parts[0]:  # such as the index of a loop, which its body may use
                fields[part.name] = text.define(draw, Kind.INDEX)
                defined = None
        elif codec is Codec.BLOCK:
            fields[part.name] = _block(draw, text, depth + 1)
        else:
            fields[part.name] = _operand(draw, text, codec)
    if Codec.BLOCK in codecs.values():
        text.values = outer
    statement = cls(**fields)
    if defined is not None:
        fields[defined] = text.define(draw, _result_type(draw, text, statement, defined))
    return cls(**fields)


def _chosen(draw: Draw, parts: tuple[SyntaxPart, ...]) -> list[FieldPart]:
    """Return the fields to fill in the order of the text, with some of the optional ones."""
    chosen: list[FieldPart] = []
    for part in parts:
        if isinstance(part, FieldPart):
            chosen.append(part)
        elif isinstance(part, OptionalPart) and draw(st.booleans()):
            chosen += _chosen(draw, part.parts)
    return chosen


def _operand(draw: Draw, text: Text, codec: Codec) -> Any:
    tensors = [v for v in text.values if isinstance(v.type, TensorType)]
    return {
        Codec.READ: lambda: draw(st.sampled_from(tensors)),
        Codec.WRITE: lambda: draw(st.sampled_from(tensors)),
        Codec.ALIAS: lambda: draw(st.sampled_from(tensors)),
        Codec.FREE: lambda: draw(st.sampled_from(tensors)),
        Codec.USE: lambda: draw(st.sampled_from(text.values)),
        Codec.STREAM: lambda: text.expr(draw),
        Codec.INDEX: lambda: text.expr(draw),
        Codec.SIZE: lambda: draw(sizes()),
        Codec.INT: lambda: draw(st.integers(0, 9)),
        Codec.INTS: lambda: tuple(draw(st.lists(st.integers(0, 9), max_size=4))),
        Codec.NUMBER: lambda: draw(st.floats(0, 1e300)),
        Codec.NAME: lambda: draw(names),
    }[codec]()


def _result_type(draw: Draw, text: Text, statement: Statement, name: str) -> TensorType | Kind:
    """Return the inferred type of a result, or another type that the text must declare."""
    if name == "handle":
        return Kind.HANDLE
    try:
        inferred = statement.infer()
    except HostIRError:
        inferred = None
    if inferred is None or (isinstance(inferred, TensorType) and draw(st.booleans())):
        return text.tensor_type(draw)
    return inferred


# Fusions are written with the DSL, with annotations that are mostly legal.
@dataclass
class Drawn:
    """A fusion, and the values of its symbolic sizes."""

    fusion: hi.Fusion
    sizes: dict[str, int]


@dataclass
class Plan:
    """A fusion under construction."""

    ranks: int
    mesh: hi.DeviceMesh
    sizes: dict[str, int]
    tensors: list[hi.Tensor] = field(default_factory=list)
    inputs: int = 0
    summed: list[tuple[hi.Tensor, ...]] = field(default_factory=list)  # operands and results of row-parallel products

    def input(self, shape: list[Size], dtype: str) -> hi.Tensor:
        self.inputs += 1
        return hi.tensor(f"in{self.inputs}", shape, dtype)

    def size(self, extent: int) -> Size:
        """Return the symbol for an extent, or the extent if it has no symbol."""
        return next((Size.of(name) for name, value in self.sizes.items() if value == extent), Size(extent))

    def divides(self, count: int, extent: Size) -> bool:
        return extent.bind(self.sizes) % count == 0


UNARY = (hi.relu, hi.gelu, hi.silu)
NAMED: list[dict[str, int]] = [{}, {}, {}, {"M": 16}, {"M": 16, "N": 8}]


@st.composite
def fusions(draw: Draw, ranks: int, named: Sequence[dict[str, int]] = NAMED) -> Drawn | HostIRError:
    """Draw a sharded fusion of one to four computations, or the error of an illegal annotation.

    One of the bindings `named` is drawn: its extents become symbols.
    """
    plan = Plan(ranks, _mesh(draw, ranks), draw(st.sampled_from(named)))
    dtype = draw(st.sampled_from(["f32", "f32", "f32", "bf16", "f16"]))
    try:
        with hi.Fusion("drawn") as fusion:
            plan.tensors = [plan.input(_shape(draw, plan), dtype)]
            for _ in range(draw(st.integers(1, 4))):
                plan.tensors.append(_computation(draw, plan))
            results = [t for t in plan.tensors if t not in fusion.inputs]
            extra = [t for t in results[:-1] if draw(st.integers(0, 4)) == 0]
            fusion.output(results[-1], *extra)
        placed = [t.name for product in plan.summed for t in product]
        for product in plan.summed:
            _sum_over_ranks(draw, plan, *product)
        for t in fusion.inputs:
            if t.name not in placed and draw(st.integers(0, 3)):
                _spread(draw, plan, t)
        resharded = {s.out.name for s in fusion.program().body if isinstance(s, Reshard)}
        for t in results:
            if t.name not in placed and (t.name in resharded or draw(st.integers(0, 2)) == 0):
                _spread(draw, plan, t)
        if draw(st.integers(0, 3)):
            _stream(draw, plan, draw(st.sampled_from(results)))
    except HostIRError as illegal:
        return illegal
    return Drawn(fusion, {name: plan.sizes[name] for name in sorted(fusion.program().size_names)})


def _mesh(draw: Draw, ranks: int) -> hi.DeviceMesh:
    """Draw a mesh of all ranks in a line or a grid, sometimes in another order."""
    devices = list(range(ranks))
    if draw(st.integers(0, 4)) == 0:
        devices = draw(st.permutations(devices))
    rows = draw(st.sampled_from([0, 0, 0, *(n for n in (1, 2, 4) if ranks % n == 0)]))
    if not rows:
        return hi.DeviceMesh(devices)
    width = ranks // rows
    if width > 1 and draw(st.integers(0, 7)) == 0:
        lines = [devices[i : i + 2] for i in range(0, ranks, 2)] if width % 2 == 0 else [[d] for d in devices]
        each = len(lines) // rows
        blocks = [lines[i * each : (i + 1) * each] for i in range(rows)]
        return hi.DeviceMesh(blocks, names=("dp", "cp", "tp"))
    return hi.DeviceMesh([devices[i * width : (i + 1) * width] for i in range(rows)], names=("dp", "tp"))


def _shape(draw: Draw, plan: Plan) -> list[Size]:
    return [plan.size(draw(st.sampled_from([8, 16, 2, 4, 8, 16, 3]))) for _ in range(draw(st.integers(2, 4)))]


def _computation(draw: Draw, plan: Plan) -> hi.Tensor:
    x: hi.Tensor = draw(st.sampled_from([plan.tensors[-1], plan.tensors[-1], *plan.tensors]))
    shape, dtype = list(x.shape), x.dtype.name
    operations = [
        "matmul",
        "matmul",
        "batched",
        "experts",
        "by index",
        "linear",
        "row parallel",
        "add",
        "mul",
        "unary",
        "cast",
        "sum",
        "permute",
        "reshape",
        "reshard",
    ]
    matrices = {"batched", "experts", "by index"}
    operations = [name for name in operations if len(shape) > 1 or name not in matrices]
    operation = draw(st.sampled_from(operations if shape else ["mul", "unary", "cast", "reshard"]))
    columns = plan.size(draw(st.sampled_from([8, 16, 24])))
    if operation == "matmul":
        square = [t for t in plan.tensors if len(t.shape) == 2 and t.shape[0] == shape[-1] and t.dtype == x.dtype]
        right = draw(st.sampled_from(square)) if square and draw(st.booleans()) else None
        return x @ (right or plan.input([shape[-1], columns], dtype))
    if operation == "batched":
        return x @ plan.input([*shape[:-2], shape[-1], columns], dtype)
    if operation == "experts":
        groups = draw(st.integers(1, 3))
        offsets = plan.input([*shape[:-2], Size(groups + 1)], draw(st.sampled_from(["i32", "i64"])))
        if draw(st.booleans()) or len(shape) > 3:
            return hi.grouped_matmul(x, plan.input([Size(groups), shape[-1], columns], dtype), offsets)
        return hi.grouped_outer(x, plan.input([*shape[:-1], columns], dtype), offsets)
    if operation == "by index":
        rows = plan.size(draw(st.sampled_from([8, 4])))
        if draw(st.booleans()):
            return hi.permute_rows(x, plan.input([*shape[:-2], rows], "i32"))
        each = [*shape[:-2], rows, Size(2)]
        return hi.combine_rows(x, plan.input(each, "i64"), plan.input(each, dtype))
    if operation == "row parallel":
        left, right = plan.input([*shape[:-1], Size(16)], dtype), plan.input([Size(16), columns], dtype)
        plan.summed.append((left, right, left @ right))
        return plan.summed[-1][-1]
    if operation == "linear":
        weight = plan.input([columns, shape[-1]], dtype)
        return hi.linear(x, weight, plan.input([columns], dtype) if draw(st.booleans()) else None)
    if operation in ("add", "mul"):
        same = [t for t in plan.tensors if t.shape == x.shape and t.dtype == x.dtype]
        other = draw(st.sampled_from(same)) if draw(st.booleans()) else plan.input(_aligned(draw, shape), dtype)
        return x + other if operation == "add" else other * x
    if operation == "cast":
        return hi.cast(x, draw(st.sampled_from(["f32", "f32", "bf16", "f16"])))
    if operation == "sum":
        return hi.sum(x, draw(st.integers(-len(shape), len(shape) - 1)))
    if operation == "permute":
        return hi.permute(x, draw(st.permutations(range(len(shape)))))
    if operation == "reshape":
        return hi.reshape(x, _reshaped(draw, plan, shape))
    return hi.reshard(x) if operation == "reshard" else draw(st.sampled_from(UNARY))(x)


def _aligned(draw: Draw, shape: list[Size]) -> list[Size]:
    """Draw a shape that broadcasts to this shape."""
    lead = draw(st.integers(0, len(shape)))
    return [s if draw(st.integers(0, 4)) else ONE for s in shape[lead:]]


def _reshaped(draw: Draw, plan: Plan, shape: list[Size]) -> list[Size]:
    """Draw a shape with two neighbouring axes merged, or with one axis split."""
    k = draw(st.integers(0, len(shape) - 1))
    if k + 1 < len(shape) and draw(st.booleans()):
        return [*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :]]
    outer = draw(st.sampled_from([n for n in (1, 2, 4, 8) if plan.divides(n, shape[k])]))
    return [*shape[:k], Size(outer), shape[k] / outer, *shape[k + 1 :]]


def _free(t: hi.Tensor) -> dict[int, Size]:
    """Return the extents of the axes that have no parallel type yet, by position.

    A split axis counts as several axes, one for each part of the split.
    """
    factors = [factor for axis in t.axes for factor in axis.factors]
    return {k: factor.extent for k, factor in enumerate(factors) if factor.on is None}


def _spread(draw: Draw, plan: Plan, t: hi.Tensor) -> None:
    """Place a tensor on the mesh and shard some axes, sometimes on fewer devices or along the inner part of a split."""
    mesh = plan.mesh
    if draw(st.integers(0, 9)) == 0:
        mesh = hi.DeviceMesh(range(draw(st.integers(1, plan.ranks))))
    t.set_device_mesh(mesh)
    for name in mesh.names:
        ranks, free = mesh.ranks(name), _free(t)
        if not free or draw(st.integers(0, 2)) == 0:
            continue
        good = [k for k, extent in free.items() if plan.divides(ranks, extent)]
        bad = [k for k, extent in free.items() if extent.value is not None]  # symbolic extents are checked at run time
        k = draw(st.sampled_from(good if good and draw(st.integers(0, 19)) else bad or list(free)))
        if plan.divides(2 * ranks, free[k]) and draw(st.integers(0, 4)) == 0:
            t.split(k, 2)
            k += 1
        t.axis(k).parallelize(name)


def _sum_over_ranks(draw: Draw, plan: Plan, left: hi.Tensor, right: hi.Tensor, out: hi.Tensor) -> None:
    """Shard the contracted axis of a product over ranks, and replicate or shard its result."""
    name = draw(st.sampled_from(plan.mesh.names))
    for t in (left, right, out):
        t.set_device_mesh(plan.mesh)
    left.axis(len(left.shape) - 1).parallelize(name)
    right.axis(0).parallelize(name)
    good = [k for k, extent in _free(out).items() if plan.divides(plan.mesh.ranks(name), extent)]
    if good and draw(st.integers(0, 4)):
        out.axis(draw(st.sampled_from(good))).parallelize(name)


def _stream(draw: Draw, plan: Plan, t: hi.Tensor) -> None:
    """Put an axis, or its outer or inner part, on the Stream."""
    free = _free(t)
    if not free:
        return
    k = draw(st.sampled_from(list(free)))
    if plan.divides(2, free[k]) and draw(st.booleans()):
        outer = draw(st.sampled_from([n for n in (2, 4, plan.ranks) if plan.divides(n, free[k])]))
        t.split(k, outer)
        k += draw(st.integers(0, 1))
        if plan.divides(2, _free(t)[k]) and draw(st.integers(0, 2)) == 0:
            t.split(k, 2)
    t.axis(k).parallelize(hi.ParallelType.Stream)
