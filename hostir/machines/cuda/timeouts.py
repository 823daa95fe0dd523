"""Reports of kernels in pinned memory, which every call reads: timeouts, and indices that do not fit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hostir.ir.source import Diagnostic, HostIRError, error
from hostir.job.hosts import ranks_text
from hostir.plan.operations import CollectiveOp, ComputeOp
from hostir.plan.unrolled import UnrolledProgram

WaitingOp = ComputeOp | CollectiveOp
TIMEOUTS = 256  # the minimum number of rows of one allocation
FLAGS, DATA, INDICES = "flags", "data", "indices"  # what words are for


class Timeouts:
    """The words in pinned memory to which the kernels of a program report timeouts and misfits. Every call reads them.

    Executors that share symmetric memory also share the words, because after a timeout no executor may read the stale
    data in that memory. A kernel that waits for flags has two words for each of its blocks: see `ReadyFlags`. A kernel
    that waits for the data of other ranks has two words for each rank: see `LowLatency`. The words belong to a
    statement in one round of its loops. Plans for all sizes share them. So the words outlive a plan, and the number of
    words is bounded. A statement with operands that hold indices has two words for each of them: the first one is for
    an index that does not fit (see `hostir.kernels.misfits`).

    Fields:
        lost: True once a kernel has given up waiting. A late signal, or late data, would then count for the next call.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.words: dict[tuple[object, ...], tuple[UnrolledProgram, WaitingOp, torch.Tensor]] = {}
        self.lost = False
        self.pages: list[torch.Tensor] = []  # [TIMEOUTS, 2] each
        self.used = 0  # the number of rows in use in the latest page
        self.read: list[tuple[memoryview, memoryview]] = []  # for each page: the words in use, and as many zeros

    def of(self, unrolled: UnrolledProgram, op: ComputeOp, blocks: int) -> torch.Tensor:
        """Return the words `[blocks, 2]` to which the kernel of an operation reports timeouts."""
        return self._words(unrolled, op, blocks, FLAGS)

    def of_data(self, unrolled: UnrolledProgram, op: CollectiveOp) -> torch.Tensor:
        """Return the words `[ranks, 2]` to which the kernel of a collective reports ranks whose data do not arrive."""
        return self._words(unrolled, op, len(op.team), DATA)

    def of_indices(self, unrolled: UnrolledProgram, op: ComputeOp) -> torch.Tensor:
        """Return the words `[operands, 2]` for the operands of an operation that hold indices, in order."""
        return self._words(unrolled, op, len(op.place.statement.index_operands), INDICES)

    def _words(self, unrolled: UnrolledProgram, op: WaitingOp, blocks: int, what: str) -> torch.Tensor:
        number = next(n for n, s in enumerate(unrolled.program.walk()) if s is op.place.statement)
        key = number, op.place.rounds, blocks, what
        if key not in self.words:
            if not self.pages or self.used + blocks > len(self.pages[-1]):
                self.pages.append(pinned_zeros(max(blocks, TIMEOUTS)))
                self.used = 0
            self.words[key] = unrolled, op, self.pages[-1][self.used : self.used + blocks]
            self.used += blocks
            words = self.pages[-1].numpy().data.cast("B").cast("q")[: self.used * 2]
            self.read[len(self.pages) - 1 :] = [(words, memoryview(bytes(words.nbytes)).cast("q"))]
        return self.words[key][2]

    def problem(self) -> HostIRError | None:
        """Return one error for all timeouts that kernels have reported, or None. Clear the reports."""
        for words, zeros in self.read:
            if words != zeros:
                return self._take()
        return None

    def _take(self) -> HostIRError | None:
        from hostir.kernels.flags.ready import timeout_error

        reports: list[Diagnostic] = []
        for (*_, what), (unrolled, op, words) in self.words.items():
            reported = words.clone()
            words.zero_()
            if what == INDICES:
                assert isinstance(op, ComputeOp)
                reports += misfits(unrolled, op, reported)
                continue
            if isinstance(op, CollectiveOp):
                late = [rank for rank, (word, _) in zip(op.team, reported.tolist(), strict=True) if word]
                timed_out = error(f"the data of {ranks_text(late)} did not arrive") if late else None
            else:
                assert op.ready is not None
                name = f"%{unrolled.symmetric[unrolled.buffers[op.ready.flags]].home[0]}"
                results = None if op.ready.results == op.ready.blocks else op.ready.results
                timed_out = timeout_error(reported, self.rank, name, results)
            if timed_out is not None:
                self.lost = True
                reports += unrolled.failure(op, timed_out).diagnostics
        return HostIRError(*reports) if reports else None  # None if another thread has just read and cleared them


def misfits(unrolled: UnrolledProgram, op: ComputeOp, words: torch.Tensor) -> Iterator[Diagnostic]:
    """Yield an error for each operand of an operation with an index that does not fit, from the operation's words."""
    from hostir.kernels.misfits import misfit

    for (operand, register, limit), (word, _) in zip(unrolled.indices(op), words.tolist(), strict=True):
        if (found := misfit(word)) is None:
            continue
        place, value = found
        at = list[str]()
        for size in reversed(unrolled.layouts[register].shape):
            place, index = divmod(place, max(size, 1))
            at.insert(0, str(index))
        expected = f"offsets that do not decrease, from 0 to {limit}"
        if not operand.ascending:
            expected = f"indices from 0 to {limit - 1}"
        problem = error(f"{operand.indices}[{', '.join(at)}] is {value}", expected=expected)
        yield from unrolled.failure(op, problem).diagnostics


def pinned_zeros(rows: int) -> torch.Tensor:
    """Return a tensor `[rows, 2]` of int64 zeros in pinned memory, or in ordinary memory if there is no GPU.

    Kernels can write to it, and the host reads it without waiting for the GPU.
    """
    return torch.zeros(rows, 2, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())
