"""Prepared launches of the matmul kernel.

Everything that depends only on the layouts of a call is decided when the launch is prepared. Later calls with the same
layouts take little host time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

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
from hostir.kernels.flags.signals import Ending
from hostir.kernels.matmul.kernel import Bias, Constants, Scales, Strides, Workspace, matmul_kernel
from hostir.kernels.matmul.operands import Described
from hostir.kernels.matmul.tiles import Tile
from hostir.kernels.matmul.workspaces import workspace
from hostir.kernels.repeats import Again
from hostir.kernels.scales import FlatScales

_NO_FLAGS = (None,) * 5  # the kernel's arguments from `flags` to `polls`, if it waits for no flags
_NOT_RAISED = (None,) * 3  # its arguments from `raised_flags` to `raised_height`, if it raises no flags
_NOT_SPLIT = (None,) * 4  # its arguments from `workspace` to `parts`, if no tile is split
_address = methodcaller("data_ptr")
_MAX_DESCRIPTORS = 64  # encoded descriptors of one operand that are kept, one per address


class MatmulCall(NamedTuple):
    """The tensors and flags of one call of `multiply`; `b` is `[K, N]`."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    own_rows: torch.Tensor | None
    bias: torch.Tensor | None
    scales: FlatScales | None
    ready: ReadyFlags | None
    done: DoneFlags | None
    pushed: PushKernel | None


