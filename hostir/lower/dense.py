"""Pass `dense`: what must lie in one piece, and is read from an input, whose strides only the caller knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hostir.ir import Program, Statement, Value
from hostir.ir.comm_ops import Communication
from hostir.ir.host_ops import Dense
from hostir.ir.onesided_ops import Put, Rank
from hostir.ir.program import Names
from hostir.ir.values import Ref
from hostir.ir.view_ops import Reshape, ViewOp
from hostir.lower.passes import Pass
from hostir.lower.sharding import splits_only


@dataclass(frozen=True)
class MakeDense(Pass):
    """Begins with `dense` for each input that a communication or a copy to a peer reads, or a reshape that merges."""

    name = "dense"

    def run(self, program: Program) -> Program:
        needed, names = dict(_needed(program)), Names.of(program)
        made = {
            v.name: Value(names.fresh(f"{v.name}_dense"), v.type, v.span) for v in program.inputs if v.name in needed
        }
        first = [
            Dense(v, made[v.name], span=needed[v.name].span, note=f"{needed[v.name].keyword()} needs dense memory")
            for v in program.inputs
            if v.name in made
        ]
        return program.with_body([*first, *(s if isinstance(s, Rank) else s.rename(made) for s in program.body)])


def _needed(program: Program) -> Iterator[tuple[str, Statement]]:
    """The inputs of which something must be dense, each with a statement that says so."""
    roots = {v.name: v.name for v in program.inputs}  # by the name of a view: its input
    own: set[str] = set()  # this rank's places
    for s in program.walk():
        if isinstance(s, Rank):
            own.add(s.out.name)
        if isinstance(s, ViewOp) and s.x.name in roots:
            roots[s.out.name] = roots[s.x.name]
        needs = isinstance(s, Communication) or (isinstance(s, Put) and not _stays(s, own))
        needs |= isinstance(s, Reshape) and not splits_only(s)
        x = s.x if isinstance(s, (Communication, Put, Reshape)) else None
        if needs and x is not None and x.name in roots:
            yield roots[x.name], s


def _stays(s: Put, own: set[str]) -> bool:
    """Whether it copies within the rank, by a kernel that takes any strides."""
    return not s.multiprocessors and isinstance(s.peer, Ref) and s.peer.value.name in own
