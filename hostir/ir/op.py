"""Define the base class of statements: frozen dataclasses whose fields and syntax template drive everything else.

A statement class declares
- its fields; the codec in a field's annotation tells its syntax and its effect (read, write, define);
- `syntax`, the template for both printer and grammar: literal words, `{field}`, `<? optional ?>`;
- `infer`, the type of its result, if the operands determine it;
- `evaluate`, its meaning on the machine protocol;
- a docstring that ends with an example, which the tests parse, print, check and run.

The idea of one declarative string for both directions comes from xDSL's `assembly_format`; registering codecs by
annotation is new.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum, Flag, auto
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self, TypeVar, get_args, get_type_hints

from hostir.ir.sizes import ONE, Division, Size
from hostir.ir.source import HostIRError, Span, error
from hostir.ir.types import Kind, TensorType, Type

if TYPE_CHECKING:
    from hostir.ir.machine import Frame


@dataclass(frozen=True)
class Value:
    """A name and its type. Equal names in one program are one value; the span points at its definition."""

    name: str
    type: Type
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def tensor(self) -> TensorType:
        if not isinstance(self.type, TensorType):
            raise error(f"%{self.name} is a {self.type}, not a tensor", self.span, expected="a tensor")
        return self.type

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Lit:
    """An integer in an index expression."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Ref:
    """A loop index, or a stream, in an index expression."""

    value: Value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Bin:
    """`left op right` on indices; op is one of + - * / %, and / rounds down."""

    op: str
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"{_operand(self.left)} {self.op} {_operand(self.right)}"


Expr = Lit | Ref | Bin
ZERO = Lit(0)


def _operand(expr: Expr) -> str:
    return f"({expr})" if isinstance(expr, Bin) else str(expr)


def expr_values(expr: Expr) -> Iterator[Value]:
    """Yield the values in an expression."""
    if isinstance(expr, Ref):
        yield expr.value
    elif isinstance(expr, Bin):
        yield from expr_values(expr.left)
        yield from expr_values(expr.right)


def rename_expr(expr: Expr, names: dict[str, Value]) -> Expr:
    """Return the expression with each value whose name is in `names` replaced."""
    if isinstance(expr, Ref):
        return Ref(names.get(expr.value.name, expr.value))
    if isinstance(expr, Bin):
        return Bin(expr.op, rename_expr(expr.left, names), rename_expr(expr.right, names))
    return expr


class Phase(Enum):
    """The phase of a program: a fusion (values) before lowering, then a host program (buffers, streams, handles)."""

    FUSION = "fusion"
    HOST = "program"


BOTH = frozenset(Phase)


class Codec(Enum):
    """The codec of a field: its syntax, and the effect of the statement on it."""

    READ = "tensor operand that is read"
    WRITE = "tensor operand that is written"
    ALIAS = "tensor operand that the result is a view of"
    FREE = "tensor operand that is freed here"
    DEFINE = "value that is defined here"
    USE = "handle, stream, flags or tensor that is used, but neither read nor written"
    STREAM = "stream: an index into the pool, or a stream value"
    INDEX = "index expression"
    SIZE = "size"
    INT = "integer"
    INTS = "integers in parentheses"
    NUMBER = "number"
    NAME = "name"
    BLOCK = "statements in braces"

    # Enum's hash is a Python call, and codecs are looked up for every field of every statement.
    __hash__ = object.__hash__


Read = Annotated[Value, Codec.READ]
ReadIf = Annotated[Value | None, Codec.READ]
Write = Annotated[Value, Codec.WRITE]
Alias = Annotated[Value, Codec.ALIAS]
Free = Annotated[Value, Codec.FREE]
Define = Annotated[Value, Codec.DEFINE]
DefineIf = Annotated[Value | None, Codec.DEFINE]
Use = Annotated[Value, Codec.USE]
UseIf = Annotated[Value | None, Codec.USE]
StreamRef = Annotated[Expr, Codec.STREAM]
Index = Annotated[Expr, Codec.INDEX]
Extent = Annotated[Size, Codec.SIZE]
Int = Annotated[int, Codec.INT]
Ints = Annotated[tuple[int, ...], Codec.INTS]
Number = Annotated[float, Codec.NUMBER]
Name = Annotated[str, Codec.NAME]

VALUE_CODECS = {Codec.READ, Codec.WRITE, Codec.ALIAS, Codec.FREE, Codec.DEFINE, Codec.USE}

Shape = tuple[Size, ...]  # or strides


