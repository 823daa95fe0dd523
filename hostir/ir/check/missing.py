"""Signals, waits for them, and kernels' `ready` that are missing, with the index expressions that each needs.

A flag can be put back without knowing what it is for. Waits without a signal, and signals without a wait, say which
epochs of which flags are missing, and on which ranks. A statement that is put in has to send, or wait for, just those
over all ranks and rounds. Its expressions are tried from the program's text and the indices in scope, and those that
fit are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from hostir.ir.check.order import Order
from hostir.ir.check.places import Block, Edit, Edits, Outline, Place, on_host
from hostir.ir.check.tracer import Event, Flag
from hostir.ir.host_ops import CurrentStream, For, SetStream
from hostir.ir.machine import Frame
from hostir.ir.onesided_ops import AllocateSymmetric, Copy, If, Rank, Signal, WaitSignal
from hostir.ir.op import Statement
from hostir.ir.source import HostIRError
from hostir.ir.tensor_ops import Contraction
from hostir.ir.types import FLAG, Kind, TensorType
from hostir.ir.values import Bin, Expr, Lit, Ref, Value, expr_values, rename_expr

Raised = tuple[int, int, int]  # rank, slot, epoch
Numbers = tuple[int, ...]
MOST = 40  # suggestions of one kind


class MissingFlags:
    """Signals and waits of one call that lack their counterpart, and edits that add it."""

    def __init__(self, outline: Outline, order: Order) -> None:
        self.outline = outline
        self.order = order
        made = (s.out for s in outline.program.walk() if isinstance(s, AllocateSymmetric))
        self.flags = [v for v in made if v.tensor.dtype == FLAG]
        heard = {id(signal) for signal in order.partners.values()}
        self.sent = _by_name(flag for rank in order.ranks for flag in rank.signals)
        self.unsent = _by_name(wait for rank in order.ranks for wait in rank.waits if not order.enough(wait))
        self.unheard = _by_name(f for rank in order.ranks for f in rank.signals if id(f.event) not in heard)

    def signals(self, waiting: Event) -> Iterator[Edits]:
        """One statement that sends of a flag what is waited for and nobody sends; best behind copies to the peer."""
        flags = next((f for f in self.flags if f.name in self.unsent and _names(waiting.statement, f)), None)
        if flags is None:
            return
        missing, sent = self.unsent[flags.name], self.sent.get(flags.name, set())
        found: list[tuple[bool, int, int, Edits]] = []
        for place, before in self._behind():
            frames, slots, epochs = self._ways(place, flags, missing)
            for peer, over in self._peers(place, flags):
                ranks = _peers_of(peer, over, flags, frames)
                for (slot, s), (epoch, e) in product(slots.items(), epochs.items()):
                    raised = set(zip(ranks, slot, epoch, strict=False))
                    if len(raised) == len(frames) and missing <= raised and not raised & sent:
                        signal = Signal(flags=flags, slot=s, epoch=e, peer=peer, over=over)
                        copied = isinstance(before, Copy) and before.peer == peer
                        found.append((not copied, len(raised), len(found), (Edit(place, (signal,)),)))
        yield from (edits for *_, edits in sorted(found, key=lambda f: f[:3])[:MOST])

    def waits(self, users: Sequence[Statement]) -> Iterator[Edits]:
        """A wait, in front of a statement or of what it stands in, for signals that nobody waits for yet."""
        found: list[tuple[int, int, Edits]] = []
        for flags in (f for f in self.flags if f.name in self.unheard):
            for place in self._in_front(users):
                frames, slots, epochs = self._ways(place, flags, self.unheard[flags.name])
                for (slot, s), (epoch, e) in product(slots.items(), epochs.items()):
                    heard = {(_rank(f), *which) for f, *which in zip(frames, slot, epoch, strict=True)}
                    if heard and len(heard) == len(frames) and heard <= self.unheard[flags.name]:
                        wait = WaitSignal(flags=flags, slot=s, epoch=e)
                        found.append((-len(heard), len(found), (Edit(place, (wait,)),)))
        yield from (edits for *_, edits in sorted(found, key=lambda f: f[:2])[:MOST])

    def kernels(self, users: Sequence[Statement]) -> Iterator[Edits]:
        """A product takes its rows as flags say that nobody waits for; one block may be of rows that lie elsewhere."""
        for s in (s for s in users if isinstance(s, Contraction) and s.ready is None):
            place = self.outline.place(s)
            owns = [v for v in self.outline.scope(place).values() if isinstance(v.type, TensorType) and v != s.a]
            for flags in (f for f in self.flags if f.name in self.unheard):
                unheard = {(rank, epoch) for rank, _, epoch in self.unheard[flags.name]}
                frames, slots, epochs = self._ways(place, flags, self.unheard[flags.name])
                for epoch, e in epochs.items():
                    heard = {(_rank(f), which) for f, which in zip(frames, epoch, strict=True)}
                    if len(heard) == len(frames) and heard <= unheard:
                        for first, own in product(slots.values(), (None, *owns)):
                            yield from _ready(s, place, flags, e, first, own)

    # Places -----------------------------------------------------------------------------------------------------------
    def _behind(self) -> Iterator[tuple[Place, Statement]]:
        """The places behind what a stream sees."""
        for at, s in self.outline.statements:
            if not (on_host(s) or isinstance(s, (CurrentStream, SetStream, For, If))):
                yield (*at[:-1], at[-1] + 1), s

    def _in_front(self, users: Sequence[Statement]) -> list[Place]:
        """The places in front of statements and of all that they stand in, and within conditions before them."""
        found: dict[Place, None] = {}
        for s in users:
            place = self.outline.place(s)
            for depth in range(len(place), 0, -1):
                found[place[:depth]] = None
                for n, other in enumerate(self.outline.block(place[:depth])[: place[depth - 1]]):
                    if isinstance(other, If):
                        found[(*place[: depth - 1], n, len(other.body))] = None
        return list(found)

    def _frames(self, place: Place, flags: Value) -> list[Frame]:
        """The values of all indices, each time that a rank comes to a place in one call."""
        found: list[Frame] = []
        for rank in self.order.ranks:
            frame = Frame(rank, rank.sizes)
            if frame.here(flags.tensor.mesh):
                for s in self.outline.program.walk():
                    if isinstance(s, Rank):
                        s.evaluate(frame)
                found += _comes(self.outline.program.body, place, frame)
        return found

    # Expressions ------------------------------------------------------------------------------------------------------
    def _ways(
        self, place: Place, flags: Value, missing: set[Raised]
    ) -> tuple[list[Frame], dict[Numbers, Expr], dict[Numbers, Expr]]:
        """Each time that ranks come to a place; the slots and the epochs that expressions may come to there."""
        frames = self._frames(place, flags)
        slots = self._numbers(self._slots(place, flags), place, frames)
        return frames, slots, self._numbers(self._epochs(flags, missing), place, frames)

    def _numbers(self, exprs: Iterable[Expr], place: Place, frames: Sequence[Frame]) -> dict[Numbers, Expr]:
        """The first expression for each sequence of values that one has there; names out of scope are replaced."""
        found: dict[Numbers, Expr] = {}
        indices = self._indices(place)
        for expr in exprs:
            strange = {v.name for v in expr_values(expr)} - {v.name for v in indices}
            for index in indices if len(strange) == 1 else () if strange else [None]:
                known = expr if index is None else rename_expr(expr, dict.fromkeys(strange, index))
                try:
                    found.setdefault(tuple(frame.index(known) for frame in frames), known)
                except ZeroDivisionError:
                    continue
        return found

    def _indices(self, place: Place) -> list[Value]:
        return [v for v in self.outline.scope(place).values() if v.type is Kind.INDEX]

    def _slots(self, place: Place, flags: Value) -> Iterator[Expr]:
        """Expressions for a slot of a row of flags: those of the text, each index, a block of several indices."""
        yield from (s.slot for s in self._told(flags) if not isinstance(s, Contraction))
        count, indices = flags.tensor.shape[0].bind(self.order.ranks[0].sizes), self._indices(place)
        yield from (Lit(n) for n in range(min(count, 2)))
        for v in indices:
            yield Ref(v)
            for n in (n for n in range(2, count + 1) if count % n == 0):
                yield Bin("%", Ref(v), Lit(n))
                yield from (Bin("+", Bin("*", Ref(v), Lit(n)), Ref(w)) for w in indices if w != v and n < count)

    def _epochs(self, flags: Value, missing: set[Raised]) -> Iterator[Expr]:
        """Expressions for an epoch of a flag: those of the text, the missing ones, a loop's round."""
        yield from (s.epoch for s in self._told(flags))
        yield from (Lit(epoch) for epoch in sorted({epoch for _, _, epoch in missing}))
        rounds = {s.index: None for s in self.outline.program.walk() if isinstance(s, For)}
        yield from (Bin("+", Ref(v), Lit(1)) for v in rounds)

    def _told(self, flags: Value) -> list[Signal | WaitSignal | Contraction]:
        """The statements that name flags, those that name these first."""
        found = [s for s in self.outline.program.walk() if isinstance(s, (Signal, WaitSignal, Contraction))]
        return sorted(
            (s for s in found if not isinstance(s, Contraction) or s.ready), key=lambda s: not _names(s, flags)
        )

    def _peers(self, place: Place, flags: Value) -> Iterator[tuple[Expr, str]]:
        """How a peer may be written, and the axis that it stands on: as in the text, and all others next to a rank."""
        mesh = flags.tensor.mesh
        known = {v.name for v in self._indices(place)}
        told: list[tuple[Expr, str]] = [
            (s.peer, s.over) for s in self.outline.program.walk() if isinstance(s, (Copy, Signal))
        ]
        for s in self.outline.program.walk():
            if isinstance(s, Rank) and mesh and s.over in mesh.axes:
                n = mesh.size(s.over)
                told.append((Ref(s.out), s.over))
                told += [(Bin("%", Bin("+", Ref(s.out), Lit(k)), Lit(n)), s.over) for k in range(1, n)]
        for peer, over in dict.fromkeys(told):
            if mesh and over in mesh.axes and {v.name for v in expr_values(peer)} <= known:
                yield peer, over


