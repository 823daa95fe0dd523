"""Pass `stagger`: lets communications take their SMs before computations take them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hostir.ir import Program, Statement
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Delay, For, SetStream, Synchronize
from hostir.ir.sizes import ONE
from hostir.ir.tensor_ops import Copy, TensorOp
from hostir.ir.values import Bin, Expr, Lit, Ref
from hostir.lower.passes import Pass


@dataclass(frozen=True)
class Stagger(Pass):
    """Keeps a round's computation from starting before the communication that it should hide has its SMs.

    NCCL's kernels and a matmul that fills the device do not share SMs: whichever starts first keeps the other waiting
    for a wave of tiles. So the first computation of a round starts a little late; and where communications come only
    after computations, the next round's computation starts after this round's, when the communication is ready too.
    """

    name = "stagger"
    microseconds: int = 5

    def run(self, program: Program) -> Program:
        return program.with_body(self._loop(s) if isinstance(s, For) else s for s in program.body)

    def _loop(self, loop: For) -> For:
        turn = loop.body[0].stream if loop.body and isinstance(loop.body[0], SetStream) else None
        if not isinstance(turn, Bin) or turn.right == Lit(1) or loop.count == ONE:
            return loop  # one stream, or one round: nothing runs beside anything
        if not any(isinstance(s, Communication) for s in loop.body):
            return loop
        return replace(loop, body=tuple(self._staggered(loop, turn)))

    def _staggered(self, loop: For, turn: Bin) -> Iterator[Statement]:
        computed = communicated = False
        for s in loop.body:
            if isinstance(s, TensorOp) and not isinstance(s, Copy) and not computed:
                computed = True
                yield Delay(self.microseconds, span=s.span)
            if isinstance(s, Communication) and computed and not communicated:
                yield from _next_after(turn, loop)
            communicated |= isinstance(s, Communication)
            yield s


def _next_after(turn: Bin, loop: For) -> Iterator[Statement]:
    """The next round's stream waits for what this round has issued so far."""
    following: Expr = Bin("%", Bin("+", Ref(loop.index), Lit(1)), turn.right)
    yield SetStream(following)
    yield Synchronize(turn)
    yield SetStream(turn)
