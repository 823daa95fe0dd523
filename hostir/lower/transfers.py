"""Build one-sided communication: transfers of blocks between the ranks of a team.

In one-sided form a collective is a set of transfers, each of one block from one rank to another. A transfer has four
parts:

- *which block*: a view of the source, and a view of the symmetric buffer to which it is copied;
- *from which rank to which, in which round*: in each round every rank has a different peer, so no two send to the same;
- *when it may start*: when the source is ready and its place in the buffer is free. A barrier after the previous call
  ensures the latter: every rank has read what that call left there;
- *what shows that it has arrived*: a flag of the receiver, if the sender puts the block; the order of the receiver's
  own stream, if the receiver gets it.

`Transfers` builds the statements. What produces and consumes a block is up to the strategy: with `ring`, ranks get
blocks, and computations on its rows follow each; with `fused` and `push`, ranks put blocks, and one matmul waits for
their flags. Which blocks there are depends on the collective: for an allgather see `hostir/lower/gathers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import Collective
from hostir.ir.host_ops import For, SetStream, Synchronize
from hostir.ir.onesided_ops import AllocateSymmetric, Barrier, Get, Put, Signal, WaitSignal
from hostir.ir.op import Bin, Expr, Lit, Ref, Statement, Value
from hostir.ir.sizes import ONE, Size
from hostir.ir.tensor_ops import ViewStatement
from hostir.ir.types import FLAG, Axis, TensorType
from hostir.lower.host import Host

ARRIVED = Lit(1)  # the epoch of a block that has arrived: epochs start again in every call
COPY_STREAM = Lit(0)  # the worker stream of the copies by copy engines
SIGNAL_STREAM = Lit(1)  # the worker stream of the kernels that signal after these copies, if there are two


@dataclass(frozen=True)
class Mover:
    """The mover of the bytes: copy engines on worker streams, or a kernel on some SMs, on the caller's stream.

    For more than one copy, copy engines use two worker streams if they may: a kernel on the second stream sends the
    signal after each copy, since a signal by the copying stream itself would delay the next copy.
    """

    sms: int = 0  # the number of SMs of the kernel; 0 for copy engines
    streams: int = 0  # the maximal number of worker streams for copy engines


@dataclass(frozen=True)
class Blocks:
    """The blocks that a rank sends to every peer: for each a view of the source, one of the target, and its flag.

    If there are several, a loop over `index` makes the views of one block after another.
    """

    source: Value
    target: Value
    views: tuple[ViewStatement, ...]
    flag: Expr
    index: Ref | None = None
    count: Size = ONE


class Transfers:
    """Builds the transfers of one collective to a symmetric buffer, and a row of flags, one for each block there."""

    def __init__(self, host: Host, s: Collective, buffer: Value, flags: Size | None = None) -> None:
        self.host, self.team, self.buffer, self.span = host, host.team(s), buffer, s.span
        self.workers = 0  # the number of worker streams that send
        host.body.append(AllocateSymmetric(buffer, span=s.span))
        if flags is not None:
            row = TensorType(FLAG, (Axis.of(flags),), s.mesh)
            self.flags = Value(host.names.fresh(f"{s.out.name}_there"), row, s.span)
            host.body.append(AllocateSymmetric(self.flags, span=s.span))

    def reuse_barrier(self) -> list[Statement]:
        """Return a barrier that waits until all ranks have read the blocks of the previous call.

        It is needed once for all transfers of a team: later ones get no barrier.
        """
        if self.team.past_last_call:
            return []
        self.team.past_last_call = True
        return [self.barrier(f"all ranks have read what the previous call left in {self.buffer}")]

    def barrier(self, note: str) -> Barrier:
        """Return a barrier of the team."""
        return Barrier(self.buffer, self.team.over, span=self.span, note=note)

    def put(self, source: Value, target: Value, to: Expr, *, note: str = "", sms: int = 0) -> Put:
        """Return the copy of a block to a rank: by `sms` SMs, or by a copy engine if 0."""
        return Put(source, target, to, self.team.over, sms=sms, span=self.span, note=note)

    def get(self, source: Value, target: Value, peer: Expr) -> Get:
        """Return the copy of a block from a rank."""
        return Get(source, target, peer, self.team.over, span=self.span)

    def wait(self, flag: Expr) -> WaitSignal:
        """Return the wait of the current stream for a block of this rank's buffer."""
        return WaitSignal(self.flags, flag, ARRIVED)

    def put_and_signal(self, blocks: Blocks, to: Expr, note: str, sms: int = 0) -> tuple[Put, Signal]:
        """Return the copy of a block to a rank, and the signal that it has arrived."""
        signal = Signal(self.flags, blocks.flag, ARRIVED, to, self.team.over, span=self.span)
        return self.put(blocks.source, blocks.target, to, note=note, sms=sms), signal

    def each(self, blocks: Blocks, statements: Iterable[Statement]) -> list[Statement]:
        """Return the statements for each block, in a loop if there are several."""
        if blocks.index is None:
            return [*statements]
        return [For(blocks.index.value, blocks.count, (*blocks.views, *statements), span=self.span)]

    def send(self, blocks: Blocks, mover: Mover, own: str, peers: str) -> None:
        """Add the transfers of the blocks to all ranks of the team, in descending order from the rank before this one.

        So each rank receives the blocks of its peers in ascending order of ranks, from the rank after its own. `own`
        and `peers` are the notes of the copies; if `own` is empty, copy engines leave out the rank's own blocks.
        """
        if mover.sms:
            self._send_by_kernel(blocks, mover.sms, f"to itself, then {peers}")
        else:
            self._send_by_copy_engines(blocks, mover.streams, own, peers)

    def _send_by_kernel(self, blocks: Blocks, sms: int, note: str) -> None:
        turn, ranks, body = self.host.index("i"), self.team.ranks, self.host.body
        copies = self.put_and_signal(blocks, self.team.peer(Bin("-", Lit(ranks), turn)), note, sms)
        body += [*self.reuse_barrier(), *(() if blocks.index else blocks.views)]
        body += self.each(blocks, [For(turn.value, Size(ranks), copies, span=self.span)])

    def _send_by_copy_engines(self, blocks: Blocks, streams: int, own: str, peers: str) -> None:
        turn, others, user, body = self.host.index("i"), self.team.ranks - 1, self.host.user, self.host.body
        copy, signal = self.put_and_signal(blocks, self.team.peer(Bin("-", Lit(others), turn)), peers)
        copies: tuple[Statement, ...] = copy, signal
        self.workers = 1
        if streams > 1 and not (blocks.count * others).is_one:
            self.workers = 2
            by_kernel = replace(signal, sms=1, note="by a kernel: the next copy need not wait for it")
            copies = SetStream(COPY_STREAM), copy, SetStream(SIGNAL_STREAM), Synchronize(COPY_STREAM), by_kernel
        body += [SetStream(COPY_STREAM), Synchronize(user), *(() if blocks.index else blocks.views)]
        if own:
            # A copy within a GPU needs SMs, so it must come before the matmul that holds them.
            copied = self.each(blocks, self.put_and_signal(blocks, self.team.rank, own))
            body += [SetStream(user), *copied, SetStream(COPY_STREAM)]
        body += self.reuse_barrier()
        body += self.each(blocks, [For(turn.value, Size(others), copies, span=self.span)])
        body.append(SetStream(user))

    def join(self) -> None:
        """Make the caller's stream wait for all copies of `send` and the signals after them."""
        if self.workers:
            self.host.body.append(Synchronize(SIGNAL_STREAM if self.workers > 1 else COPY_STREAM))
