"""Kernels of a simulated rank that wait for flags or raise flags. They compute blocks of rows in any legal order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hostir.ir.machine import Done, Ready
from hostir.kernels.layout import row_pieces, source_pieces
from hostir.kernels.repeats import Kernel
from hostir.machines.simulated.issuing import Issuer, do_nothing
from hostir.machines.simulated.memory import make_undefined
from hostir.machines.simulated.rank_memory import RankMemory
from hostir.machines.simulated.tasks import Task, Views

RowsTask = tuple[int, Task]  # the index of the first of some rows of a result, and the task that computes these rows


class BlockKernel:
    """A kernel that computes each block of rows once its flags are set, and sets flags after blocks.

    A kernel that waits for flags takes all SMs when it starts. It overlaps the copies by SMs directly before it, and
    ends after these copies. The kernel becomes several tasks, which are as small as the memory model allows. Rows are
    cut between blocks that have flags, and where the distance between successive rows in memory changes.

    Fields:
        sources: the tensors that the kernel reads after it has waited for flags: the first operand of a product, or
            each tensor that a sum adds up.
        others: the other operands.
        of_rows: the positions, among all operands, of the operands that are cut into rows in the same way as the
            result.
        cut_alike: the operands in `others` that are cut into rows in the same way as the result.
        uncut: the operands in `others` that are not cut.
        height: the number of rows of a block that the kernel waits for.
        cuts: the first row of each block after which a flag is set.
    """

    def __init__(
        self,
        issuer: Issuer,
        memory: RankMemory,
        kernel: Kernel,
        computation: str,
        out: torch.Tensor,
        operands: Sequence[torch.Tensor | None],
        options: Mapping[str, Any],
        ready: Ready | None,
        done: Done | None,
    ) -> None:
        self.issuer, self.memory = issuer, memory
        self.out, self.ready, self.done = out, ready, done
        x, *others = operands
        assert x is not None
        self.sources: Views = (x,)
        if computation == "sum":
            addends = [y.expand_as(out) for y in others if y is not None]  # each is read like a further source
            self.sources, kernel = (*x.unbind(options["axis"]), *addends), partial(_sum_of, kernel, len(addends))
            others, options = [], {**options, "axis": 0}
        early = ready.early if ready is not None else ()
        self.early = [(y, torch.empty_like(y)) for n, y in enumerate(others, 1) if y is not None and n in early]
        copies = {id(y): copy for y, copy in self.early}
        others = [copies.get(id(y), y) for y in others]
        self.kernel, self.others, self.options = kernel, others, options
        self.of_rows = ready.along if ready is not None else done.along if done is not None else ()
        self.cut_alike = [y for y in (others[n - 1] for n in self.of_rows) if y is not None]
        self.uncut = tuple(y for n, y in enumerate(others, 1) if n not in self.of_rows and y is not None)
        rows = out.shape[:-1].numel()
        self.height = rows if ready is None else rows // ready.results
        self.cuts = range(0) if done is None else range(0, rows, rows // done.blocks)

    def issue(self) -> None:
        """Add the tasks of the kernel to the current stream."""
        issuer, ready = self.issuer, self.ready
        copies = issuer.current.pushing if ready is not None else []
        if copies:
            issuer.current.tail = copies[:1]
        start = issuer.issue(do_nothing)
        start.gate = issuer.sms
        if ready is not None:
            start.run, start.may_block = partial(self.begin, start, copies), True
            start.reads = tuple(y for y, _ in self.early)
        pieces = self.pieces(start)
        signals = [] if self.done is None else self.signals(pieces, self.done)
        end = issuer.issue(None if ready is None else partial(issuer.sms.take, None))
        end.follow([start, *(task for _, task in pieces), *signals, *copies[-1:]])
        end.changes, end.since = None if ready is None else issuer.sms, start

    def begin(self, start: Task, copies: Sequence[Task]) -> None:
        """Take the SMs, and read the operands that the kernel reads when it starts."""
        self.issuer.sms.take(start, copies)
        for y, copy in self.early:
            copy.copy_(y)

    def pieces(self, start: Task) -> list[RowsTask]:
        """Add the tasks that compute the result, and return them. They follow the task `start`."""
        pieces, before = list[RowsTask](), list[Task]()
        for block in (0,) if self.ready is None else self.ready.order:
            computed = self.block(start, block)
            for _, task in computed:
                task.held_by(before)
            pieces += computed
            # A machine may compute one block after another.
            before = [task for _, task in computed] if self.ready is not None and self.done is not None else []
        return pieces

    def block(self, start: Task, block: int) -> list[RowsTask]:
        """Add the tasks that compute one block of the result, and return them. They follow the task `start`."""
        ready, first = self.ready, block * self.height
        arrived = dict[int, Task]()  # by source: the wait for its flag
        parts, replaced_blocks = [(each, first) for each in self.sources], dict[int, int]()
        if ready is not None:
            arrived = {n // ready.results: self.arrival(start, ready, n) for n in ready.needed(block)}
            replaced_blocks = {n // ready.results: n for n in ready.replaced if n % ready.results == block}
        replaced = [parts[source] for source in replaced_blocks]  # the rows that the rank's `own_rows` replace
        for source, n in replaced_blocks.items():
            assert ready is not None
            assert ready.own_rows is not None
            parts[source] = ready.own_rows, ready.replaced.index(n) * self.height
        together: dict[Task, list[int]] = {}  # sources, by the task after which they may be read
        for source in range(len(parts)):
            together.setdefault(arrived.get(source, start), []).append(source)
        rows = [(self.out, first), *parts, *replaced, *((y, first) for y in self.cut_alike)]
        pieces = []
        for row, (target, *views) in self.cut(rows, first):
            sources, unused, along = _split(views, len(parts), len(replaced_blocks))
            undefined = dict(zip(replaced_blocks, unused, strict=True))
            task = self.piece(start, first + row, target, sources, undefined, along, together)
            pieces.append((first + row, task))
        return pieces

    def cut(self, rows: Sequence[tuple[torch.Tensor, int]], first: int) -> list[tuple[int, Views]]:
        """Return the pieces of a block, which begins at row `first`. Each has its first row in the block, and views."""
        if self.ready is not None and self.ready.sources:
            return source_pieces(rows, self.ready.sources, self.out.shape[-2], self.height)
        return row_pieces(rows, self.height, [cut - first for cut in self.cuts])

    def piece(
        self,
        start: Task,
        row: int,
        target: torch.Tensor,
        sources: Views,
        undefined: Mapping[int, torch.Tensor],
        along: Views,
        together: Mapping[Task, Sequence[int]],
    ) -> Task:
        """Add the tasks that compute some rows of the result, and return the last of these tasks.

        Args:
            start: the task that starts the kernel.
            row: the index of the first of the rows.
            target: the rows of the result.
            sources: the same rows of each source.
            undefined: by source, the rows that the kernel does not read because it reads `own_rows` instead. The kernel
                makes these rows undefined.
            along: the same rows of the other operands that are cut alike.
            together: by task, the indices of the sources that may be read after the task.
        """
        lane = f"row {row} of task {start.order}"
        taken: dict[int, torch.Tensor] = {}
        takes = []
        for after, numbers in together.items():
            views = {source: sources[source] for source in numbers}
            unread = tuple(undefined[source] for source in numbers if source in undefined)
            run = partial(_take, views, taken, unread)
            take = self.issuer.task(run, tuple(views.values()), undefines=unread, lane=f"source {numbers[0]} of {lane}")
            takes.append(take.follow([after]))
        others = [*self.others]
        for n, view in zip(self.of_rows, along, strict=True):
            others[n - 1] = view
        compute = partial(_compute, self.kernel, target, taken, others, self.options)
        read = start.reads or along  # what the kernel reads at its start must stay until it ends
        task = self.issuer.task(compute, (*self.uncut, *read), (target,), lane=lane, timed=True)
        return task.follow([start, *takes])

    def arrival(self, start: Task, ready: Ready, block: int) -> Task:
        """Add a task that waits for the flag of one block, and return it."""
        task = self.issuer.task(do_nothing, lane=f"wait {block} of task {start.order}").follow([start])
        task.gate, task.epoch = self.memory.flag(ready.flags, block), self.issuer.epoch(ready.epoch)
        task.awaits = block, ready.blocks
        return task

    def signals(self, pieces: Sequence[RowsTask], done: Done) -> list[Task]:
        """Add the tasks that set the kernel's flags, and return them. Each task follows the pieces of one block."""
        signals = []
        height = self.out.shape[:-1].numel() // done.blocks
        for block in done.order:
            computed = [task for row, task in pieces if row // height == block]
            task = self.issuer.task(None, lane=f"flag {block} of task {computed[0].order}").follow(computed)
            flag = self.memory.flag(done.flags, block)
            task.run, task.changes, task.epoch = partial(flag.set, task), flag, self.issuer.epoch(done.epoch)
            signals.append(task)
        return signals


def _split(views: Sequence[torch.Tensor], first: int, second: int) -> tuple[Views, Views, Views]:
    """Split `views` into the first `first` views, the next `second` views, and the rest."""
    return tuple(views[:first]), tuple(views[first : first + second]), tuple(views[first + second :])


def _take(sources: Mapping[int, torch.Tensor], taken: dict[int, torch.Tensor], unread: Views) -> None:
    """Read rows of some sources into `taken`. Make the rows `unread` undefined, because `own_rows` replace them."""
    taken.update({source: x.clone() for source, x in sources.items()})
    for x in unread:
        make_undefined(x)


def _compute(
    kernel: Kernel,
    out: torch.Tensor,
    taken: Mapping[int, torch.Tensor],
    others: Sequence[torch.Tensor | None],
    options: Mapping[str, Any],
) -> None:
    """Compute some rows of the result. `taken` holds the rows that were read from each source."""
    kernel(out, *(taken[source] for source in sorted(taken)), *others, **options)


def _sum_of(kernel: Kernel, addends: int, out: torch.Tensor, *parts: torch.Tensor, **options: Any) -> None:
    """Compute a sum by `kernel`. The last `addends` tensors of `parts` are addends, and all others are sources."""
    sources, added = parts[: len(parts) - addends], parts[len(parts) - addends :]
    kernel(out, torch.stack(sources) if sources else out.new_empty(0, *out.shape), *added, **options)
