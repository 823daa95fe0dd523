"""Find expressions for the slot, the epoch and the peer of a signal or a wait that a repair inserts.

The candidates are expressions that the program already uses, and expressions of the indices in scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from hostir.check.ordering.order import Order
from hostir.check.tracing.tracer import Tracer
from hostir.ir.host_ops import Select
from hostir.ir.machine import Frame
from hostir.ir.op import Bin, Expr, FlagOperand, Lit, Phase, Ref, Value, expr_values, rename_expr
from hostir.ir.types import Kind
from hostir.repair.places import Block, BodyPosition, Outline

RaisedSlot = tuple[int, int, int]  # rank, slot, epoch
Numbers = tuple[int, ...]


@dataclass(frozen=True)
class PlaceExpressions:
    """Finds the expressions that a new signal or wait may use at one place, and their values.

    Fields:
        outline: the statements of the program with their places.
        order: the order of the program's events.
        place: the place for the new signal or wait.
        flags: the row of flags that the new statement signals or waits for.
    """

    outline: Outline
    order: Order
    place: BodyPosition
    flags: Value

    @cached_property
    def frames(self) -> list[Frame]:
        """The frames of all ranks at the place: one frame for each time that a rank reaches the place in one call.

        A frame holds the values of all indices at that time.
        """
        program, frames = self.outline.program, list[Frame]()
        for rank in self.order.ranks:
            frame = Frame(Tracer(rank.rank, self.outline.program, rank.sizes), rank.sizes)
            if frame.here(self.flags.tensor.mesh):
                for s in program.walk():
                    if s.place is not None:
                        s.evaluate(frame)
                frames += _arrivals(program.body, self.place, frame)
        return frames

    @property
    def ranks(self) -> list[int]:
        """The ranks that run the `frames`, in the order of the frames."""
        return [_rank(frame) for frame in self.frames]

    @cached_property
    def indices(self) -> list[Value]:
        """The indices that are in scope at the place."""
        return [v for v in self.outline.scope(self.place).values() if v.type is Kind.INDEX]

    def slots(self) -> dict[Numbers, Expr]:
        """Return candidates for the slot. The key of an expression is the tuple of its values in all `frames`."""
        return self._by_values(self._slot_candidates())

    def epochs(self, missing: set[RaisedSlot]) -> dict[Numbers, Expr]:
        """Return candidates for the epoch. The key of an expression is the tuple of its values in all `frames`.

        `missing` holds the signals that lack a wait, or the waits that lack a signal. The new statement is their
        counterpart.
        """
        return self._by_values(self._epoch_candidates(missing))

    def peers(self) -> Iterator[tuple[Expr, str]]:
        """Yield candidates for the peer. Each is an expression for a position in a team, and the mesh axis of the team.

        Expressions that the program uses come first. Then come `(rank + k) % n`, for each distance k along each mesh
        axis of n ranks.
        """
        mesh, program = self.flags.tensor.mesh, self.outline.program
        known = {v.name for v in self.indices}
        candidates = [s.peer_place for s in program.walk() if s.peer_place is not None]
        for index, over in (s.place for s in program.walk() if s.place is not None):
            if mesh and over in mesh.axes:
                n = mesh.size(over)
                candidates.append((Ref(index), over))
                candidates += [(Bin("%", Bin("+", Ref(index), Lit(k)), Lit(n)), over) for k in range(1, n)]
        for peer, over in dict.fromkeys(candidates):
            if mesh and over in mesh.axes and {v.name for v in expr_values(peer)} <= known:
                yield peer, over

    def ranks_of(self, peer: Expr, over: str) -> list[int]:
        """Return the rank of a peer in each of the `frames`.

        `peer` is an expression for the position of the peer in the team along the mesh axis `over`. Return an empty
        list if the position is out of range in one of the frames.
        """
        mesh, peers = self.flags.tensor.mesh, list[int]()
        for frame in self.frames:
            team = mesh.team(_rank(frame), over) if mesh else ()
            if not 0 <= (at := frame.index(peer)) < len(team):
                return []
            peers.append(team[at])
        return peers

    def _by_values(self, candidates: Iterable[Expr]) -> dict[Numbers, Expr]:
        """Return candidates by their values: the key of an expression is the tuple of its values in all `frames`.

        Of several candidates with equal values, only the first is kept. A candidate with a name that is not in scope is
        changed by `_in_scope`.
        """
        by_values: dict[Numbers, Expr] = {}
        for candidate in candidates:
            for expr in self._in_scope(candidate):
                try:
                    by_values.setdefault(tuple(frame.index(expr) for frame in self.frames), expr)
                except ZeroDivisionError:
                    continue
        return by_values

    def _in_scope(self, expr: Expr) -> list[Expr]:
        """Return variants of an expression that use only names in scope.

        If all names of the expression are in scope, the only variant is the expression itself. If one name is not in
        scope, there is a variant for each index in scope, in which this index replaces the name. If several names are
        not in scope, there are no variants.
        """
        unknown = {v.name for v in expr_values(expr)} - {v.name for v in self.indices}
        if not unknown:
            return [expr]
        if len(unknown) > 1:
            return []
        return [rename_expr(expr, dict.fromkeys(unknown, index)) for index in self.indices]

    def _slot_candidates(self) -> Iterator[Expr]:
        """Yield candidates for a slot.

        They are slots that the program uses, these slots as seen from peers, indices at which the program selects a
        part of a tensor, literals, indices in scope, and combinations of indices. A program often waits for the flag of
        the part that it selects.
        """
        slots = list(dict.fromkeys(use.slot for use in self._flag_operands() if use.slot is not None))
        yield from slots
        yield from self._seen_from_peers(slots)
        yield from dict.fromkeys(s.index for s in self.outline.program.walk() if isinstance(s, Select))
        count = self.flags.tensor.shape[0].bind(self.order.ranks[0].sizes)
        peers = (s.peer_place[0] for s in self.outline.program.walk() if s.peer_place is not None)
        parts: list[Expr] = [*map(Ref, self.indices), *(peer for peer in peers if isinstance(peer, Bin))]
        parts = list(dict.fromkeys(parts))
        yield from (Lit(n) for n in range(min(count, 2)))
        for v in parts:
            yield v
            for n in (n for n in range(2, count + 1) if count % n == 0):
                yield Bin("%", v, Lit(n))
                yield from (Bin("+", Bin("*", v, Lit(n)), w) for w in parts if w != v and n < count)

    def _seen_from_peers(self, slots: Iterable[Expr]) -> Iterator[Expr]:
        """Yield each of the slots with a peer in the place of the rank, and with the rank in the place of a peer.

        A rank signals the slot of its own number, and each of its peers waits for the slot of the sender's number.
        """
        ranks = {over: Ref(index) for index, over in (s.place for s in self.outline.program.walk() if s.place)}
        peers = [(peer, over) for peer, over in self.peers() if over in ranks and peer != ranks[over]]
        for slot, (peer, over) in product(slots, peers):
            for old, new in ((ranks[over], peer), (peer, ranks[over])):
                if (changed := replaced(slot, old, new)) != slot:
                    yield changed

    def _epoch_candidates(self, missing: set[RaisedSlot]) -> Iterator[Expr]:
        """Yield candidates for an epoch: epochs that the program uses, missing epochs, and a loop's index plus one."""
        yield from (use.epoch for use in self._flag_operands())
        yield from (Lit(epoch) for epoch in sorted({epoch for _, _, epoch in missing}))
        rounds = (s.defines(Phase.HOST) for s in self.outline.program.walk() if s.bodies)
        yield from (Bin("+", Ref(v), Lit(1)) for v in dict.fromkeys(rounds) if v is not None)

    def _flag_operands(self) -> list[FlagOperand]:
        """Return the flag operands of all statements. Operands that use the row `flags` of this object come first."""
        operands = (use for s in self.outline.program.walk() for use in s.flag_operands)
        return sorted(operands, key=lambda use: use.flags != self.flags)


def replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    """Return a copy of an expression in which `new` stands in each place of `old`."""
    if expr == old:
        return new
    if isinstance(expr, Bin):
        return Bin(expr.op, replaced(expr.left, old, new), replaced(expr.right, old, new))
    return expr


def _rank(frame: Frame) -> int:
    assert frame.machine.rank is not None
    return frame.machine.rank


def _arrivals(body: Block, place: BodyPosition, frame: Frame) -> Iterator[Frame]:
    """Yield a copy of the frame for each time that its rank reaches a place.

    The copy holds the indices of the loops around the place.

    Args:
        body: the block to which the first index of `place` belongs.
        place: the place.
        frame: the frame of the rank at the beginning of the block.
    """
    at, *inner = place
    if not inner:
        yield Frame(frame.machine, frame.sizes, dict(frame.handles))
        return
    outer = body[at]
    for _ in outer.rounds(frame):
        yield from _arrivals(outer.bodies[0], tuple(inner), frame)
