"""A prepared matmul: what a launch needs, decided once for a set of shapes.

Prepared launches: for known layouts a call costs little host time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hostir.kernels.devices import (
    Compiled,
    StandIn,
    bind_thread,
    launching,
    load,
)
from hostir.kernels.flags.copies import PushKernel
from hostir.kernels.flags.done import DoneFlags
from hostir.kernels.flags.pushed import Pushed
from hostir.kernels.flags.ready import ReadyFlags
from hostir.kernels.matmul.kernel import Bias, Constants, Scales, Strides, Workspace, matmul_kernel
from hostir.kernels.matmul.operands import Described
from hostir.kernels.matmul.tiles import Tile
from hostir.kernels.matmul.workspaces import workspace
from hostir.kernels.repeats import Again
from hostir.kernels.scales import FlatScales

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # a, b, out, own
Vectors = tuple[torch.Tensor | None, FlatScales | None]  # a bias; the scales of a and of b

_NO_FLAGS = (None,) * 5  # the arguments of the kernel from `flags` to `polls`, if rows are ready
_NOT_RAISED = (None,) * 3  # from `raised_flags` to `raised_height`, if no flags rise
_NOT_SPLIT = (None,) * 4  # from `workspace` to `parts`, if no tile is split
_MAX_DESCRIPTORS = 64  # encoded descriptors of one operand that are kept, one per address


@dataclass
class MatmulLaunch:
    """A prepared launch of the matmul kernel, for operands of one layout.

    Fields:
        tile: what it was prepared with.
        programs: size of the grid.
        described: TMA layouts of a, b, out and own rows that are read in place; None: operands are pointers.
        blocks: the shape of the tile that each descriptor moves.
        bias_step: stride of the bias, in elements.
        scale_steps: strides of the scales of a, then of those of b, as in `Scales`; empty without scales.
        block: rows per block of those that are waited for, with flags.
        raised_block: rows per block behind which flags rise, with flags.
        schedule: number of tiles before the split ones, of split ones, and of parts of each; None if none is split.
        sums, tickets: sizes of the `workspace`.
        counts: where in the tickets the counts of blocks begin, two words each, behind the tickets of split tiles.
        pushed_block: rows per piece of those that are copied to peers; None: there are no copies.
        copies_own: copy own rows to their place in a before the launch, and do not pass them.
        sizes: the arguments of the kernel from `early` to `K`.
        strides, constants, options: further arguments, what the kernel is compiled for, and how.
    """

    tile: Tile
    device: torch.device
    programs: int
    described: Sequence[Described] | None
    blocks: Sequence[tuple[int, int]]
    bias_step: int
    scale_steps: tuple[int, ...]
    block: int | None
    raised_block: int | None
    schedule: tuple[int, int, int] | None
    sums: int
    tickets: int
    counts: int
    pushed_block: int | None
    copies_own: bool
    sizes: tuple[int, ...]
    strides: Strides
    constants: Constants
    options: Mapping[str, Any]
    compiled: Compiled | None = field(default=None, init=False)
    _rest: tuple[Any, ...] = field(init=False)
    _encoded: tuple[dict[int, Sequence[Any]], ...] = field(default_factory=lambda: ({}, {}, {}, {}), init=False)

    def __post_init__(self) -> None:
        self._rest = (*self.sizes, self.strides, self.constants)

    def launch(
        self,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
    ) -> Again | None:
        """Launch for these tensors, on the current stream.

        Returns a function that launches it again for the same addresses, on the stream that is then current; None in
        the interpreter.
        """
        if self.compiled is None:
            self._interpret(matrices, vectors, ready, done, pushed)
            return None
        if torch.cuda.current_device() != self.device.index:
            with launching(self.device):
                return self.launch(matrices, vectors, ready, done, pushed)
        bind_thread(self.device)
        arguments = self._arguments(self.compiled, matrices, vectors, ready, done, pushed)
        self._start(self.compiled, arguments)
        return partial(self._again, self.compiled, arguments)

    def _again(self, compiled: Compiled, arguments: Sequence[Any]) -> None:
        if torch.cuda.current_device() == self.device.index:
            bind_thread(self.device)
            self._start(compiled, arguments)
            return
        with launching(self.device):
            self._again(compiled, arguments)

    def load(
        self,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
    ) -> None:
        """Compile the kernel for such tensors, and load it. Raises TooLargeError if it needs more than the GPU has."""
        sums, tickets = (
            StandIn.of((size,), (1,), dtype, self.device)
            for size, dtype in ((self.sums, torch.float32), (self.tickets, torch.int32))
        )
        arguments = self._tensors(matrices, vectors, ready, done, pushed, sums, tickets)
        with launching(self.device):
            self.compiled = load(matmul_kernel, arguments, self.options)

    def _interpret(
        self,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
    ) -> None:
        """Run the kernel in the interpreter."""
        sums, tickets = workspace(self.device, 0, self.sums, self.tickets) if self.tickets else (None, None)
        arguments = self._tensors(matrices, vectors, ready, done, pushed, sums, tickets)
        with launching(self.device):
            matmul_kernel[(self.programs,)](*arguments, **self.options)

    def _tensors(
        self,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
        sums: Any,
        tickets: Any,
    ) -> Sequence[Any]:
        """Return all arguments as Triton takes them, with tensors and descriptors."""
        operands: list[Any] = list(matrices)
        if self.described is not None:
            operands = [t if t is None else self._descriptor(number, t) for number, t in enumerate(matrices)]
        waits = _NO_FLAGS if ready is None else (ready.flags, ready.timeouts, *_polled(ready))
        raised = _NOT_RAISED if done is None else (done.flags, done.epoch, self.raised_block)
        counts = None if done is None else tickets[self.counts : self.tickets].view(torch.int64)
        shared = _NOT_SPLIT if self.schedule is None else (Workspace(sums, tickets), *self.schedule)
        copies = None if pushed is None else Pushed(pushed.table, pushed.arrived, pushed.count, self.pushed_block)
        arguments = (*operands, *self._vectors(*vectors), *self._order(ready, done), *waits, *raised, copies, counts)
        return *arguments, *shared, *self._rest

    def _start(self, compiled: Compiled, arguments: Sequence[Any]) -> None:
        stream = compiled.stream(self.device.index)
        counts: int | None = None
        shared: Sequence[Any] = _NOT_SPLIT
        if self.tickets:
            # Kept alive until the kernel is launched: nothing launched earlier can get this memory.
            sums, tickets = workspace(self.device, stream, self.sums, self.tickets)
            if self.schedule is not None:
                shared = ((sums.data_ptr(), tickets.data_ptr()), *self.schedule)
            if self.raised_block is not None:
                counts = tickets.data_ptr() + self.counts * tickets.element_size()
        compiled.launch(self.programs, stream, (*arguments, counts, *shared, *self._rest))

    def _order(self, ready: ReadyFlags | None, done: DoneFlags | None) -> tuple[int | None, int | None]:
        """Return the block to begin with, and the rows of a block; None if no flags say."""
        if ready is not None:
            return ready.first, self.block
        return (None, None) if done is None else (done.first, self.raised_block)

    def _arguments(
        self,
        compiled: Compiled,
        matrices: Matrices,
        vectors: Vectors,
        ready: ReadyFlags | None,
        done: DoneFlags | None,
        pushed: PushKernel | None,
    ) -> Sequence[Any]:
        """Return the arguments that depend on the tensors, as addresses and encoded descriptors."""
        a, b, out, own_rows = matrices
        operands: Sequence[Any]
        if self.described is not None:
            of_a, of_b, of_out, of_own = self._encoded
            operands = (
                *(of_a.get(a.data_ptr()) or self._encode(compiled, 0, a)),
                *(of_b.get(b.data_ptr()) or self._encode(compiled, 1, b)),
                *(of_out.get(out.data_ptr()) or self._encode(compiled, 2, out)),
                *(
                    (None,)
                    if own_rows is None
                    else of_own.get(own_rows.data_ptr()) or self._encode(compiled, 3, own_rows)
                ),
            )
        else:
            operands = (a.data_ptr(), b.data_ptr(), out.data_ptr(), None if own_rows is None else own_rows.data_ptr())
        waits: Sequence[Any] = _NO_FLAGS
        if ready is not None:
            waits = (ready.flags.data_ptr(), ready.timeouts.data_ptr(), *_polled(ready))
        raised: Sequence[Any] = _NOT_RAISED
        if done is not None:
            raised = (done.flags.data_ptr(), done.epoch, self.raised_block)
        bias, scales = vectors
        added = self._vectors(
            None if bias is None else bias.data_ptr(),
            None if scales is None else (scales.of_a.data_ptr(), scales.of_b.data_ptr()),
        )
        copies: tuple[Any, ...] | None = None
        if pushed is not None:
            copies = (pushed.table.data_ptr(), pushed.arrived.data_ptr(), pushed.count, self.pushed_block)
        return (*operands, *added, *self._order(ready, done), *waits, *raised, copies)

    def _vectors(self, bias: Any, scales: Sequence[Any] | None) -> tuple[Bias | None, Scales | None]:
        """Return the arguments `bias` and `scales`, of tensors or addresses."""
        added = None if bias is None else Bias(bias, self.bias_step)
        return added, None if scales is None else Scales(*scales[:2], *self.scale_steps)

    def _descriptor(self, number: int, tensor: torch.Tensor) -> Any:
        assert self.described is not None
        return self.described[number].descriptor(tensor, self.blocks[number])

    def _encode(self, compiled: Compiled, number: int, tensor: torch.Tensor) -> Sequence[Any]:
        kept = self._encoded[number]
        if len(kept) >= _MAX_DESCRIPTORS:
            kept.clear()
        encoded = kept[tensor.data_ptr()] = compiled.encoded(number, self._descriptor(number, tensor))
        return encoded


def _polled(ready: ReadyFlags) -> tuple[int, ...]:
    """Return the arguments of the kernel from `epoch` to `polls`."""
    return ready.epoch, len(ready.flags), ready.polls