class Sync(Flag):
    """The order that a statement adds, if it does nothing else."""

    NOTHING = 0
    STREAMS = auto()  # the current stream waits for another stream of its rank
    WAIT = auto()  # the current stream waits for other ranks
    SIGNAL = auto()  # other ranks learn about the progress of the current stream
    MEET = WAIT | SIGNAL


@dataclass(frozen=True)
class FlagOperand:
    """A row of flags that a statement signals or waits for.

    Fields:
        slot, epoch: index and epoch of the single flag that it uses; the slot is None if it uses each flag of the row.
        rows: values whose rows are split into one equal block for each flag; each block waits for its flag.
        own_rows: rows that replace one of the blocks.
        raises: True if it sets the flags; False if it waits for them.
    """

    flags: Value
    slot: Expr | None
    epoch: Expr
    rows: tuple[Value, ...] = ()
    own_rows: Value | None = None
    raises: bool = False


class ViewStrides(Protocol):
    """Computes the strides of a view, as formulas, from the strides of the view's operand `x`."""

    def same(self) -> Shape:
        """Return the strides of `x`."""

    def without(self, axis: int) -> Shape:
        """Return the strides of `x` without an axis, as for a view at one index of it."""

    def permuted(self, axes: tuple[int, ...]) -> Shape:
        """Return the strides of `x` with permuted axes."""

    def reshaped(self, shape: Shape) -> Shape:
        """Return the strides of `x` in another shape."""

    def dense(self) -> Shape:
        """Return the strides of a dense tensor of the shape of `x`."""


