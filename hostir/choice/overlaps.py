"""Find the communications of an unrolled program that may run at the same time as its computations.

Only the order of the operations on the rank's streams decides, as on the machine that runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hostir.machines.normed import NormedSum
from hostir.plan.operations import ComputeOp, Op
from hostir.plan.unrolled import UnrolledProgram

NOTHING = "it has no communication"
NOUNS = {"put": ("copy to a peer", "copies to peers"), "get": ("copy from a peer", "copies from peers")}


def overlaps(unrolled: UnrolledProgram) -> Iterator[tuple[Op, list[ComputeOp]]]:
    """Yield each operation that moves data between ranks, with the computations that may run at the same time."""
    for position, op in enumerate(unrolled.ops):
        if op.by_group or len({unrolled.owner(register) for register in unrolled.tensors(op)}) > 1:
            yield op, _parallel_computations(unrolled, position)


def _parallel_computations(unrolled: UnrolledProgram, position: int) -> list[ComputeOp]:
    """Return the computations that may run at the same time as a communication.

    `position` is the index of the communication in the list of operations.
    """
    ops, order = unrolled.ops, unrolled.order
    handle = ops[position].starts
    ends = [at for at, op in enumerate(ops) if handle and op.awaits == handle] if handle else [position]
    return [
        op
        for at, op in enumerate(ops)
        if isinstance(op, ComputeOp)
        and op.computation != "copy"
        and not order.precedes(at, position)
        and (_starts_before_the_end(unrolled, at, position) or not any(order.precedes(end, at) for end in ends))
    ]


def _starts_before_the_end(unrolled: UnrolledProgram, at: int, copy: int) -> bool:
    """Return True if the computation at index `at` may start before the copy at index `copy` has ended.

    Both must be on the same stream.
    """
    ops = unrolled.ops
    if not ops[at].starts_early or ops[copy].stream != ops[at].stream or copy > at:
        return False
    between = (op for op in ops[copy:at] if op.stream == ops[at].stream and op.in_graph)
    return not any(isinstance(op, ComputeOp) for op in between)


def overlap_clauses(unrolled: UnrolledProgram) -> tuple[str, ...]:
    """Return one clause for each type of communication. It says how many of them overlap, and with which computations.

    If the program has no communication, the only clause is "it has no communication".
    """
    counts: Counter[str] = Counter()
    overlapping: Counter[str] = Counter()
    parallel: dict[str, dict[str, None]] = {}
    for op, computations in overlaps(unrolled):
        keyword = op.place.statement.keyword()
        counts[keyword] += 1
        overlapping[keyword] += bool(computations)
        parallel.setdefault(keyword, {}).update(dict.fromkeys(c.place.statement.keyword() for c in computations))
    return tuple(_clause(word, n, overlapping[word], [*parallel[word]]) for word, n in counts.items()) or (NOTHING,)


def normed_clauses(unrolled: UnrolledProgram) -> tuple[str, ...]:
    """Return one clause for each sum over ranks whose kernel also carries out what follows, if Triton computes that."""
    clauses = []
    for normed in NormedSum.of(unrolled):
        *names, last = (op.place.statement.keyword() for op in (normed.collective, *normed.computations))
        clauses.append(f"one kernel carries out its {', '.join(names)} and {last}")
    return tuple(clauses)


def _clause(keyword: str, count: int, overlapping: int, parallel: list[str]) -> str:
    *others, last = parallel or ["no computation"]
    computations = f"{', '.join(others)} and {last}" if others else last
    one, several = NOUNS.get(keyword, (keyword, f"{keyword}s"))
    if count == 1:
        return f"its {one} overlaps with {computations}"
    if not overlapping:
        return f"none of its {count} {several} overlaps with a computation"
    return f"{overlapping} of its {count} {several} overlap{'s' * (overlapping == 1)} with {computations}"
