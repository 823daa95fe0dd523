"""Define the base class of statements. Statements are frozen dataclasses with annotated fields and a syntax template.

A statement class declares
- its fields; the annotation of a field holds its codec, which is its syntax and its effect (read, write, define);
- `syntax`, the template for printing and for parsing: literal words, `{field}`, `<? optional ?>`;
- `infer`, which returns the type of its result, if the operands determine it;
- `evaluate`, which runs the statement by calls of a machine's methods;
- a docstring that ends with an example, which the tests parse, print, check and run.

The idea of one declarative string for printing and parsing comes from xDSL's `assembly_format`. xDSL has no codecs in
annotations.
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
    """A value of a program: its name and its type. `span` is the place where it is defined.

    In one program, values with equal names are the same value.
    """

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
    """A use of a value in an index expression: a loop index, a rank, or a stream."""

    value: Value

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Bin:
    """An arithmetic operation on indices. `op` is one of + - * / %; the operator / rounds down."""

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
    """Return a copy of the expression that uses other values.

    `names` maps the name of an old value to the new value.
    """
    if isinstance(expr, Ref):
        return Ref(names.get(expr.value.name, expr.value))
    if isinstance(expr, Bin):
        return Bin(expr.op, rename_expr(expr.left, names), rename_expr(expr.right, names))
    return expr


class Phase(Enum):
    """The phase of a program. Before lowering it is a fusion. After lowering it is a host program.

    The statements of a fusion define values. The statements of a host program write buffers and run on streams.
    """

    FUSION = "fusion"
    HOST = "program"


BOTH = frozenset(Phase)


class Codec(Enum):
    """The codec of a statement's field.

    It determines the syntax of the field, and the effect of the statement on the value in the field.
    """

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

Shape = tuple[Size, ...]  # a shape, or the strides of a tensor


class Sync(Flag):
    """The order that a statement adds between streams or ranks.

    It is NOTHING for a statement that computes or moves data, even if the statement also waits.
    """

    NOTHING = 0
    STREAMS = auto()  # the current stream waits for another stream of its rank
    WAIT = auto()  # the current stream waits for other ranks
    SIGNAL = auto()  # other ranks learn about the progress of the current stream
    MEET = WAIT | SIGNAL


@dataclass(frozen=True)
class FlagOperand:
    """A row of flags that a statement signals or waits for.

    Fields:
        flags: the row of flags.
        slot: the index of the flag, if the statement uses a single flag; None if it uses all flags of the row.
        epoch: the epoch that the statement sets or waits for.
        rows: tensors with rows that are split into equal blocks, one block for each flag; empty for a single flag.
        own_rows: rows that replace one of the blocks; None if no block is replaced.
        raises: True if the statement sets the flags; False if it waits for them.
    """

    flags: Value
    slot: Expr | None
    epoch: Expr
    rows: tuple[Value, ...] = ()
    own_rows: Value | None = None
    raises: bool = False


@dataclass(frozen=True)
class IndexOperand:
    """An operand that holds indices.

    Fields:
        indices: the operand, of an integer dtype.
        limit: valid indices are at least 0 and less than `limit`.
        ascending: True if the indices must not decrease along the last axis, and may also equal `limit`.
    """

    indices: Value
    limit: Size
    ascending: bool = False


class ViewStrides(Protocol):
    """Computes the strides of a view from the strides of its operand `x`. Strides may contain symbols."""

    def same(self) -> Shape:
        """Return the strides of `x`."""

    def without(self, axis: int) -> Shape:
        """Return the strides of `x` without an axis: the strides of a view at one index of this axis."""

    def permuted(self, axes: tuple[int, ...]) -> Shape:
        """Return the strides of `x` after a permutation: entry `i` is the stride of axis `axes[i]`."""

    def reshaped(self, shape: Shape) -> Shape:
        """Return the strides of `x` in another shape."""

    def dense(self) -> Shape:
        """Return the strides of a dense tensor that has the shape of `x`."""


class Traits:
    """The traits of a statement. Analyses read traits, so that they need no lists of statement classes.

    This class has the defaults, which statement classes override. `Operands` says which values a statement reads,
    writes, views, frees and defines.
    """

    on_host: ClassVar[bool] = False  # it issues no work to any stream
    orders: ClassVar[Sync] = Sync.NOTHING  # the order that it adds, if it has no other effect
    transfers: ClassVar[bool] = False  # it moves elements between ranks
    collective: ClassVar[bool] = False  # all ranks of its team issue it, and in the same order
    one_sided: ClassVar[bool] = False  # it uses memory or signals that ranks share
    per_rank: ClassVar[bool] = False  # it names single ranks, so it cannot run on unsharded tensors
    symmetric: ClassVar[bool] = False  # it defines a symmetric buffer, which persists from call to call
    may_copy: ClassVar[bool] = False  # its result is a view or a copy, depending on the strides at run time
    conditional: ClassVar[bool] = False  # a rank may skip its body
    explicit: ClassVar[bool] = True  # a fusion may have it after all communications are explicit
    contracts: ClassVar[bool] = False  # it multiplies matrices
    # It passes complete tensors to the machine. Only the `rows` of its `flag_operands` are accessed block by block.
    uncut: ClassVar[bool] = False

    @classmethod
    def known_uncut(cls) -> bool:
        """Return True if `uncut` is True and describes the `evaluate` that this class runs.

        `uncut` says that `evaluate` passes complete tensors to the machine. If a class defines a new `evaluate`, an
        inherited `uncut` does not describe it. The class must declare `uncut` again.
        """
        declares, runs = (next(c for c in cls.__mro__ if name in vars(c)) for name in ("uncut", "evaluate"))
        return cls.uncut and issubclass(declares, runs)

    @property
    def waits(self) -> int:
        """The number of waits that the statement adds to the current stream, for other streams or for other ranks.

        It is 0 for a statement that also computes or moves data (see `orders`).
        """
        return int(bool(self.orders & (Sync.STREAMS | Sync.WAIT)))

    @property
    def sets_stream(self) -> Expr | None:
        """The stream to which the statement switches; None if the statement does not change the current stream."""
        return None

    @property
    def place(self) -> tuple[Value, str] | None:
        """The index that the statement sets to this rank's position along a mesh axis, and the name of the mesh axis.

        None if the statement defines no such index.
        """
        return None

    @property
    def flag_operands(self) -> tuple[FlagOperand, ...]:
        """The rows of flags that the statement signals or waits for."""
        return ()

    @property
    def peer_place(self) -> tuple[Expr, str] | None:
        """The position of the statement's peer along a mesh axis, and the mesh axis; None if the statement has no peer.

        The peer is the rank that the statement signals, or copies to or from.
        """
        return None

    @property
    def remote(self) -> Value | None:
        """The view of a symmetric buffer that the statement reads or writes on a peer.

        None if the statement accesses no memory of a peer.
        """
        return None

    @property
    def needs_reserved_sm(self) -> bool:
        """True if the statement runs on the SM for signals, which a kernel leaves free while it waits for flags."""
        return False

    @property
    def computed(self) -> Value | None:
        """The result of a computation, which is rounded to the result's dtype; None for other statements."""
        return None

    @property
    def summed(self) -> Sequence[Size]:
        """The extents, on one rank, of the axes that a computation sums over; empty if there are no such axes."""
        return ()

    @property
    def right_side(self) -> tuple[Value, int] | None:
        """The right operand of a product, and the position of the operand's contracted axis.

        None if the statement is not a product.
        """
        return None

    @property
    def index_operands(self) -> tuple[IndexOperand, ...]:
        """The operands that hold indices, which a kernel reads when it runs. Other operands must not be integers."""
        return ()

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The teams of ranks of a communication, each in ascending order."""
        return ()

    @property
    def addends(self) -> int:
        """The number of partial sums that the statement adds up, one for each rank; 0 for other statements."""
        return 0

    @property
    def needs_dense(self) -> bool:
        """True if the tensors that the statement reads and writes must be dense."""
        return False

    @property
    def workspace(self) -> Value | None:
        """The symmetric buffer that a machine may need for the statement; None for other statements.

        Statements share the buffers of equal names. So a buffer is as large as the largest of them.
        """
        return None

    @property
    def compared(self) -> tuple[Shape, ...]:
        """The shapes of a communication's local tensors that must be equal on all ranks; empty for other statements.

        If only the number of elements must be equal, a shape has a single axis of this extent.
        """
        return ()

    def strides(self, of: ViewStrides) -> Shape | None:
        """Return the strides of the result if the statement is a view; else None.

        `of` knows the strides of the operand. Its methods compute the strides of views of the operand.
        """
        return None

    @property
    def repeats(self) -> Size:
        """The maximum number of times that the body of the statement runs."""
        return ONE

    def rounds(self, frame: Frame) -> Iterator[tuple[int, ...]]:
        """Yield once before each run of the statement's body.

        A loop yields `(index,)`, and stores the index in the frame. A condition yields `()` if it holds.
        """
        yield from ()

    def waiting(self, flags: Value, epoch: Expr, first: Expr, own: Value | None) -> Statement | None:
        """Return a copy of the statement; the copy waits for flags while it runs.

        Return None if the statement cannot wait for flags, or already waits for flags.

        Args:
            flags, epoch: the row of flags, and the epoch to wait for.
            first: the number of the block to compute first.
            own: rows to read instead of block `first` of the operand; None to read the operand.
        """
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Operands:
    """The fields of a statement, and properties that select fields by their codecs.

    The properties return the values that the statement reads, writes, views, frees and defines. Equality, hash and
    `repr` are defined here for all statements. If `dataclass` generated them for each class, importing the modules of
    statements would take twice as long.
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
        """Yield the values in all fields with one of these codecs, in the order of the fields.

        Values in index expressions are yielded for the codec USE.
        """
        for name, codec in codecs_of(type(self)).items():
            got = getattr(self, name)
            if got is None:
                continue
            if codec in codecs and codec in VALUE_CODECS:
                yield got
            elif Codec.USE in codecs and codec in (Codec.STREAM, Codec.INDEX):
                yield from expr_values(got)

    def defines(self, phase: Phase) -> Value | None:
        """Return the value that this statement defines; None if it defines no value.

        In a fusion, a computation or communication defines the value that it writes.
        """
        return next(self.values(Codec.DEFINE, *([Codec.WRITE] if phase is Phase.FUSION else [])), None)

    def uses(self, phase: Phase) -> tuple[Value, ...]:
        """Return every value that the statement needs: all values in its fields, except the value that it defines."""
        written = [] if phase is Phase.FUSION else [Codec.WRITE]
        return tuple(self.values(Codec.READ, *written, Codec.ALIAS, Codec.FREE, Codec.USE))

    @property
    def reads(self) -> tuple[Value, ...]:
        """The tensors that the statement reads, in the order in which `evaluate` passes them to a machine."""
        return tuple(self.values(Codec.READ))

    @cached_property
    def named(self) -> tuple[Value, ...]:
        """Every value in the fields of the statement, including the value that it defines."""
        return tuple(self.values(*VALUE_CODECS))

    @cached_property
    def bodies(self) -> tuple[tuple[Statement, ...], ...]:
        return tuple(getattr(self, n) for n, c in codecs_of(type(self)).items() if c is Codec.BLOCK)

    @cached_property
    def viewed(self) -> Value | None:
        """The value of which the statement's result is a view; None if the result is not a view."""
        return next(self.values(Codec.ALIAS), None)

    @cached_property
    def freed(self) -> Value | None:
        """The buffer that the statement frees; None for other statements."""
        return next(self.values(Codec.FREE), None)

    @cached_property
    def buffer(self) -> Value | None:
        """The buffer that the statement allocates in a host program; None for other statements."""
        defined = self.defines(Phase.HOST)
        if defined is None or not isinstance(defined.type, TensorType) or self.viewed is not None:
            return None
        return defined

    @cached_property
    def started(self) -> Value | None:
        """The handle of the communication that the statement starts; None for other statements."""
        defined = self.defines(Phase.HOST)
        return defined if defined is not None and defined.type is Kind.HANDLE else None

    @cached_property
    def awaited(self) -> Value | None:
        """The handle of the communication that the statement waits for; None for other statements."""
        return next((value for value in self.values(Codec.USE) if value.type is Kind.HANDLE), None)

    def with_bodies(self, change: Callable[[tuple[Statement, ...]], tuple[Statement, ...]]) -> Self:
        """Return a copy of the statement in which each body is replaced by `change(body)`."""
        named = codecs_of(type(self)).items()
        blocks: dict[str, Any] = {n: change(getattr(self, n)) for n, c in named if c is Codec.BLOCK}
        return replace(self, **blocks) if blocks else self

    def rename(self, names: dict[str, Value]) -> Self:
        """Return a copy of the statement that uses other values.

        `names` maps the name of an old value to the new value.
        """
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
    """The base class of all statements. Each statement class declares its syntax, its phases and its meaning."""

    syntax: ClassVar[str] = ""
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.HOST})

    def infer(self) -> Type | None:
        """Return the type of the value that the statement defines.

        Return None if the operands do not determine the type: then the text must declare it.
        """
        return None

    def verify(self) -> None:
        """Raise HostIRError if the operands do not fit each other."""

    def verify_layout(self) -> None:
        """Raise HostIRError if a rank's parts of the operands do not fit each other.

        The verifier skips this check while changes of sharding are still implicit, early in lowering.
        """

    def divisions(self) -> Iterator[Division]:
        """Yield the divisions that the statement needs.

        Divisions that the types of its values already need are left out.
        """
        yield from ()

    def evaluate(self, frame: Frame) -> None:
        """Run the statement on the frame's machine."""
        raise AssertionError(f"{type(self).__name__} has no meaning on a machine")

    def in_place(self, operand: int) -> bool:
        """Return True if the statement may write its result over an operand: both may be the same view of memory.

        `operand` is the operand's position in `reads`.
        """
        return False

    @classmethod
    @cache
    def keyword(cls) -> str:
        """Return the word that names the statement in the text."""
        words = re.findall(r"[a-z_]+", re.sub(r"<\?.*?\?>|\{\w+\}", "", cls.syntax))
        return str(words[0])

    @classmethod
    def form(cls, phase: Phase) -> str:
        """Return the syntax template that the statement has in programs of this phase."""
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
    """Return the default values of the fields of a statement class, by name. Fields without a default are left out."""
    if cls not in _defaults:
        _defaults[cls] = {f.name: f.default for f in _own_fields(cls) if f.default is not MISSING}
    return _defaults[cls]


def _own_fields(cls: type[Operands]) -> list[Field[Any]]:
    return [f for f in fields(cls) if f.name not in ("span", "note")]


REGISTRY: dict[str, type[Statement]] = {}


S = TypeVar("S", bound="Statement")


def statement(cls: type[S]) -> type[S]:
    """Register a statement class under its keyword; return the class."""
    REGISTRY[cls.keyword()] = cls
    return cls
