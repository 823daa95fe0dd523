"""A matmul whose layout has been looked at: launched again and again, it costs the host little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hostir.runtime.kernels.kernel import Again
from hostir.runtime.kernels.launch import INTERPRETED, Compiled, bind_thread, launching
from hostir.runtime.kernels.matmul_kernel import matmul_kernel
from hostir.runtime.kernels.operands import Described
from hostir.runtime.kernels.ready import ReadyFlags
from hostir.runtime.kernels.workspace import workspace

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # a, b, out, own

_KEPT = 64  # encoded descriptors of one operand, each for another address


@dataclass
class Call:
    """What a launch of the kernel needs besides the tensors, for operands of one layout.

    Fields:
        programs: of the grid.
        described: how TMA sees a, b, out and, if they are apart, own rows; None: they are passed as pointers.
        blocks: what of these a descriptor moves at a time.
        block: rows of a block, with flags.
        schedule: tiles before the last ones that are split, these, and parts of each; None where no tile is split.
        sums, tickets: what split tiles need of `workspace`.
        copies_own: own rows go to their place among those of a first, and are not passed.
        sizes: the arguments of the kernel from `early` to the last stride.
        constants, options: the kernel's constants, in its order, and how to compile it.
    """

    device: torch.device
    programs: int
    described: Sequence[Described] | None
    blocks: Sequence[tuple[int, int]]
    bias_step: int
    block: int | None
    schedule: tuple[int, int, int] | None
    sums: int
    tickets: int
    copies_own: bool
    sizes: tuple[int, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    compiled: Compiled | None = field(default=None, init=False)
    _rest: tuple[Any, ...] = field(init=False)
    _encoded: tuple[dict[int, Sequence[Any]], ...] = field(default_factory=lambda: ({}, {}, {}, {}), init=False)

    def __post_init__(self) -> None:
        self._rest = (*self.sizes, *self.constants.values())

    def launch(self, matrices: Matrices, bias: torch.Tensor | None, ready: ReadyFlags | None) -> Again | None:
        """Launch for these tensors, on the current stream. None if the kernel had to be compiled; else what launches
        it once more for the same addresses, on the stream that is current then."""
        if self.compiled is None:
            self._compile(matrices, bias, ready)
            return None
        if torch.cuda.current_device() != self.device.index:
            with launching(self.device):
                return self.launch(matrices, bias, ready)
        bind_thread(self.device)
        given = self._arguments(self.compiled, matrices, bias, ready)
        self._start(self.compiled, given)
        return partial(self._again, self.compiled, given)

    def _again(self, compiled: Compiled, given: Sequence[Any]) -> None:
        if torch.cuda.current_device() == self.device.index:
            bind_thread(self.device)
            self._start(compiled, given)
            return
        with launching(self.device):
            self._again(compiled, given)

    def _compile(self, matrices: Matrices, bias: torch.Tensor | None, ready: ReadyFlags | None) -> None:
        """Launch as Triton does, which compiles if need be. The interpreter knows no other way."""
        operands: list[Any] = list(matrices)
        if self.described is not None:
            operands = [t if t is None else self._descriptor(number, t) for number, t in enumerate(matrices)]
        waits: Sequence[Any] = [None] * 7
        if ready is not None:
            waits = (ready.flags, ready.stalls, ready.epoch, ready.first, len(ready.flags), self.block, ready.looks)
        split: Sequence[Any] = [None] * 5
        with launching(self.device):
            if not INTERPRETED:
                bind_thread(self.device)
            if self.schedule is not None:
                stream = 0 if INTERPRETED else torch.cuda.current_stream(self.device).cuda_stream
                split = (*self.schedule, *workspace(self.device, stream, self.sums, self.tickets))
            arguments = (*operands, bias, self.bias_step, *waits, *split, *self.sizes)
            kernel = matmul_kernel[(self.programs,)](*arguments, **self.constants, **self.options)
        if not INTERPRETED:
            self.compiled = Compiled(kernel)

    def _start(self, compiled: Compiled, given: Sequence[Any]) -> None:
        stream = compiled.stream(self.device.index)
        split: Sequence[Any] = (None, None, None, None, None)
        if self.schedule is not None:
            # Held until the kernel is launched: nothing launched before it can get this memory.
            sums, tickets = workspace(self.device, stream, self.sums, self.tickets)
            split = (*self.schedule, sums.data_ptr(), tickets.data_ptr())
        compiled.launch(self.programs, stream, (*given, *split, *self._rest))

    def _arguments(
        self, compiled: Compiled, matrices: Matrices, bias: torch.Tensor | None, ready: ReadyFlags | None
    ) -> Sequence[Any]:
        """Those that depend on tensors, as addresses."""
        a, b, out, own = matrices
        operands: Sequence[Any]
        if self.described is not None:
            of_a, of_b, of_out, of_own = self._encoded
            operands = (
                *(of_a.get(a.data_ptr()) or self._encode(compiled, 0, a)),
                *(of_b.get(b.data_ptr()) or self._encode(compiled, 1, b)),
                *(of_out.get(out.data_ptr()) or self._encode(compiled, 2, out)),
                *((None,) if own is None else of_own.get(own.data_ptr()) or self._encode(compiled, 3, own)),
            )
        else:
            operands = (a.data_ptr(), b.data_ptr(), out.data_ptr(), None if own is None else own.data_ptr())
        waits: Sequence[Any] = (None, None, None, None, None, None, None)
        if ready is not None:
            flags = ready.flags
            waits = (
                *(flags.data_ptr(), ready.stalls.data_ptr(), ready.epoch),
                *(ready.first, len(flags), self.block, ready.looks),
            )
        return (*operands, None if bias is None else bias.data_ptr(), self.bias_step, *waits)

    def _descriptor(self, number: int, tensor: torch.Tensor) -> Any:
        assert self.described is not None
        return self.described[number].descriptor(tensor, self.blocks[number])

    def _encode(self, compiled: Compiled, number: int, tensor: torch.Tensor) -> Sequence[Any]:
        kept = self._encoded[number]
        if len(kept) >= _KEPT:
            kept.clear()
        made = kept[tensor.data_ptr()] = compiled.encoded(number, self._descriptor(number, tensor))
        return made
