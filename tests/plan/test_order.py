"""The order of operations on a rank's streams, compared with the paths of an explicit graph."""

from __future__ import annotations

from random import Random

import networkx as nx
import pytest

from hostir.ir import parse
from hostir.plan.operations import CALLER, CollectiveOp, DelayOp, MarkOp, Op, StatementPlace, SynchronizeOp, WaitOp
from hostir.plan.order import RankOrder

STREAMS = (CALLER, 0, 1, 2)
TEXT = """hostir 1
mesh @mesh [x] = 0
program @p(%a: f32[4]) -> (%a) {
  delay 1 us
}
"""
PLACE = StatementPlace(parse(TEXT).body[0], ())


def drawn(random: Random) -> list[Op]:
    """Return random work, communications and waits on several streams."""
    ops: list[Op] = []
    handles: list[int] = []
    for n in range(random.randrange(4, 30)):
        stream, draw = random.choice(STREAMS), random.random()
        if draw < 0.3:
            ops.append(SynchronizeOp(PLACE, stream, random.choice([s for s in STREAMS if s != stream])))
        elif draw < 0.45:
            handles.append(n + 1)
            collective = CollectiveOp(PLACE, stream, "allreduce", (0, 1), 0, 0, n + 1)
            ops.append(MarkOp(PLACE, stream, n + 1) if n % 2 else collective)
        elif draw < 0.6 and handles:
            ops.append(WaitOp(PLACE, stream, random.choice(handles)))
        else:
            ops.append(DelayOp(PLACE, stream, 1))
    return ops


def paths(ops: list[Op]) -> nx.DiGraph:
    """Return the same order as a graph; node -1 is the beginning of the call on the caller's stream."""
    graph, last = nx.DiGraph(), {CALLER: -1}
    graph.add_nodes_from(range(-1, len(ops)))
    begun = {op.handle: i for i, op in enumerate(ops) if isinstance(op, MarkOp | CollectiveOp)}
    for i, op in enumerate(ops):
        before = [last.get(op.stream)]
        before += [last.get(op.other)] if isinstance(op, SynchronizeOp) else []
        before += [begun[op.handle]] if isinstance(op, WaitOp) else []
        graph.add_edges_from((b, i) for b in before if b is not None)
        last[op.stream] = i
    return graph


@pytest.mark.parametrize("seed", range(60))
def test_an_operation_follows_exactly_the_operations_with_a_path_to_it(seed: int) -> None:
    ops = drawn(Random(seed))
    order, graph = RankOrder(ops), paths(ops)
    for then in range(len(ops)):
        before = nx.ancestors(graph, then)
        assert {first for first in range(len(ops)) if order.precedes(first, then)} == before - {-1}
        assert order.forked(then) == (-1 in before)


@pytest.mark.parametrize("seed", range(20))
def test_the_clock_of_a_stream_is_right_at_every_position(seed: int) -> None:
    ops = drawn(Random(seed))
    order = RankOrder(ops)
    for position in range(len(ops) + 1):
        for stream in STREAMS:
            after = RankOrder([*ops[:position], DelayOp(PLACE, stream, 1)])
            known = {s: n for s, n in order.clock(stream, position).items() if n}
            assert known == {s: n for s, n in {**after.clocks[-1], stream: after.numbers[-1] - 1}.items() if n}
    joined = RankOrder([*ops, *(SynchronizeOp(PLACE, CALLER, s) for s in order.unjoined)])
    assert joined.unjoined == ()
