"""Find sums over ranks that one kernel can carry out together with the residual and the norm that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from hostir.ir.comm_ops import LOW_LATENCY
from hostir.plan.lifetimes import awaited_at_once
from hostir.plan.operations import NONE, CollectiveOp, ComputeOp, Op, ViewOp
from hostir.plan.unrolled import RegisterView, UnrolledProgram

MAX_COLUMNS = 16384  # of a row: registers hold it


@dataclass(frozen=True)
class NormedSum:
    """A sum over ranks by `low_latency`, and the computations that follow it. One kernel may carry out all of them.

    The sum is an all-reduce or a reduce-scatter, and the next operation awaits it. Then a residual is added, and the
    rows are normalized. Perhaps they are also quantized, with a scale for each row.

    The kernel runs where the last of these operations would run. This is correct because no other operation runs
    between the first and the last. Memory that is freed between them must be freed after the kernel instead.

    The kernel keeps a row in registers until all its results are computed. So it may store results over the residual or
    over the summands. It does not store results that nothing reads, or that a later one of its results replaces.

    Fields:
        collective: the sum.
        add, norm: the computations that add the residual and normalize the rows.
        scales, quantize: the computations of a quantization; None if there is none.
    """

    unrolled: UnrolledProgram
    collective: CollectiveOp
    add: ComputeOp
    norm: ComputeOp
    scales: ComputeOp | None = None
    quantize: ComputeOp | None = None

    @classmethod
    def of(cls, unrolled: UnrolledProgram) -> list[NormedSum]:
        """Return all such sums of a program. The list is empty if its collectives do not run on the caller's stream."""
        ops = [op for op in unrolled.ops if not op.defines and not op.frees]
        sums = [n for n, op in enumerate(ops) if isinstance(op, CollectiveOp) and op.by]
        if not sums or not awaited_at_once(unrolled).issuperset(ops[n].starts for n in sums):
            return []
        chains = (_chain(unrolled, ops[n], ops[n + 2 : n + 6]) for n in sums)
        return [chain for chain in chains if chain is not None]

    @property
    def computations(self) -> tuple[ComputeOp, ...]:
        """The computations that follow the sum, in order."""
        return tuple(op for op in (self.add, self.norm, self.scales, self.quantize) if op is not None)

    @property
    def residual(self) -> int:
        """The register of the residual."""
        x, y = self.add.operands
        return y if _same(self.unrolled, x, self.collective.out) else x

    @property
    def weight(self) -> int:
        """The register of the norm's weight; NONE without a weight."""
        return (*self.norm.operands, NONE)[1]

    @property
    def results(self) -> tuple[int, ...]:
        """The registers of all results, in the order of the operations."""
        return (self.collective.out, *[op.out for op in self.computations])

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """`results`, with NONE in the place of each result that the kernel need not store."""
        unrolled, buffers = self.unrolled, self.unrolled.buffers
        end = next(n for n, op in enumerate(unrolled.ops) if op is self.computations[-1])
        read = {buffers[register] for op in unrolled.ops[end + 1 :] for register in op.reads}
        read |= {buffers[output] for output in unrolled.outputs}
        last = {buffers[x]: place for place, x in enumerate(self.results)}  # the result that a buffer holds at the end
        needed = {place for buffer, place in last.items() if buffer in read or buffer not in unrolled.allocated}
        return tuple(x if place in needed else NONE for place, x in enumerate(self.results))

    @cached_property
    def needless(self) -> frozenset[int]:
        """The buffers that need no memory, because only these operations would use them."""
        unrolled, buffers = self.unrolled, self.unrolled.buffers
        ours = {id(op) for op in (self.collective, *self.computations)}
        used = {buffers[register] for op in unrolled.ops if id(op) not in ours for register in (*op.reads, *op.writes)}
        used |= {op.x for op in unrolled.ops if isinstance(op, ViewOp)}
        used |= {buffers[x] for x in (self.collective.x, self.residual, self.weight, *self.stored)}
        return frozenset({buffers[x] for x in self.results} - used)


def _chain(unrolled: UnrolledProgram, collective: Op, following: Sequence[Op]) -> NormedSum | None:
    """Return the `NormedSum` that begins with a collective; None if there is none.

    `following` are the operations after the wait for the collective.
    """
    kinds = [op.computation if isinstance(op, ComputeOp) else "" for op in following]
    assert isinstance(collective, CollectiveOp)
    is_sum = collective.by == LOW_LATENCY and collective.communication != "allgather"
    if not is_sum or kinds[:2] != ["add", "rms_norm"]:
        return None
    count = 4 if kinds[2:] == ["row_scales", "quantize"] else 2
    chains = (NormedSum(unrolled, collective, *following[:n]) for n in (count, 2))  # type: ignore[arg-type]
    return next((chain for chain in chains if _fits(chain)), None)


def _fits(chain: NormedSum) -> bool:
    """Return True if one kernel may carry out all operations of a chain.

    The tensors are dense and have equal rows. Each computation works on the result of the operation before it. No
    memory is symmetric, because a peer may write it.
    """
    unrolled, layouts = chain.unrolled, chain.unrolled.layouts
    if not any(_same(unrolled, x, chain.collective.out) for x in chain.add.operands):
        return False
    shape = layouts[chain.add.out].shape
    if not shape or not prod(shape) or shape[-1] > MAX_COLUMNS:
        return False
    rows = [chain.residual, chain.add.out, chain.norm.out]
    chained = [(chain.norm.operands[0], chain.add.out)]
    vectors: list[tuple[int, tuple[int, ...]]] = [(chain.weight, (shape[-1],))] if chain.weight != NONE else []
    if chain.scales is not None and chain.quantize is not None:
        if chain.scales.options["dtype"] != chain.quantize.options["dtype"]:
            return False
        rows.append(chain.quantize.out)
        chained += [(chain.scales.operands[0], chain.norm.out), (chain.quantize.operands[0], chain.norm.out)]
        chained.append((chain.quantize.operands[1], chain.scales.out))
        vectors.append((chain.scales.out, (*shape[:-1], 1)))
    shapes = [*((x, shape) for x in rows), *vectors]
    if any(layouts[x].shape != wanted or not layouts[x].dense for x, wanted in shapes):
        return False
    if not all(_same(unrolled, x, y) for x, y in chained) or not _in_place_only(chain):
        return False
    return unrolled.symmetric.keys().isdisjoint(unrolled.buffers[x] for x in (*dict(shapes), chain.collective.out))


def _in_place_only(chain: NormedSum) -> bool:
    """Return True if results share memory only with tensors that have the same elements at the same addresses.

    Even then, the sum must not replace the residual. No result may replace the weight or a scale.
    """
    unrolled, buffers = chain.unrolled, chain.unrolled.buffers
    separate = {chain.weight} | ({chain.scales.out} if chain.scales is not None else set())
    for place, result in enumerate(chain.results):
        others = {chain.collective.x, chain.weight, chain.residual, *chain.results[:place]} - {NONE}
        for other in (x for x in others if buffers[x] == buffers[result]):
            replaces_residual = result == chain.collective.out and other == chain.residual
            if replaces_residual or {other, result} & separate or not _same(unrolled, other, result):
                return False
    return True


def _same(unrolled: UnrolledProgram, one: int, other: int) -> bool:
    """Return True if two registers hold the same elements in the same order. Their shapes may differ."""
    x, y = unrolled.layouts[one], unrolled.layouts[other]
    return _place(x) == _place(y) and x.dense and y.dense


def _place(x: RegisterView) -> tuple[int, int, int]:
    return x.buffer, x.offset, prod(x.shape)