def _names(s: Statement | None, flags: Value) -> bool:
    return flags in (getattr(s, "flags", None), getattr(s, "ready", None))


def _ready(s: Contraction, place: Place, flags: Value, epoch: Expr, first: Expr, own: Value | None) -> Iterator[Edits]:
    """The product with flags that it waits for, where its operands allow that."""
    try:
        changed = replace(s, ready=flags, epoch=epoch, first=first, own=own)
        changed.verify()
    except HostIRError:
        return
    yield (Edit(place, (changed,), drop=1),)


def _by_name(flags: Iterable[Flag]) -> dict[str, set[Raised]]:
    """Which flags of which ranks reach which epochs in the first call."""
    found: dict[str, set[Raised]] = {}
    for flag in flags:
        if flag.epoch[0] == 0:
            found.setdefault(flag.flags, set()).add((flag.rank, flag.slot, flag.epoch[1]))
    return found


def _peers_of(peer: Expr, over: str, flags: Value, frames: Sequence[Frame]) -> list[int]:
    """The ranks that a peer is each time; none where there is no such place once."""
    found: list[int] = []
    for frame in frames:
        team = flags.tensor.mesh.team(_rank(frame), over) if flags.tensor.mesh else ()
        if not 0 <= (at := frame.index(peer)) < len(team):
            return []
        found.append(team[at])
    return found


def _rank(frame: Frame) -> int:
    assert frame.machine.rank is not None
    return frame.machine.rank


def _comes(body: Block, place: Place, frame: Frame) -> Iterator[Frame]:
    """The frame each time that its rank comes to a place."""
    at, *inner = place
    if not inner:
        yield Frame(frame.machine, frame.sizes, dict(frame.handles))
        return
    outer = body[at]
    if isinstance(outer, For):
        for index in outer.rounds(frame):
            outer.begin(frame, index)
            yield from _comes(outer.body, tuple(inner), frame)
    elif isinstance(outer, If) and outer.holds(frame):
        yield from _comes(outer.body, tuple(inner), frame)
