"""Pass `push`: as `fused`, with copies by a few SMs of the rank that has the rows, in one kernel before the matmul.

For few rows: a kernel begins to write to peers, and raises flags behind, in less time than copy engines take to begin.
The matmul behind it starts while it copies. Kernels that store to peers are how low-latency collectives work in NCCL
(its LL protocols) and in the one-shot kernels of TensorRT-LLM and of torch's symmetric memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hostir.ir.host_ops import For
from hostir.ir.sizes import Size
from hostir.ir.tensor_ops import Copy
from hostir.ir.values import Bin, Lit
from hostir.lower.fused import Fused, Push
from hostir.lower.peers import modulo

SMS = 16  # that copy: fewer do not fill the links, more leave too few to the matmul


class KernelPush(Push):
    """One allgather: the copies to all ranks, this one first, are on the caller's stream, before the matmul."""

    copies_own = True  # the same few SMs copy to all

    def workers_of(self, streams: int) -> int:
        return 0

    def copies(self) -> None:
        body, turn = self.host.body, self.peers.index("i")
        body += self.peers.past(self.gather, self.full)
        body += self.views if self.axis is None else ()
        before = modulo(Bin("+", self.place, Bin("-", Lit(self.ranks), turn)), self.ranks)
        copy, signal = self.push(before, "to itself, then to the rank that multiplies these rows next")
        body += self.each([For(turn.value, Size(self.ranks), (replace(copy, sms=SMS), signal), span=self.gather.span)])

    def settle(self) -> None:
        if self.whole:
            note = f"copy: {self.whole} is wanted whole"
            self.host.body.append(Copy(out=self.whole, x=self.full, span=self.gather.span, note=note))


@dataclass(frozen=True)
class Pushed(Fused):
    """Copies by SMs to all peers instead of an allgather of rows, and a matmul that starts beside them."""

    name = "push"
    pushes: ClassVar[type[Push]] = KernelPush
