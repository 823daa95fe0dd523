"""Mutants: programs that differ from a correct program by one edit, as people and passes make by mistake.

Mutation testing (DeMillo, Lipton and Sayward, 1978) tests a test suite; here it tests the checker. Edits that cannot
change the order of work are left out: moves past statements that only the host executes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import ONE_SHOT, AllReduce, Communication, ReduceScatter
from hostir.ir.host_ops import (
    Allocate,
    AsPartial,
    Chunk,
    CurrentStream,
    Delay,
    For,
    FreeBuffer,
    Select,
    SetStream,
    Synchronize,
    Wait,
)
from hostir.ir.message_ops import Message, Recv, Send, SendAndRecv
from hostir.ir.onesided_ops import AllocateSymmetric, Barrier, If, PeerCopy, Rank, Signal, WaitSignal
from hostir.ir.op import ZERO, Bin, Codec, Expr, Lit, Phase, Ref, Statement, Value, codecs_of, expr_values
from hostir.ir.program import Names, Program, format_program, rewrite
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import ByBlocks, Sum, TensorOp
from hostir.ir.text import Printer
from hostir.ir.types import FLAG, Kind, Mesh, TensorType
from hostir.ir.view_ops import ViewStatement

Block = tuple[Statement, ...]
ORDERING = (Synchronize, Wait, Barrier, Signal, WaitSignal)
HOST_ONLY = (ViewStatement, Allocate, AllocateSymmetric, CurrentStream, Rank, Delay)  # they issue nothing to streams
OPERANDS = {Codec.READ: "read", Codec.WRITE: "write", Codec.ALIAS: "view", Codec.FREE: "free", Codec.USE: "use"}


@dataclass(frozen=True)
class Mutant:
    """A program with one edit: the mutation operator, the name of the program, the change, and the text."""

    operator: str
    name: str
    change: str
    text: str


@dataclass(frozen=True)
class Place:
    """A statement of a program: its block, its index there, the values in scope, and the enclosing loop or condition.

    `put` returns the program with another block in place of this one.
    """

    block: Block
    at: int
    scope: tuple[Value, ...]
    put: Callable[[Block], Program]
    outside: Place | None = None

    @property
    def statement(self) -> Statement:
        return self.block[self.at]

    def become(self, *statements: Statement) -> Program:
        """Return the program with these statements in place of this one."""
        return self.put((*self.block[: self.at], *statements, *self.block[self.at + 1 :]))


Edit = tuple[str, str, Program]  # the mutation operator, the change, and the edited program
OPERATORS: list[Callable[[Place], Iterator[Edit]]] = []


def mutants(program: Program) -> list[Mutant]:
    """Return every mutant of a host program, each text once. Some do not parse: an edit may undefine a name."""
    printer, by_text = OncePrinter(program.phase, program.meshes), dict[str, Mutant]()
    original = format_program(program, printer=printer)
    for operator, change, mutant in (*edits(program), *_merged(program), *_pools(program)):
        text = format_program(mutant, printer=printer if mutant.meshes == program.meshes else None, notes=False)
        if text != original:
            by_text.setdefault(text, Mutant(operator, program.name, change, text))
    return list(by_text.values())


class OncePrinter(Printer):
    """Prints each statement once for all mutants that contain it."""

    def __init__(self, phase: Phase, meshes: tuple[Mesh, ...]) -> None:
        super().__init__(phase, meshes)
        self.printed: dict[tuple[int, int], tuple[Statement, list[str]]] = {}

    def lines(self, s: Statement, depth: int) -> list[str]:
        if (id(s), depth) not in self.printed:
            self.printed[id(s), depth] = s, super().lines(s, depth)  # the reference keeps the id in use
        return self.printed[id(s), depth][1]


def places(program: Program) -> Iterator[Place]:
    """Yield every statement of a program, outer before inner."""
    return _places(program.body, program.inputs, program.with_body, None)


def _places(
    block: Block, scope: tuple[Value, ...], put: Callable[[Block], Program], outside: Place | None
) -> Iterator[Place]:
    for at, s in enumerate(block):
        place = Place(block, at, scope, put, outside)
        yield place
        defined = s.defines(Phase.HOST)
        inner = scope if defined is None else (*scope, defined)
        if isinstance(s, (For, If)):
            yield from _places(s.body, inner, _inside(place, s), place)
        else:
            scope = inner


def _inside(place: Place, s: For | If) -> Callable[[Block], Program]:
    return lambda body: place.become(replace(s, body=body))


def edits(program: Program) -> Iterator[Edit]:
    for place in places(program):
        for operator in OPERATORS:
            yield from operator(place)


def edit(operator: Callable[[Place], Iterator[Edit]]) -> Callable[[Place], Iterator[Edit]]:
    """Register a mutation operator, which is tried at every statement."""
    OPERATORS.append(operator)
    return operator


# Deletions --------------------------------------------------------------------------------------------------------
def called(s: Statement) -> str:
    """Return the name of a statement in mutation operators: its keyword, or `fork` or `join` for a loop that is one."""
    if isinstance(s, For) and s.body and all(isinstance(x, (SetStream, Synchronize)) for x in s.body):
        return "fork" if any(isinstance(x, SetStream) for x in s.body) else "join"
    return "computation" if isinstance(s, TensorOp) else s.keyword()


@edit
def delete(place: Place) -> Iterator[Edit]:
    s, name = place.statement, called(place.statement)
    if place.outside and called(place.outside.statement) == "join":
        return  # such a loop is deleted with all its statements
    if isinstance(s, (*ORDERING, FreeBuffer, SetStream, TensorOp, PeerCopy)) or name in ("fork", "join"):
        yield f"delete {name}", f"without '{_line(s)}'", place.become()


@edit
def delete_communication(place: Place) -> Iterator[Edit]:
    s = place.statement
    if not isinstance(s, (Communication, Message)):
        return
    rest = [x for x in place.block[place.at + 1 :] if not (isinstance(x, Wait) and x.handle == s.handle)]
    yield "delete communication", f"without '{_line(s)}'", place.put((*place.block[: place.at], *rest))


@edit
def rounds(place: Place) -> Iterator[Edit]:
    s = place.statement
    if not isinstance(s, For) or s.count.value is None:
        return
    for change in (-1, 1):
        if (count := s.count.value + change) > 0:
            yield "number of rounds", f"{count} rounds of '{_line(s)}'", place.become(replace(s, count=Size(count)))


@edit
def condition(place: Place) -> Iterator[Edit]:
    if isinstance(place.statement, If):
        yield "condition", f"always '{_line(place.statement)}'", place.become(*place.statement.body)


@edit
def unready(place: Place) -> Iterator[Edit]:
    s = place.statement
    if isinstance(s, ByBlocks) and s.ready is not None:
        plain = replace(s, ready=None, epoch=ZERO, first=s.first if s.done else ZERO, own=None)
        yield "delete ready", f"'{_line(s)}' waits for nothing", place.become(plain)
        if s.own is not None:
            yield "delete own", f"'{_line(s)}' waits for its own rows", place.become(replace(s, own=None))


@edit
def undone(place: Place) -> Iterator[Edit]:
    s = place.statement
    if isinstance(s, ByBlocks) and s.done is not None:
        plain = replace(s, done=None, raised=ZERO, first=s.first if s.ready else ZERO)
        yield "delete done", f"'{_line(s)}' sets no flags", place.become(plain)


@edit
def signal_by(place: Place) -> Iterator[Edit]:
    """Let a kernel set a flag instead of the stream, or the stream instead of a kernel."""
    s = place.statement
    if isinstance(s, Signal):
        yield (
            "who signals",
            f"{'the stream' if s.sms else 'a kernel'}: '{_line(s)}'",
            place.become(replace(s, sms=1 - s.sms)),
        )


# Moves ------------------------------------------------------------------------------------------------------------
@edit
def swap(place: Place) -> Iterator[Edit]:
    pair = place.block[place.at : place.at + 2]
    if len(pair) < 2 or any(_moves(s) or isinstance(s, HOST_ONLY) for s in pair):
        return
    swapped = (*place.block[: place.at], *reversed(pair), *place.block[place.at + 2 :])
    yield "swap", f"'{_line(pair[1])}' before '{_line(pair[0])}'", place.put(swapped)


def _moves(s: Statement) -> bool:
    return isinstance(s, (*ORDERING, FreeBuffer, SetStream)) or called(s) in ("fork", "join")


@edit
def move(place: Place) -> Iterator[Edit]:
    s = place.statement
    if not _moves(s):
        return
    before, after = place.block[: place.at], place.block[place.at + 1 :]
    operator, rest = f"move {called(s)}", (*before, *after)
    for to in range(len(rest) + 1):
        crossed = rest[to : to + 1] if to < place.at else rest[to - 1 : to]
        if to != place.at and not isinstance(crossed[0], HOST_ONLY):
            where = f"before '{_line(rest[to])}'" if to < len(rest) else "to the end"
            yield operator, f"'{_line(s)}' {where}", place.put((*rest[:to], s, *rest[to:]))
    for n, other in enumerate(rest):
        if isinstance(other, (For, If)):
            for body in ((s, *other.body), (*other.body, s)):
                moved = (*rest[:n], replace(other, body=body), *rest[n + 1 :])
                yield operator, f"'{_line(s)}' into '{_line(other)}'", place.put(moved)


@edit
def move_out(place: Place) -> Iterator[Edit]:
    s, outside = place.statement, place.outside
    if outside is None or not isinstance(s, (*ORDERING, FreeBuffer)):
        return
    loop = replace(outside.statement, body=(*place.block[: place.at], *place.block[place.at + 1 :]))
    operator, change = f"move {s.keyword()}", f"'{_line(s)}' out of '{_line(outside.statement)}'"
    yield operator, f"{change}, before it", outside.become(s, loop)
    yield operator, f"{change}, behind it", outside.become(loop, s)


# Other streams, slices, ranks and epochs --------------------------------------------------------------------------
@edit
def streams(place: Place) -> Iterator[Edit]:
    s = place.statement
    if not isinstance(s, (SetStream, Synchronize)):
        return
    pool = place.put(place.block).streams
    known: list[Expr] = [Ref(v) for v in place.scope if v.type is Kind.STREAM]
    chosen = [*known, *(Lit(n) for n in range(pool))]
    for index in (v for v in place.scope if v.type is Kind.INDEX):
        chosen += [Bin("%", Ref(index), Lit(n)) for n in range(2, pool + 1)]
        chosen.append(Bin("%", Bin("+", Ref(index), Lit(1)), Lit(max(pool, 1))))
    for stream in chosen:
        yield f"stream of {s.keyword()}", f"{stream} in '{_line(s)}'", place.become(replace(s, stream=stream))


@edit
def indices(place: Place) -> Iterator[Edit]:
    """Replace an index of a slice, flag or peer, or a side of a condition, by a literal or another index."""
    s = place.statement
    if isinstance(s, ByBlocks) and s.ready is None and s.done is None:
        return
    for name, codec in codecs_of(type(s)).items():
        if codec is not Codec.INDEX or name in ("epoch", "raised"):
            continue
        old: Expr = getattr(s, name)
        count = _choices(s, name)
        new: list[Expr] = [Lit(n) for n in range(min(count, 4))]
        new.append(Bin("%", Bin("+", old, Lit(1)), Lit(count)))
        new += [Ref(v) for v in place.scope if v.type is Kind.INDEX]
        for expr in new:
            operator = "one buffer for all rounds" if _shares(s, old, expr) else f"{name} of {s.keyword()}"
            yield operator, f"{name} {expr} in '{_line(s)}'", place.become(replace(s, **{name: expr}))


def _choices(s: Statement, name: str) -> int:
    """Return the number of values that an index can have."""
    if isinstance(s, Select):
        size: Size | int = s.x.tensor.shape[s.axis]
    elif isinstance(s, Chunk):
        size = s.count
    elif isinstance(s, Sum) and s.ready is not None:
        size = s.x.tensor.shape[0]
    elif name in ("slot", "first"):
        size = ((s.ready or s.done) if isinstance(s, ByBlocks) else s.flags).tensor.shape[0]
    elif name in ("peer", "to", "source"):
        value = s.flags if isinstance(s, Signal) else next(s.values(Codec.READ, Codec.WRITE))
        size = value.tensor.mesh.size(s.over)
    else:
        size = 2
    return size if isinstance(size, int) else size.value or 1


def _shares(s: Statement, old: Expr, new: Expr) -> bool:
    return isinstance(s, (Select, Chunk)) and isinstance(new, Lit) and any(expr_values(old))


@edit
def epochs(place: Place) -> Iterator[Edit]:
    s = place.statement
    names = ["epoch"] if isinstance(s, (Signal, WaitSignal)) else []
    if isinstance(s, ByBlocks):
        names = [name for name, flags in (("epoch", s.ready), ("raised", s.done)) if flags is not None]
    for name in names:
        old: Expr = getattr(s, name)
        new: list[Expr] = [Bin("+", old, Lit(1)), Bin("-", old, Lit(1))]
        new += [Ref(v) for v in place.scope if v.type is Kind.INDEX]
        new += [Lit(old.value + 1), Lit(old.value - 1)] if isinstance(old, Lit) else [Lit(1)]
        for epoch in new:
            operator, change = f"{name} of {s.keyword()}", f"{name} {epoch} in '{_line(s)}'"
            yield operator, change, place.become(replace(s, **{name: epoch}))


@edit
def team(place: Place) -> Iterator[Edit]:
    s = place.statement
    if isinstance(s, AsPartial) or "over" not in codecs_of(type(s)):
        return
    tensors = [v for v in s.named if isinstance(v.type, TensorType)]
    for over in tensors[0].tensor.mesh.axes:
        yield f"team of {s.keyword()}", f"over {over} in '{_line(s)}'", place.become(replace(s, over=over))


@edit
def implementation(place: Place) -> Iterator[Edit]:
    """Let NCCL or another implementation run a sum."""
    s = place.statement
    if isinstance(s, (AllReduce, ReduceScatter)) and s.by:
        for by in ("", ONE_SHOT):
            yield "implementation", f"'{_line(s)}' by {by or 'NCCL'}", place.become(replace(s, by=by))


# Other buffers ----------------------------------------------------------------------------------------------------
@edit
def operands(place: Place) -> Iterator[Edit]:
    s = place.statement
    for name, codec in codecs_of(type(s)).items():
        old = getattr(s, name)
        if codec not in OPERANDS or old is None:
            continue
        for value in place.scope:
            if value.type == old.type and value != old:
                yield (
                    f"{OPERANDS[codec]} another",
                    f"{value} in '{_line(s)}'",
                    place.become(replace(s, **{name: value})),
                )


@edit
def symmetry(place: Place) -> Iterator[Edit]:
    s = place.statement
    if isinstance(s, (Allocate, AllocateSymmetric)) and s.out.tensor.dtype != FLAG:
        other = AllocateSymmetric if isinstance(s, Allocate) else Allocate
        yield "symmetry of a buffer", f"'{_line(other(out=s.out))}'", place.become(other(out=s.out))


@edit
def hoist(place: Place) -> Iterator[Edit]:
    """Replace a buffer of each round by one buffer for all rounds, which is freed after the loop."""
    s, outside = place.statement, place.outside
    if not isinstance(s, Allocate) or outside is None or not isinstance(outside.statement, For):
        return
    rest = [x for x in place.block if x is not s]
    kept = [x for x in rest if not (isinstance(x, FreeBuffer) and x.x == s.out)]
    end = [x for x in rest if x not in kept]
    loop = replace(outside.statement, body=tuple(kept))
    yield "one buffer for all rounds", f"'{_line(s)}' before the loop", outside.become(s, loop, *end)


def _merged(program: Program) -> Iterator[Edit]:
    """Replace two buffers of the same type by one."""
    allocated = [s.out for s in program.body if isinstance(s, (Allocate, AllocateSymmetric))]
    for n, one in enumerate(allocated):
        for other in allocated[n + 1 :]:
            if other.type != one.type or {one, other} <= {*program.outputs}:
                continue
            kept, gone = (other, one) if one not in program.outputs and other in program.outputs else (one, other)
            yield "two buffers in one", f"{gone} is {kept}", _renamed(program, gone, kept)


def _renamed(program: Program, gone: Value, kept: Value) -> Program:
    def change(s: Statement) -> Iterable[Statement]:
        if isinstance(s, (Allocate, AllocateSymmetric)) and s.out == gone:
            return []
        if isinstance(s, FreeBuffer) and s.x == gone:
            return []
        return [s.rename({gone.name: kept})]

    allocate = next(s for s in program.body if isinstance(s, (Allocate, AllocateSymmetric)) and s.out == kept)
    rest = [s for s in rewrite(program.body, change) if s != allocate]
    return program.with_body((allocate, *rest))


# Other edits ------------------------------------------------------------------------------------------------------
def _pools(program: Program) -> Iterator[Edit]:
    if program.streams > 1:
        yield "size of the pool", "a stream less", replace(program, streams=program.streams - 1)


@edit
def split_exchange(place: Place) -> Iterator[Edit]:
    """Replace an exchange by a send and a receive, one after the other."""
    s = place.statement
    if not isinstance(s, SendAndRecv):
        return
    handle = Value(Names.of(place.put(place.block)).fresh("sent"), Kind.HANDLE)
    send = Send(handle=handle, x=s.x, peer=s.to, over=s.over)
    recv = Recv(handle=s.handle, out=s.out, peer=s.source, over=s.over)
    for pair in ((send, recv), (recv, send)):
        yield (
            "split exchange",
            f"'{_line(s)}' as {pair[0].keyword()}, {pair[1].keyword()}",
            place.become(*pair, Wait(handle=handle)),
        )


def _line(s: Statement) -> str:
    """Return the text of a statement without types, or of a loop without its body."""
    return Printer(Phase.HOST, ()).lines(s, 0)[0].removesuffix("{").rstrip()
