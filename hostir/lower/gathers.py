"""Allgathers in one-sided form: ranks send their blocks of rows to all ranks, and a matmul waits for each block."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from hostir.ir.comm_ops import AllGather
from hostir.ir.host_ops import Chunk, For, SetStream
from hostir.ir.onesided_ops import Signal
from hostir.ir.op import Bin, Codec, Expr, Lit, Ref, Statement, Value
from hostir.ir.sizes import ONE, Size
from hostir.ir.tensor_ops import ByBlocks, DenseCopy
from hostir.ir.view_ops import Shard, ViewStatement
from hostir.lower.host import Host
from hostir.lower.rows import first_matmul, long_axes, row_slices, wanted_otherwise
from hostir.lower.scatters import ScatteredRows, add_view, one_of
from hostir.lower.transfers import ARRIVED, COPY_STREAM, SIGNAL_STREAM, Blocks, Mover, Transfers, Turns


class SentRows:
    """Builds one allgather: the copies of this rank's shard to all ranks, and the matmul that waits for all shards.

    Fields:
        joined_later: True if a sum over the same ranks follows, and appends its copies to the same stream as this
            allgather. The caller's stream then waits only for the copies of the sum. A sum over other ranks does not
            count, because its kernel could hold the SMs that the signals of the allgather's copies need.
    """

    joined_later = False

    def __init__(self, host: Host, gather: AllGather, mover: Mover, scales: Collection[str] = ()) -> None:
        self.host, self.gather, self.mover, self.scales = host, gather, mover, scales
        self.axis = next(iter(long_axes(gather)), None)  # the axis of blocks, if a rank's shard is several blocks
        self.team = host.team(gather)
        self.multiplied = first_matmul(host.program, gather) is not None
        self.x = x = host.packed(host.values[gather.x.name], gather)
        # Statements other than matmuls read a copy of the rows, because the next call overwrites the buffer.
        self.unshared = host.destination(gather.out) if wanted_otherwise(host.program, gather) else None
        name = host.names.fresh(f"{gather.out.name}_shared") if self.unshared else gather.out.name
        buffer = Value(name, gather.out.tensor.host(), gather.span)
        host.values.setdefault(gather.out.name, buffer)
        count = self.count()
        self.transfers = Transfers(host, gather, buffer, flags=count * self.team.ranks)
        self.blocks = self.blocks_of(x, buffer, count)
        self.send()
        self.workers = self.transfers.workers

    def count(self) -> Size:
        """Return the number of blocks into which this rank's shard is cut."""
        return ONE if self.axis is None else self.gather.x.tensor.local_shape[self.axis]

    def send(self) -> None:
        """Append the copies of the shard to all ranks.

        The first copy goes to the previous rank, the second to the rank before that rank, and so on. So each rank gets
        the shard of the next rank first, then the shard of the rank after it, and so on. The shard is also copied
        within the rank if the matmul cannot read it in place.
        """
        index, ranks, transfers = self.host.index("i"), self.team.ranks, self.transfers
        note = "to the rank that multiplies these rows next" if self.multiplied else ""
        if self.mover.sms:
            turns = Turns(index, Size(ranks), self.team.peer(Bin("-", Lit(ranks), index)))
            self.host.body += transfers.once(self.blocks)
            transfers.send(self.blocks, turns, self.mover, f"to itself, then {note or 'to its peers'}")
            return
        transfers.fork()
        self.host.body += transfers.once(self.blocks)
        if self.copies_own:
            # A copy within a GPU needs SMs, so it must come before the matmul that holds them.
            self.host.body += [SetStream(self.host.user), *self.copy_own(), SetStream(COPY_STREAM)]
        turns = Turns(index, Size(ranks - 1), self.team.peer(Bin("-", Lit(ranks - 1), index)))
        transfers.send(self.blocks, turns, self.mover, note)

    def blocks_of(self, x: Value, buffer: Value, count: Size) -> Blocks:
        """Return the blocks of this rank's shard: a single block, or one block for each index of the axis of blocks.

        `x` is the shard, `buffer` is the symmetric buffer, and `count` is the number of blocks.
        """
        views: list[ViewStatement] = []
        index: Ref | None = None
        flag: Expr = self.team.rank
        if self.axis is not None:
            index = self.host.index("s")
            flag = Bin("+", Bin("*", index, Lit(self.team.ranks)), self.team.rank)
            x, buffer = (one_of(self.host, value, self.axis, index, count, views) for value in (x, buffer))
        mine = Value(self.host.names.fresh("mine"), x.tensor, self.gather.span)
        return Blocks(x, mine, (*views, Shard(buffer, mine, span=self.gather.span)), flag, index, count)

    def copy_own(self) -> list[Statement]:
        """Return the statements that copy the local rows to this rank's buffer and signal the arrival of these rows."""
        s, signal = self.gather, self.transfers.signal(self.blocks, self.team.rank)
        mine = Value(self.host.names.fresh("mine"), self.x.tensor, s.span)
        note = "the matmul begins with these rows" if self.multiplied else ""
        put = self.transfers.put(self.x, mine, self.team.rank, note=note)
        index, count = self.blocks.index, self.blocks.count
        signals = signal if index is None else For(index.value, count, (signal,), span=s.span)
        return [Shard(self.transfers.buffer, mine, span=s.span), put, signals]

    @property
    def copies_own(self) -> bool:
        """True if the local rows are also copied to the buffer; False if the matmul reads them in place.

        The matmul reads them in place if all of these conditions hold:

        - the local rows are one block;
        - the gathered rows have only one reader, the matmul;
        - copy engines move the other rows;
        - the matmul reads no other gathered tensor, except the scales of the rows. It would wait for all blocks of
          another gathered tensor before it starts.
        """
        users = self.host.users.get(self.gather.out.name, [])
        if self.mover.sms or self.axis is not None or self.unshared is not None or len(users) != 1:
            return True
        operands = {v.name for v in users[0].values(Codec.READ)} - {self.gather.out.name, *self.scales}
        return any(isinstance(s, AllGather) and s.out.name in operands for s in self.host.program.body)

    def multiply(self, s: ByBlocks, scatter: ScatteredRows | None) -> None:
        """Append the matmul that waits for the blocks, and make the caller's stream wait for this rank's copies.

        After that, other statements may read the rows. `scatter` is the sum over ranks of the matmul's result, if any.
        """
        waits = self.waits()
        self.host.destination(s.out)
        there = {**self.host.values, s.rows.name: self.transfers.buffer}
        waiting = replace(s.rename(there), epoch=ARRIVED, **waits)
        self.host.body.append(waiting if scatter is None else scatter.raising(waiting))
        self.finish()

    def waits(self) -> dict[str, Any]:
        """Return the fields of the matmul that make it wait for the blocks."""
        source = None if self.copies_own else self.blocks.source
        note = "own rows first, each other block when it is there"
        return {"ready": self.transfers.flags, "first": self.team.rank, "own": source, "note": note}

    def wait(self) -> None:
        """Append statements that make the caller's stream wait for all blocks.

        This is for rows that a statement other than a matmul needs.
        """
        index, count = self.host.index("i"), self.blocks.count * self.team.ranks
        self.host.body.append(For(index.value, count, (self.transfers.wait(index),)))
        self.finish()

    def finish(self) -> None:
        """Append the wait of the caller's stream for this rank's copies.

        If other statements need the gathered rows, also append a copy of the rows out of the buffer.
        """
        if not self.joined_later:
            self.transfers.join()
        if self.unshared:
            note = f"copy: {self.unshared} is wanted whole"
            self.host.body.append(
                DenseCopy(out=self.unshared, x=self.transfers.buffer, span=self.gather.span, note=note)
            )