class Traits:
    """The traits of a statement, which analyses ask for instead of keeping lists of classes.

    These are the defaults. The values that a statement reads, writes, views, frees and defines follow from the codecs
    of its fields: see `Operands`.
    """

    on_host: ClassVar[bool] = False  # it issues no work, whichever stream is current
    orders: ClassVar[Sync] = Sync.NOTHING  # the order that it adds, if it does nothing else
    transfers: ClassVar[bool] = False  # it moves elements between ranks
    collective: ClassVar[bool] = False  # every rank of its team issues it, all in the same order
    one_sided: ClassVar[bool] = False  # it uses memory or signals that ranks share
    per_rank: ClassVar[bool] = False  # it names single ranks, which unsharded tensors do not have
    symmetric: ClassVar[bool] = False  # it defines a symmetric buffer, which lasts from call to call
    may_copy: ClassVar[bool] = False  # its result is a view or a copy: strides at run time decide
    conditional: ClassVar[bool] = False  # a rank may skip its body
    explicit: ClassVar[bool] = True  # it may remain in a fusion with explicit communications
    contracts: ClassVar[bool] = False  # it multiplies matrices
    uncut: ClassVar[bool] = False  # `evaluate` takes unsliced tensors, except `rows` of `flag_operands` by block

    @classmethod
    def known_uncut(cls) -> bool:
        """Return True if `uncut` was declared at or below the class that defines `evaluate`.

        An inherited `uncut` does not count for a class with another `evaluate`.
        """
        declares, runs = (next(c for c in cls.__mro__ if name in vars(c)) for name in ("uncut", "evaluate"))
        return cls.uncut and issubclass(declares, runs)

    @property
    def waits(self) -> int:
        """The number of streams or ranks that its stream waits for, if it only orders (see `orders`)."""
        return int(bool(self.orders & (Sync.STREAMS | Sync.WAIT)))

    @property
    def sets_stream(self) -> Expr | None:
        """The stream to which later statements are issued, if it changes the stream."""
        return None

    @property
    def place(self) -> tuple[Value, str] | None:
        """The index that it defines as this rank's place along a mesh axis; and the axis."""
        return None

    @property
    def flag_operands(self) -> tuple[FlagOperand, ...]:
        """The rows of flags that it signals or waits for."""
        return ()

    @property
    def peer_place(self) -> tuple[Expr, str] | None:
        """The place of the peer that it signals, or copies to or from; and the mesh axis of the place."""
        return None

    @property
    def remote(self) -> Value | None:
        """The view of a symmetric buffer that it reads or writes at a peer."""
        return None

    @property
    def needs_reserved_sm(self) -> bool:
        """True if it needs the SM that a kernel reserves while it waits for flags."""
        return False

    @property
    def computed(self) -> Value | None:
        """The value whose elements it computes and rounds to the value's dtype."""
        return None

    @property
    def summed(self) -> Sequence[Size]:
        """The local extents of the axes that it sums over for each element."""
        return ()

    @property
    def right_side(self) -> tuple[Value, int] | None:
        """The right operand of a product, and the operand's contracted axis."""
        return None

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The teams of ranks that meet in it, each in ascending order."""
        return ()

    @property
    def addends(self) -> int:
        """The number of ranks whose partial sums it adds up; 0 if it adds up no partial sums."""
        return 0

    @property
    def needs_dense(self) -> bool:
        """True if the tensors that it reads and writes must be dense."""
        return False

    @property
    def compared(self) -> tuple[Shape, ...]:
        """The shapes, or numbers of elements, that must match between the ranks that meet in it."""
        return ()

    def strides(self, of: ViewStrides) -> Shape | None:
        """Return the strides of its result, if the result is a view; None if no formula describes them."""
        return None

    @property
    def repeats(self) -> Size:
        """The maximum number of times that its body runs."""
        return ONE

    def rounds(self, frame: Frame) -> Iterator[tuple[int, ...]]:
        """Yield once for each run of its body: the loop's index, which the frame then holds, or () for a condition."""
        yield from ()

    def waiting(self, flags: Value, epoch: Expr, first: Expr, own: Value | None) -> Statement | None:
        """Return the same statement, waiting for flags while it runs; None if it cannot wait or already waits."""
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Operands:
    """The fields of a statement, by their codecs: the values that it reads, writes, views, frees and defines.

    Equality, hash and `repr` are defined here for all statements. If `dataclass` generated them for each class, loading
    the modules of statements would take twice as long.
    """

    span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)
    note: str = field(default="", compare=False, repr=False, kw_only=True)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._operands() == other._operands()

    def __hash__(self) -> int:
        return hash((type(self), self._operands()))

    def __repr__(self) -> str:
        named = dict(zip(codecs_of(type(self)), self._operands(), strict=True))
        typed = {name: f"{x}: {x.type}" if isinstance(x, Value) else str(x) for name, x in named.items()}
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in typed.items())})"

    def _operands(self) -> tuple[Any, ...]:
        """Return the fields that equality compares: all except the span and the note."""
        return tuple(getattr(self, name) for name in codecs_of(type(self)))

    def values(self, *codecs: Codec) -> Iterator[Value]:
        """Yield the values in fields of these codecs, in the order of the fields; index expressions count as USE."""
        for name, codec in codecs_of(type(self)).items():
            got = getattr(self, name)
            if got is None:
                continue
            if codec in codecs and codec in VALUE_CODECS:
                yield got
            elif Codec.USE in codecs and codec in (Codec.STREAM, Codec.INDEX):
                yield from expr_values(got)

    def defines(self, phase: Phase) -> Value | None:
        """Return the value that this statement defines, if any. In a fusion, a written value counts as defined."""
        return next(self.values(Codec.DEFINE, *([Codec.WRITE] if phase is Phase.FUSION else [])), None)

    def uses(self, phase: Phase) -> tuple[Value, ...]:
        """Return every value that it uses without defining it."""
        written = [] if phase is Phase.FUSION else [Codec.WRITE]
        return tuple(self.values(Codec.READ, *written, Codec.ALIAS, Codec.FREE, Codec.USE))

    @property
    def reads(self) -> tuple[Value, ...]:
        """The tensors that it reads, in the order in which `evaluate` gives them to a machine."""
        return tuple(self.values(Codec.READ))

    @cached_property
    def named(self) -> tuple[Value, ...]:
        """Return every value that it mentions."""
        return tuple(self.values(*VALUE_CODECS))

    @cached_property
    def bodies(self) -> tuple[tuple[Statement, ...], ...]:
        return tuple(getattr(self, n) for n, c in codecs_of(type(self)).items() if c is Codec.BLOCK)

    @cached_property
    def viewed(self) -> Value | None:
        """The value that its result is a view of, if any."""
        return next(self.values(Codec.ALIAS), None)

    @cached_property
    def freed(self) -> Value | None:
        """The value whose buffer it frees, if any."""
        return next(self.values(Codec.FREE), None)

    @cached_property
    def buffer(self) -> Value | None:
        """In a host program, the value that it defines with new memory (not a view), if any."""
        defined = self.defines(Phase.HOST)
        if defined is None or not isinstance(defined.type, TensorType) or self.viewed is not None:
            return None
        return defined

    @cached_property
    def started(self) -> Value | None:
        """The handle of the communication that it starts, if any."""
        defined = self.defines(Phase.HOST)
        return defined if defined is not None and defined.type is Kind.HANDLE else None

    @cached_property
    def awaited(self) -> Value | None:
        """The handle of the communication that it waits for, if any."""
        return next((value for value in self.values(Codec.USE) if value.type is Kind.HANDLE), None)

    def with_bodies(self, change: Callable[[tuple[Statement, ...]], tuple[Statement, ...]]) -> Self:
        """Return the same statement with each body replaced by `change(body)`."""
        named = codecs_of(type(self)).items()
        blocks: dict[str, Any] = {n: change(getattr(self, n)) for n, c in named if c is Codec.BLOCK}
        return replace(self, **blocks) if blocks else self

    def rename(self, names: dict[str, Value]) -> Self:
        """Return the same statement with each operand whose name is in `names` replaced."""
        changes: dict[str, Any] = {}
        for name, codec in codecs_of(type(self)).items():
            got = getattr(self, name)
            if got is None:
                continue
            if codec in VALUE_CODECS:
                changes[name] = names.get(got.name, got)
            elif codec in (Codec.STREAM, Codec.INDEX):
                changes[name] = rename_expr(got, names)
            elif codec is Codec.BLOCK:
                changes[name] = tuple(s.rename(names) for s in got)
        return replace(self, **changes)

    def fail(self, message: str, *, expected: str = "", hint: str = "") -> HostIRError:
        """Return an error that points at this statement."""
        return error(message, self.span, expected=expected, hint=hint)


