"""Build one-sided communication: transfers of blocks between the ranks of a team.

In one-sided form a collective is a set of transfers. Each transfer moves one block from one rank to another. A transfer
has four parts:

- *the block*: a view of the source, and a view of the symmetric buffer where the block goes;
- *the ranks and the turn*: source rank, target rank, and the turn. In each turn every rank has a different peer, so no
  two ranks send to the same rank;
- *its start*: a transfer starts when the source is ready and the place in the buffer is free. If a kernel is still
  writing the source, a flag of this rank tells when the source is ready. A barrier after the previous call tells that
  the buffer is free: every rank has read the blocks of that call;
- *its arrival*: if the sender puts the block, a flag of the receiver tells that the block has arrived. If the receiver
  gets the block, later statements on the receiver's stream find it there.

`Transfers` makes the statements. The strategy decides which statements produce and consume a block. In `ring`, a rank
computes the rows of a block before it puts them, or computes on them after it has got them. In `fused` and `push`, one
matmul waits for the blocks that ranks put, or sets a flag after each block that is to be put. One sum adds up the
blocks of all ranks. `hostir/lower/rows.py` describes the blocks of each communication and their layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hostir.ir.comm_ops import Collective
from hostir.ir.host_ops import For, SetStream, Synchronize
from hostir.ir.onesided_ops import AllocateSymmetric, Barrier, Get, Put, Signal, WaitSignal
from hostir.ir.op import Expr, Lit, Ref, Statement, Value
from hostir.ir.sizes import ONE, Size
from hostir.ir.types import FLAG, Axis, TensorType
from hostir.ir.view_ops import ViewStatement
from hostir.lower.host import Host

ARRIVED = Lit(1)  # the epoch of a block that has arrived: epochs restart in every call
COPY_STREAM = Lit(0)  # the worker stream of the copies by copy engines
SIGNAL_STREAM = Lit(1)  # the worker stream of kernels that signal after these copies, if two streams are used


@dataclass(frozen=True)
class Mover:
    """The hardware that copies blocks: copy engines on worker streams, or SMs with a kernel on the caller's stream.

    If copy engines make several copies, they use two worker streams, provided that `streams` allows two. A kernel on
    the second stream then sends the signal after each copy, because a signal by the copying stream would delay the next
    copy.
    """

    sms: int = 0  # the number of SMs of the kernel; 0: copy engines
    streams: int = 0  # the maximum number of worker streams for copy engines


@dataclass(frozen=True)
class Turns:
    """The order in which a rank sends blocks, in `count` turns.

    In turn `index` it sends to the rank at position `to`.
    """

    index: Ref
    count: Size
    to: Expr


@dataclass(frozen=True)
class Blocks:
    """The blocks that a rank sends in a turn: one block, or `count` blocks in a loop with the index `index`.

    Fields:
        source, target: a block is copied from the view `source` to the view `target`.
        views: the view statements that `source` and `target` need. With one block, they run once, before all turns.
            With several blocks, they run for each block.
        flag: the index of the flag that signals the arrival of a block.
        in_turn: the view statements that depend on the turn.
        awaited: the wait for a flag of this rank that is set when a kernel has written the source; None without such a
            flag.
    """

    source: Value
    target: Value
    views: tuple[ViewStatement, ...]
    flag: Expr
    index: Ref | None = None
    count: Size = ONE
    in_turn: tuple[ViewStatement, ...] = ()
    awaited: WaitSignal | None = None


class Transfers:
    """Builds the transfers of one collective to a symmetric buffer.

    `flags` is the number of blocks that have a flag to signal their arrival. None means no flags.
    """

    def __init__(self, host: Host, s: Collective, buffer: Value, flags: Size | None = None) -> None:
        self.host, self.team, self.buffer, self.span = host, host.team(s), buffer, s.span
        self.mesh = s.mesh
        self.workers = 0  # the worker streams that send
        host.body.append(AllocateSymmetric(buffer, span=s.span))
        if flags is not None:
            self.flags = self.row(f"{s.out.name}_there", flags)

    def row(self, name: str, count: Size) -> Value:
        """Allocate a row of flags on every rank of the mesh; return it."""
        flags = Value(self.host.names.fresh(name), TensorType(FLAG, (Axis.of(count),), self.mesh), self.span)
        self.host.body.append(AllocateSymmetric(flags, span=self.span))
        return flags

    def reuse_barrier(self) -> list[Statement]:
        """Return a list with a barrier that waits until all ranks have read the blocks of the previous call.

        One barrier is enough for all transfers of a team. So later calls of this method return an empty list.
        """
        if self.team.past_last_call:
            return []
        self.team.past_last_call = True
        return [self.barrier(f"all ranks have read what the previous call left in {self.buffer}")]

    def barrier(self, note: str) -> Barrier:
        """Return the statement of a barrier between the ranks of the team."""
        return Barrier(self.buffer, self.team.over, span=self.span, note=note)

    def put(self, source: Value, target: Value, to: Expr, *, note: str = "", sms: int = 0) -> Put:
        """Return the statement that copies a block to the rank at position `to`.

        `sms` is the number of SMs that copy; 0 for a copy engine.
        """
        return Put(source, target, to, self.team.over, sms=sms, span=self.span, note=note)

    def get(self, source: Value, target: Value, peer: Expr) -> Get:
        """Return the statement that copies a block from the rank at position `peer`."""
        return Get(source, target, peer, self.team.over, span=self.span)

    def wait(self, flag: Expr) -> WaitSignal:
        """Return the statement by which the current stream waits for a block of this rank's buffer."""
        return WaitSignal(self.flags, flag, ARRIVED, span=self.span)

    def put_and_signal(self, blocks: Blocks, to: Expr, note: str, sms: int = 0) -> tuple[Put, Signal]:
        """Return the statements that copy a block to the rank at position `to`, and signal that it has arrived."""
        return self.put(blocks.source, blocks.target, to, note=note, sms=sms), self.signal(blocks, to)

    def signal(self, blocks: Blocks, to: Expr) -> Signal:
        """Return the statement that signals to the rank at position `to` that a block has arrived."""
        return self.signal_flag(blocks.flag, to)

    def signal_flag(self, flag: Expr, to: Expr) -> Signal:
        """Return the statement that sets a flag of the rank at position `to`."""
        return Signal(self.flags, flag, ARRIVED, to, self.team.over, span=self.span)

    def once(self, blocks: Blocks) -> tuple[ViewStatement, ...]:
        """Return the view statements that run once, before all turns. Return () if the views differ between blocks."""
        return () if blocks.index else blocks.views

    def each(self, blocks: Blocks, statements: Iterable[Statement]) -> list[Statement]:
        """Return the statements to run for the blocks of a turn.

        For one block, they are `statements`. For several blocks, they are a loop that contains the view statements and
        `statements`.
        """
        if blocks.index is None:
            return [*statements]
        return [For(blocks.index.value, blocks.count, (*blocks.views, *statements), span=self.span)]

    def fork(self) -> None:
        """Append statements that make the copy stream current, and make it wait for the caller's stream."""
        self.host.body += [SetStream(COPY_STREAM), Synchronize(self.host.user)]
        self.host.forked = True

    def send(self, blocks: Blocks, turns: Turns, mover: Mover, note: str) -> None:
        """Append the transfers of the blocks in these turns.

        If copy engines copy, the copy stream must be current before; the caller's stream is current afterwards.
        """
        if mover.sms:
            copies = self.put_and_signal(blocks, turns.to, note, mover.sms)
            loop = For(turns.index.value, turns.count, (*blocks.in_turn, *copies), span=self.span)
            self.host.body += [*self.reuse_barrier(), *self.each(blocks, [loop])]
            return
        copy, signal = self.put_and_signal(blocks, turns.to, note)
        before = (*blocks.in_turn, *(() if blocks.awaited is None else (blocks.awaited,)))
        each: tuple[Statement, ...] = (*before, copy, signal)
        self.workers = 1
        if mover.streams > 1 and not (blocks.count * turns.count).is_one:
            self.workers = 2
            by_kernel = replace(signal, sms=1, note="by a kernel: the next copy need not wait for it")
            each = SetStream(COPY_STREAM), *before, copy, SetStream(SIGNAL_STREAM), Synchronize(COPY_STREAM), by_kernel
        loop = For(turns.index.value, turns.count, each, span=self.span)
        self.host.body += [*self.reuse_barrier(), *self.each(blocks, [loop]), SetStream(self.host.user)]

    def join(self) -> None:
        """Append the wait of the caller's stream for all copies and signals that `send` has put on worker streams."""
        if self.workers:
            self.host.body.append(Synchronize(SIGNAL_STREAM if self.workers > 1 else COPY_STREAM))
