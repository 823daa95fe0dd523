"""Passes `sequential` and `pipeline`: from values to buffers, whole or slice by slice.

`pipeline` is nvFuser's collective-based pipeline (its pull request 3606, later its StreamParallelType pass), made
generic: whatever statements can be sliced along the Stream axis run in one loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hostir.ir import Program, Statement
from hostir.ir.op import Codec
from hostir.lower.host import Host
from hostir.lower.loop import Loop
from hostir.lower.passes import Pass
from hostir.lower.sharding import result_of
from hostir.lower.slicing import Group, groups

NOT_OVERLAPPED = "not overlapped"  # begins the comment of a communication that stays whole


@dataclass(frozen=True)
class Sequential(Pass):
    """Each communication whole, then each computation whole, on the caller's stream."""

    name = "sequential"

    def run(self, program: Program) -> Program:
        return build(program, [])


@dataclass(frozen=True)
class Pipeline(Pass):
    """A loop over the Stream axis: a slice is selected, communicated and computed in each round."""

    name = "pipeline"

    def run(self, program: Program) -> Program:
        found = groups(program)
        for group in found:
            if group.left_out and not group.communicates:  # a loop that hides nothing is not what was asked for
                raise next(iter(group.left_out.values()))
        reasons = {name: why.diagnostics[0].message for group in found for name, why in group.left_out.items()}
        return build(told(program, reasons), [group for group in found if group.communicates])


def told(program: Program, reasons: Mapping[str, str]) -> Program:
    """Each communication that cannot be hidden says why in the dump; `reasons` go by its result."""
    body = (
        replace(s, note=f"{NOT_OVERLAPPED}: {reasons[name]}") if (name := result_of(s).name) in reasons else s
        for s in program.body
    )
    return program.with_body(body)


def build(program: Program, loops: list[Group]) -> Program:
    """The host program that runs these loops, and the rest of the fusion whole."""
    host = Host(program)
    for step in schedule(program.body, loops):
        if isinstance(step, Group):
            host.body.append(Loop(host, step).build())
        else:
            host.whole(step)
    return host.finished()


def schedule(body: tuple[Statement, ...], loops: list[Group]) -> list[Statement | Group]:
    """Program order, except that a loop runs as one, once all that it needs has run."""
    loop_of = {result_of(s).name: g for g in loops for s in g.statements}
    made = {result_of(s).name for s in body}
    steps: list[Statement | Group] = []
    waiting = list(body)
    ready: set[str] = set()
    while waiting:
        for s in waiting:
            group = loop_of.get(result_of(s).name)
            members = group.statements if group else [s]
            inside = {result_of(m).name for m in members}
            needs = {v.name for m in members for v in m.values(Codec.READ, Codec.ALIAS)} & made
            if needs <= ready | inside:
                break
        else:
            hint = "take Stream off one of the two tensors"
            raise waiting[0].fail("the loops of two Stream axes need each other's results", hint=hint)
        steps.append(group or s)
        ready |= inside
        waiting = [w for w in waiting if result_of(w).name not in inside]
    return steps