@dataclass(frozen=True, eq=False, repr=False)
class Statement(Traits, Operands):
    """The base class of all statements: what each class declares."""

    syntax: ClassVar[str] = ""
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.HOST})

    def infer(self) -> Type | None:
        """Return the type of the value that it defines, from its operands; None if the text must declare the type."""
        return None

    def verify(self) -> None:
        """Raise if the operands do not fit each other."""

    def verify_layout(self) -> None:
        """Raise if the parts that ranks hold do not match. Called once every change of sharding is explicit."""

    def divisions(self) -> Iterator[Division]:
        """Yield the divisions into equal parts that do not follow from the types of its values."""
        yield from ()

    def evaluate(self, frame: Frame) -> None:
        """Run the statement on the frame's machine."""
        raise AssertionError(f"{type(self).__name__} has no meaning on a machine")

    def in_place(self, operand: int) -> bool:
        """Return True if its result may be exactly the view that it reads as this operand."""
        return False

    @classmethod
    @cache
    def keyword(cls) -> str:
        """Return the word that names the statement in the text."""
        words = re.findall(r"[a-z_]+", re.sub(r"<\?.*?\?>|\{\w+\}", "", cls.syntax))
        return str(words[0])

    @classmethod
    def form(cls, phase: Phase) -> str:
        """Return the syntax template of a phase."""
        return cls.syntax


Body = Annotated[tuple[Statement, ...], Codec.BLOCK]


_codecs: dict[type[Operands], dict[str, Codec]] = {}  # cached, because get_type_hints is slow
_defaults: dict[type[Operands], dict[str, Any]] = {}


def codecs_of(cls: type[Operands]) -> dict[str, Codec]:
    """Return the codec of each field of a statement class, by field name."""
    if cls not in _codecs:
        hints = get_type_hints(cls, include_extras=True)
        annotated = {f.name: [a for a in get_args(hints[f.name])[1:] if isinstance(a, Codec)] for f in _own_fields(cls)}
        if bare := [name for name, codecs in annotated.items() if not codecs]:
            raise TypeError(f"{cls.__name__}.{bare[0]} has no codec: annotate it with one, such as Read")
        _codecs[cls] = {name: codecs[0] for name, codecs in annotated.items()}
    return _codecs[cls]


def defaults_of(cls: type[Operands]) -> dict[str, Any]:
    """Return the default of each field that has one."""
    if cls not in _defaults:
        _defaults[cls] = {f.name: f.default for f in _own_fields(cls) if f.default is not MISSING}
    return _defaults[cls]


def _own_fields(cls: type[Operands]) -> list[Field[Any]]:
    return [f for f in fields(cls) if f.name not in ("span", "note")]


REGISTRY: dict[str, type[Statement]] = {}


S = TypeVar("S", bound="Statement")


def statement(cls: type[S]) -> type[S]:
    """Register a statement class under its keyword."""
    REGISTRY[cls.keyword()] = cls
    return cls