@dataclass
class MatmulLaunch:
    """A prepared launch of the matmul kernel, for operands of one layout.

    Fields:
        tile: the tile that the launch was prepared with.
        programs: size of the grid.
        described: TMA layouts of a, b and out, and of `own_rows` if they are read in place. None if operands are
            pointers.
        blocks: the shape of the tile that each descriptor moves.
        bias_step: stride of the bias, in elements.
        scale_steps: strides of the scales of a, then of b, as in `Scales`; empty without scales.
        block: number of rows of a block that the kernel waits for; None if it waits for no flags.
        raised_block: number of rows of a block for which the kernel raises a flag; None if it raises no flags.
        schedule: the kernel's arguments `unsplit`, `split` and `parts`. None if no tile is split.
        sums, tickets: numbers of elements of the two tensors from `workspace`.
        counts: index in the tickets at which the counts of blocks begin. Each count takes two tickets. The tickets
            before this index belong to split tiles.
        pushed_block: number of rows of a piece that is copied to peers; None without copies.
        copies_own: True if `own_rows` must be copied to their place in `a` before the launch. The launch then gets no
            `own_rows`.
        sizes: the values of the kernel's parameters from `early` to `K`.
        strides, constants: the values of the kernel's last two parameters. The kernel is compiled for the constants.
        options: Triton's compile options.
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

    def launch(self, call: MatmulCall) -> Again | None:
        """Launch the kernel for the tensors of a call, on the current stream.

        Returns a function that launches the kernel again for the same addresses, on the stream that is current at that
        time. Returns None in the interpreter.
        """
        if self.compiled is None:
            self._interpret(call)
            return None
        if torch.cuda.current_device() != self.device.index:
            with launching(self.device):
                return self.launch(call)
        bind_thread(self.device)
        arguments = self._arguments(call, _address, partial(self._encoded_descriptor, self.compiled))
        self._start(self.compiled, arguments)
        return partial(self._again, self.compiled, arguments)

    def _again(self, compiled: Compiled, arguments: Sequence[Any]) -> None:
        if torch.cuda.current_device() == self.device.index:
            bind_thread(self.device)
            self._start(compiled, arguments)
            return
        with launching(self.device):
            self._again(compiled, arguments)

    def load(self, call: MatmulCall) -> None:
        """Compile the kernel for the tensors of a call, and load it. Raises TooLargeError if it is too large."""
        sums, tickets = (
            StandIn.of((size,), (1,), dtype, self.device)
            for size, dtype in ((self.sums, torch.float32), (self.tickets, torch.int32))
        )
        with launching(self.device):
            self.compiled = load(matmul_kernel, self._tensors(call, sums, tickets), self.options)

    def _interpret(self, call: MatmulCall) -> None:
        """Run the kernel in the interpreter for the tensors of a call."""
        sums, tickets = workspace(self.device, 0, self.sums, self.tickets) if self.tickets else (None, None)
        with launching(self.device):
            matmul_kernel[(self.programs,)](*self._tensors(call, sums, tickets), **self.options)

    def _tensors(self, call: MatmulCall, sums: Any, tickets: Any) -> Sequence[Any]:
        """Return all arguments of the kernel as Triton's launch takes them: tensors and descriptors."""
        counts = None if call.done is None else tickets[self.counts : self.tickets].view(torch.int64)
        shared = _NOT_SPLIT if self.schedule is None else (Workspace(sums, tickets), *self.schedule)
        return *self._arguments(call, lambda t: t, lambda *it: (self._descriptor(*it),)), counts, *shared, *self._rest

    def _start(self, compiled: Compiled, arguments: Sequence[Any]) -> None:
        """Launch the compiled kernel on the current stream.

        `arguments` are the arguments for the kernel's parameters that precede `counts`.
        """
        stream = compiled.stream(self.device.index)
        counts: int | None = None
        shared: Sequence[Any] = _NOT_SPLIT
        if self.tickets:
            # These references keep the memory alive until the kernel is launched, so no other launch gets it before.
            sums, tickets = workspace(self.device, stream, self.sums, self.tickets)
            if self.schedule is not None:
                shared = ((sums.data_ptr(), tickets.data_ptr()), *self.schedule)
            if self.raised_block is not None:
                counts = tickets.data_ptr() + self.counts * tickets.element_size()
        compiled.launch(self.programs, stream, (*arguments, counts, *shared, *self._rest))

    def _arguments(
        self,
        call: MatmulCall,
        pointer: Callable[[torch.Tensor], Any],
        descriptor: Callable[[int, torch.Tensor], Sequence[Any]],
    ) -> tuple[Any, ...]:
        """Return the arguments for the kernel's parameters that precede `counts`.

        `pointer` converts a tensor to an argument. `descriptor` takes the index of an operand (0 for a, 1 for b, 2 for
        out, 3 for own_rows) and its tensor. It returns the arguments that describe the tensor to TMA.
        """
        a, b, out, own_rows, bias, scales, ready, done, pushed = call
        operands: tuple[Any, ...]
        if self.described is None:
            operands = (pointer(a), pointer(b), pointer(out), None if own_rows is None else pointer(own_rows))
        else:
            last = (None,) if own_rows is None else descriptor(3, own_rows)
            operands = (*descriptor(0, a), *descriptor(1, b), *descriptor(2, out), *last)
        added = None if bias is None else Bias(pointer(bias), self.bias_step)
        factors = None if scales is None else Scales(pointer(scales.of_a), pointer(scales.of_b), *self.scale_steps)
        first, height = (None, None) if done is None else (done.first, self.raised_block)
        waits: Sequence[Any] = _NO_FLAGS
        if ready is not None:
            first, height = ready.first, self.block
            waits = (pointer(ready.flags), pointer(ready.timeouts), ready.epoch, len(ready.flags), ready.polls)
        raised = _NOT_RAISED if done is None else (pointer(done.flags), done.epoch, self.raised_block)
        copies = None
        if pushed is not None:
            copies = Pushed(pointer(pushed.table), pointer(pushed.arrived), pushed.count, self.pushed_block)
        return (*operands, added, factors, first, height, *waits, *raised, copies, Ending.of(ready, pointer))

    def _descriptor(self, number: int, tensor: torch.Tensor) -> Any:
        assert self.described is not None
        return self.described[number].descriptor(tensor, self.blocks[number])

    def _encoded_descriptor(self, compiled: Compiled, number: int, tensor: torch.Tensor) -> Sequence[Any]:
        """Return the kernel arguments that encode the TMA descriptor of an operand.

        `number` is the index of the operand. The arguments are cached by the address of the tensor.
        """
        kept, address = self._encoded[number], tensor.data_ptr()
        encoded = kept.get(address)
        if encoded is None:
            if len(kept) >= _MAX_DESCRIPTORS:
                kept.clear()
            encoded = kept[address] = compiled.encoded(number, self._descriptor(number, tensor))
        return encoded
