"""Pass `streams`: gives the rounds of every top-level loop to worker streams in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hostir.ir import Program, Statement, Value
from hostir.ir.host_ops import CurrentStream, For, SetStream, Synchronize
from hostir.ir.program import Names
from hostir.ir.sizes import Size
from hostir.ir.types import Kind
from hostir.ir.values import Bin, Lit, Ref
from hostir.lower.passes import Pass


@dataclass(frozen=True)
class AssignStreams(Pass):
    """Workers fork from the caller's stream before a loop, and the caller's stream joins them after it.

    The two loops of synchronisation stand apart from the work: nvFuser found that a fork inside the working loop costs
    the overlap (its pull request 4217), and that leaving it out is a race (3913).
    """

    name = "streams"
    streams: int = 4

    def run(self, program: Program) -> Program:
        loops = [s for s in program.body if isinstance(s, For)]
        if not loops or any(isinstance(s, CurrentStream) for s in program.body):
            return program  # of a strategy that sees to streams itself
        names = Names.of(program)
        user = Value(names.fresh("user"), Kind.STREAM)
        pool = max(self._pool(loop) for loop in loops)
        body: list[Statement] = [CurrentStream(user)]
        for s in program.body:
            body += self._around(s, user, names) if isinstance(s, For) else [s]
        return replace(program, body=tuple(body), streams=pool)

    def _pool(self, loop: For) -> int:
        """No more streams than slices."""
        slices = loop.count.value
        return min(self.streams, slices) if slices else self.streams

    def _around(self, loop: For, user: Value, names: Names) -> list[Statement]:
        pool = self._pool(loop)
        index = Value(names.fresh("s"), Kind.INDEX)
        names.taken.discard(index.name)  # a loop's index is gone after it
        worker, each = Ref(index), Size(pool)
        turn = Bin("%", Ref(loop.index), Lit(pool))
        return [
            For(index, each, (SetStream(worker), Synchronize(Ref(user)))),
            replace(loop, body=(SetStream(turn), *loop.body)),
            SetStream(Ref(user)),
            For(index, each, (Synchronize(worker),)),
        ]
