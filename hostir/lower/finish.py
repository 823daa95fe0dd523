"""Passes that finish a host program: `streams`, `stagger`, `free`, `tidy` and `dense`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Allocate, CurrentStream, Delay, Dense, For, FreeBuffer, SetStream, Synchronize, Wait
from hostir.ir.onesided_ops import Put, Rank
from hostir.ir.op import Bin, Codec, Expr, Lit, Ref, Statement, Sync, Value
from hostir.ir.program import Names, Program, rewrite
from hostir.ir.sizes import ONE, Size
from hostir.ir.tensor_ops import DenseCopy, TensorOp
from hostir.ir.types import Kind
from hostir.ir.view_ops import Reshape, ViewStatement
from hostir.lower import Pass
from hostir.lower.propagate import splits_only


@dataclass(frozen=True)
class AssignStreams(Pass):
    """Distributes the rounds of a loop over worker streams.

    The worker streams fork from the caller's stream before the loop, and join it after the loop. The fork and the join
    are loops of their own. nvFuser found that a fork inside the working loop prevents overlap (its pull request 4217),
    and that a missing fork is a race (3913).
    """

    name = "streams"
    streams: int = 4

    def run(self, program: Program) -> Program:
        loops = [s for s in program.body if isinstance(s, For)]
        if not loops:
            return program
        names = Names.of(program)
        user = Value(names.fresh("user"), Kind.STREAM)
        pool = max(self._pool(loop) for loop in loops)
        body: list[Statement] = [CurrentStream(user)]
        for s in program.body:
            body += self._around(s, user, names) if isinstance(s, For) else [s]
        return replace(program, body=tuple(body), streams=pool)

    def _pool(self, loop: For) -> int:
        """Return the number of worker streams: the number that was asked for, but at most the number of slices."""
        slices = loop.count.value
        return min(self.streams, slices) if slices else self.streams

    def _around(self, loop: For, user: Value, names: Names) -> list[Statement]:
        pool = self._pool(loop)
        index = Value(names.fresh("s"), Kind.INDEX)
        names.taken.discard(index.name)  # the name may be used again after the loop
        worker, each = Ref(index), Size(pool)
        turn = Bin("%", Ref(loop.index), Lit(pool))
        return [
            For(index, each, (SetStream(worker), Synchronize(Ref(user)))),
            replace(loop, body=(SetStream(turn), *loop.body)),
            SetStream(Ref(user)),
            For(index, each, (Synchronize(worker),)),
        ]


@dataclass(frozen=True)
class Stagger(Pass):
    """Delays the computation of a round, so that the communication that overlaps with it gets SMs first.

    NCCL's kernels and a matmul that fills the device do not share SMs. Whichever starts first keeps the other waiting
    for a wave of tiles. So the first computation of each round is delayed a little. If the communication of a round
    comes after its computation, the computation of the next round also waits for the computation of this round. The
    communication of this round can start at the same moment, and gets its SMs during the delay.
    """

    name = "stagger"
    microseconds: int = 5

    def run(self, program: Program) -> Program:
        return program.with_body(self._loop(s) if isinstance(s, For) else s for s in program.body)

    def _loop(self, loop: For) -> For:
        turn = loop.body[0].stream if loop.body and isinstance(loop.body[0], SetStream) else None
        if not isinstance(turn, Bin) or turn.right == Lit(1) or loop.count == ONE:
            return loop  # one stream, or one round: nothing overlaps
        if not any(isinstance(s, Communication) for s in loop.body):
            return loop
        return replace(loop, body=tuple(self._staggered(loop, turn)))

    def _staggered(self, loop: For, turn: Bin) -> Iterator[Statement]:
        computed = communicated = False
        for s in loop.body:
            if isinstance(s, TensorOp) and not isinstance(s, DenseCopy) and not computed:
                computed = True
                yield Delay(self.microseconds, span=s.span)
            if isinstance(s, Communication) and computed and not communicated:
                yield from _next_after(turn, loop)
            communicated |= isinstance(s, Communication)
            yield s


def _next_after(turn: Bin, loop: For) -> Iterator[Statement]:
    """Yield statements that make the stream of the next round wait for the work that this round has issued so far.

    `turn` is the number of this round's stream.
    """
    following: Expr = Bin("%", Bin("+", Ref(loop.index), Lit(1)), turn.right)
    yield SetStream(following)
    yield Synchronize(turn)
    yield SetStream(turn)


@dataclass(frozen=True)
class FreeBuffers(Pass):
    """Inserts statements that free buffers, on the caller's stream.

    A buffer is freed after the last statement that accesses it. Outputs are not freed.
    """

    name = "free"

    def run(self, program: Program) -> Program:
        roots = _roots(program)
        kept = {roots.get(v.name, v.name) for v in program.outputs}
        buffers = {s.out.name: s.out for s in program.body if isinstance(s, Allocate) and s.out.name not in kept}
        last: dict[str, int] = {}
        pending: dict[str, Communication] = {}  # a communication accesses its buffers until it is waited for
        for n, s in enumerate(program.body):
            if isinstance(s, Communication) and s.handle:
                pending[s.handle.name] = s
            for name in _touched(pending[s.handle.name] if isinstance(s, Wait) else s):
                last[roots.get(name, name)] = n
        streams = _streams(program.body)
        apart = (s for s, (on_worker, *_) in zip(program.body, streams, strict=True) if on_worker)
        by_workers = {roots.get(name, name) for s in apart for name in _touched(s)}
        after: dict[int, list[Value]] = {}
        for name, value in buffers.items():
            known = 2 if name in by_workers else 1
            ends = (n for n in range(last.get(name, 0), len(streams)) if streams[n][known])
            after.setdefault(next(ends, -1), []).append(value)  # the checker reports buffers that are never freed
        body: list[Statement] = []
        for n, s in enumerate(program.body):
            body += [s, *(FreeBuffer(v) for v in after.get(n, ()))]
        return program.with_body(body)


def _roots(program: Program) -> dict[str, str]:
    """Return a map from the name of each view to the name of the buffer or input that it is a view of."""
    roots: dict[str, str] = {}
    for s in program.walk():
        if isinstance(s, ViewStatement):
            roots[s.out.name] = roots.get(s.x.name, s.x.name)
    return roots


def _touched(s: Statement) -> Iterable[str]:
    for v in s.values(Codec.READ, Codec.WRITE, Codec.ALIAS):
        yield v.name
    for body in s.bodies:
        for inner in body:
            yield from _touched(inner)


def _streams(body: tuple[Statement, ...]) -> list[tuple[bool, bool, bool]]:
    """Return three truth values for each statement:

    - True if the statement may run on a worker stream;
    - True if the caller's stream is current after the statement;
    - True if, in addition, the caller's stream has then waited for all workers.
    """
    flags = list[tuple[bool, bool, bool]]()
    on_worker = pending = False
    for s in body:
        apart = on_worker or _switches(s)
        on_worker, pending = _streams_after(s, on_worker, pending)
        flags.append((apart, not on_worker, not on_worker and not pending))
    return flags


def _switches(s: Statement) -> bool:
    return s.sets_stream is not None or any(_switches(inner) for body in s.bodies for inner in body)


def _streams_after(s: Statement, on_worker: bool, pending: bool) -> tuple[bool, bool]:
    """Return the values of `on_worker` and `pending` after statement `s`.

    Args:
        on_worker: True if a worker stream is current before `s`.
        pending: True if the caller's stream has not yet waited for all earlier work on worker streams.
    """
    if s.bodies:
        for inner in (each for body in s.bodies for each in body):
            on_worker, pending = _streams_after(inner, on_worker, pending)
        return on_worker, pending
    if s.sets_stream is not None:
        return not (isinstance(s.sets_stream, Ref) and s.sets_stream.value.type is Kind.STREAM), pending
    if s.orders is Sync.STREAMS:
        return on_worker, pending and on_worker
    return on_worker, pending or on_worker


@dataclass(frozen=True)
class Tidy(Pass):
    """Removes views that nothing reads, and views that repeat an earlier view."""

    name = "tidy"

    def run(self, program: Program) -> Program:
        body, renamed = _once(program.body, {})
        program = replace(program, body=body, outputs=tuple(renamed.get(v.name, v) for v in program.outputs))
        while True:
            used = {v.name for s in program.walk() for v in s.uses(program.phase)} | {v.name for v in program.outputs}
            kept = rewrite(program.body, partial(_if_used, used))
            if kept == program.body:
                return program
            program = program.with_body(kept)


def _if_used(used: set[str], s: Statement) -> tuple[Statement, ...]:
    return () if isinstance(s, ViewStatement) and s.out.name not in used else (s,)


def _once(body: tuple[Statement, ...], outer: dict[Statement, Value]) -> tuple[tuple[Statement, ...], dict[str, Value]]:
    """Return the body without repeated views, and a map from the name of each removed view to the view that it repeats.

    `outer` holds the views that are defined before the body, in the program around it.
    """
    seen, renamed, kept = dict(outer), dict[str, Value](), list[Statement]()
    for s in body:
        s = s.rename(renamed)
        if isinstance(s, For):
            inner, _ = _once(s.body, seen)
            s = replace(s, body=inner)
        if isinstance(s, ViewStatement):
            key = replace(s, out=replace(s.out, name="_"))
            if key in seen:
                renamed[s.out.name] = seen[key]
                continue
            seen[key] = s.out
        kept.append(s)
    return tuple(kept), renamed


@dataclass(frozen=True)
class MakeDense(Pass):
    """Inserts a `dense` statement at the start of the program for each input that must be contiguous.

    Communications need contiguous inputs. Reshapes that merge axes need them, too. A kernel that waits for rows needs
    contiguous scales of these rows. The `dense` statement copies an input that is not contiguous, and leaves other
    inputs as they are.
    """

    name = "dense"

    def run(self, program: Program) -> Program:
        needed, names = _needed(program), Names.of(program)
        inputs = [v for v in program.inputs if v.name in needed]
        dense = {v.name: Value(names.fresh(f"{v.name}_dense"), v.type, v.span) for v in inputs}
        body: list[Statement] = []
        for v in inputs:
            s = needed[v.name]
            body.append(Dense(v, dense[v.name], span=s.span, note=f"{s.keyword()} needs dense memory"))
        return program.with_body([*body, *(s if isinstance(s, Rank) else s.rename(dense) for s in program.body)])


def _needed(program: Program) -> dict[str, Statement]:
    """Return the names of the inputs that must be dense, each with a statement that needs this input dense."""
    roots, inputs = _roots(program), {v.name for v in program.inputs}
    places = {s.out.name for s in program.walk() if isinstance(s, Rank)}
    needed: dict[str, Statement] = {}
    for s in program.walk():
        read: tuple[Value, ...]
        merges = isinstance(s, Reshape) and not splits_only(s)
        if isinstance(s, Communication) or merges or (isinstance(s, Put) and not _within_rank(s, places)):
            assert isinstance(s, (Communication, Reshape, Put))
            read = (s.x,)
        else:  # scales of rows that a kernel waits for: the executor makes no dense copy of them
            read = tuple(v for f in s.flag_operands if not f.raises for v in f.rows[1:])
        for v in read:
            root = roots.get(v.name, v.name)
            needed |= {root: s} if root in inputs else {}
    return needed


def _within_rank(s: Put, places: set[str]) -> bool:
    """Return True if a put copies within this rank.

    Such a copy is made by a kernel that accepts operands with any strides. `places` holds the names of indices that
    hold this rank's position.
    """
    return not s.multiprocessors and isinstance(s.peer, Ref) and s.peer.value.name in places