class SentColumns(SentRows):
    """Builds one allgather of the axis over which matmuls sum. Before it, each rank has some columns of all rows.

    The rows are cut into slices. Each rank sends its part of every slice to all ranks. The matmul waits for one flag
    for each slice. A worker stream sets this flag when the parts of all peers have arrived.
    """

    def __init__(self, host: Host, gather: AllGather, mover: Mover, scales: Collection[str] = ()) -> None:
        super().__init__(host, gather, replace(mover, streams=1), scales)  # the other worker stream sets the flags
        self.workers = 2

    def count(self) -> Size:
        """Return the number of slices into which the rows are cut."""
        return Size(row_slices(self.gather))

    def blocks_of(self, x: Value, buffer: Value, count: Size) -> Blocks:
        """Return the blocks that this rank sends: its part of each slice."""
        views: list[ViewStatement] = []
        index = self.host.index("s")
        mine = Value(self.host.names.fresh("mine"), x.tensor, self.gather.span)
        self.local_part = Shard(buffer, mine, span=self.gather.span)

        def slice(of: Value, name: str) -> Value:
            out = Value(self.host.names.fresh(name), of.type, self.gather.span)
            return add_view(Chunk(of, out, index, count, 0, span=self.gather.span), views)

        source, target = slice(x, "part"), slice(mine, "place")
        return Blocks(source, target, tuple(views), self.flag(index, self.team.rank), index, count)

    def flag(self, slice: Expr, rank: Expr) -> Expr:
        """Return the index of the flag that is set when a rank's part of a slice has arrived."""
        return Bin("+", Bin("*", slice, Lit(self.team.ranks)), rank)

    def copy_own(self) -> list[Statement]:
        """Return the statements that copy this rank's parts to its buffer.

        No signal is needed, because the matmul comes after this copy on the same stream.
        """
        return [self.local_part, self.transfers.put(self.x, self.local_part.out, self.team.rank)]

    @property
    def copies_own(self) -> bool:
        return True

    def waits(self) -> dict[str, Any]:
        """Return the fields of the matmul that make it wait for the slices.

        Append the statements that set the flags of the slices.
        """
        host, flags = self.host, self.transfers.row(f"{self.gather.out.name}_whole", self.blocks.count)
        index = host.index("s")
        raised = Signal(flags, index, ARRIVED, self.team.rank, self.team.over, span=self.gather.span)
        host.body += [SetStream(SIGNAL_STREAM), For(index.value, self.blocks.count, (self.arrivals(index), raised))]
        host.body.append(SetStream(host.user))
        return {"ready": flags, "note": "each slice of the rows when all parts of it are there"}

    def wait(self) -> None:
        """Append statements that make the caller's stream wait for all parts of all slices."""
        index = self.host.index("s")
        self.host.body.append(For(index.value, self.blocks.count, (self.arrivals(index),)))
        self.finish()

    def arrivals(self, slice: Ref) -> For:
        """Return the loop that waits for the peers' parts of a slice."""
        index = self.host.index("i")
        peer = self.team.peer(Bin("+", index, Lit(1)))
        return For(index.value, Size(self.team.ranks - 1), (self.transfers.wait(self.flag(slice, peer)),))
