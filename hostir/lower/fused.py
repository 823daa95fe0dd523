"""Passes `fused` and `push`: each rank sends its shard to all, and one matmul computes each block of rows on arrival.

The matmul waits for the rows of a gathered operand inside the kernel, as in FLUX (Chang et al., 2024) and the
all-gather matmuls of Triton-distributed (Zheng et al., 2025). The two passes differ in what moves the bytes:

- with `fused`, copy engines do, which take no SMs from the matmul;
- with `push`, a few SMs of the sending rank do, in one kernel before the matmul, which starts while this kernel still
  copies. That is faster for few rows: a kernel has written them to peers and set the flags before a copy engine would
  begin. Low-latency collectives store to peers likewise: NCCL's LL protocols, and the one-shot kernels of TensorRT-LLM
  and of torch's symmetric memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hostir.ir.comm_ops import AllGather
from hostir.ir.host_ops import Chunk, For, Select
from hostir.ir.op import Bin, Codec, Expr, Lit, Ref, Value
from hostir.ir.program import Program
from hostir.ir.sizes import ONE, Size
from hostir.ir.tensor_ops import Contraction, DenseCopy, Shard, ViewStatement
from hostir.ir.types import Axis
from hostir.lower import Pass
from hostir.lower.gathers import (
    Gathers,
    block_axes,
    first_matmul,
    long_axes,
    reads_rows,
    shard_in_pieces,
    wanted_otherwise,
)
from hostir.lower.host import Host
from hostir.lower.propagate import operands_of, result_of
from hostir.lower.transfers import ARRIVED, Blocks, Mover, Transfers

SMS = 16  # the SMs that copy in `push`: fewer do not fill the links, more leave too few to the matmul

# The passes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fused(Pass):
    """Replaces an allgather of rows by copies to all peers, and a matmul that waits for each block of rows."""

    name = "fused"
    streams: int = 4

    def run(self, program: Program) -> Program:
        return sent(program, self.name, Mover(streams=self.streams))


@dataclass(frozen=True)
class Push(Pass):
    """Replaces an allgather of rows by a kernel that copies to all ranks, and a matmul that starts while it runs."""

    name = "push"

    def run(self, program: Program) -> Program:
        return sent(program, self.name, Mover(sms=SMS))


def sent(program: Program, strategy: str, mover: Mover) -> Program:
    """Return the host program in which the mover sends each rank's shards of rows to all ranks."""
    reason = "the rows lie over several axes of the mesh, not in equal blocks with a part of every shard in each"
    gathers = Gathers.of(program, strategy).only(_in_blocks, reason).noted(strategy).with_block_axes(_needs_block_axes)
    host = Host(_matmuls_first(gathers))
    arriving: dict[str, SentRows] = {}  # by the gathered tensor: rows that the caller's stream has not waited for
    workers = 0
    for s in host.program.body:
        if isinstance(s, AllGather) and s in gathers.rows:
            arriving[s.out.name] = SentRows(host, s, mover)
            workers = max(workers, arriving[s.out.name].transfers.workers)
            continue
        needed = [arriving.pop(v.name) for v in operands_of(s) if v.name in arriving]
        if len(needed) == 1 and isinstance(s, Contraction) and reads_rows(s, needed[0].gather.out):
            needed[0].multiply(s)
            continue
        for each in needed:
            each.wait()
        host.whole(s)
    return host.finished(workers)


def _in_blocks(s: AllGather) -> bool:
    """Whether the gathered rows are equal blocks one after another, each with a part of every rank's shard."""
    outside = [block_axes(s)[0]] if _needs_block_axes(s) else [s.x.tensor.host().axes[j] for j in long_axes(s)]
    return all(len(axis.factors) == 1 for axis in outside)


def _needs_block_axes(s: AllGather) -> bool:
    return shard_in_pieces(s) or len(long_axes(s)) > 1


def _matmuls_first(gathers: Gathers) -> Program:
    """Reorder statements so that the first user of gathered rows is a matmul, which can wait block by block."""
    program = gathers.program
    for gather in gathers.rows:
        matmul, body = first_matmul(program, gather), program.body
        assert matmul
        start, end = body.index(gather) + 1, body.index(matmul)
        needed = {v.name for v in matmul.values(Codec.READ)}
        for s in reversed(body[start:end]):
            needed |= {v.name for v in operands_of(s)} if result_of(s).name in needed else set()
        before = [s for s in body[start:end] if result_of(s).name in needed]
        after = [s for s in body[start:end] if result_of(s).name not in needed]
        program = program.with_body([*body[:start], *before, matmul, *after, *body[end + 1 :]])
    return program


# One allgather --------------------------------------------------------------------------------------------------------


class SentRows:
    """Builds one allgather: the transfers of the shards to all ranks, and the matmul that waits for their blocks."""

    def __init__(self, host: Host, gather: AllGather, mover: Mover) -> None:
        self.host, self.gather, self.mover = host, gather, mover
        self.axis = next(iter(long_axes(gather)), None)  # the axis of blocks, if a rank's shard is several blocks
        self.team = host.team(gather)
        x = host.packed(host.values[gather.x.name], gather)
        # If anything but matmuls reads the rows, they are copied: the next call's transfers overwrite the buffer.
        self.whole = host.destination(gather.out) if wanted_otherwise(host.program, gather.out) else None
        name = host.names.fresh(f"{gather.out.name}_shared") if self.whole else gather.out.name
        buffer = Value(name, gather.out.tensor.host(), gather.span)
        host.values.setdefault(gather.out.name, buffer)
        count = ONE if self.axis is None else gather.x.tensor.local_shape[self.axis]
        self.transfers = Transfers(host, gather, buffer, flags=count * self.team.ranks)
        self.blocks = self.blocks_of(x, buffer, count)
        own = "the matmul begins with these rows" if self.copies_own else ""
        self.transfers.send(self.blocks, mover, own, "to the rank that multiplies these rows next")

    def blocks_of(self, x: Value, buffer: Value, count: Size) -> Blocks:
        """Return the blocks of this rank's shard: all of it as one, or one for each index of the axis of blocks."""
        views: list[ViewStatement] = []
        index: Ref | None = None
        flag: Expr = self.team.rank
        if self.axis is not None:
            index = self.host.index("s")
            flag = Bin("+", Bin("*", index, Lit(self.team.ranks)), self.team.rank)
            x, buffer = (self.one_of(value, index, count, views) for value in (x, buffer))
        mine = Value(self.host.names.fresh("mine"), x.tensor, self.gather.span)
        return Blocks(x, mine, (*views, Shard(buffer, mine, span=self.gather.span)), flag, index, count)

    def one_of(self, value: Value, index: Ref, count: Size, views: list[ViewStatement]) -> Value:
        """Return a view of one block of the rows; add its statement to `views`."""
        axes, k, span = value.tensor.axes, self.axis, self.gather.span
        assert k is not None
        name = self.host.names.fresh(f"{value.name}_{index.value.name}")
        if axes[k].marks:
            rest = Axis(tuple(replace(f, extent=f.extent / count) for f in axes[k].factors))
            out = Value(name, value.tensor.with_axes(rest if i == k else a for i, a in enumerate(axes)), value.span)
            views.append(Chunk(value, out, index, count, k, span=span))
        else:
            out = Value(name, value.tensor.with_axes(a for i, a in enumerate(axes) if i != k), value.span)
            views.append(Select(value, out, index, k, span=span))
        return out

    @property
    def copies_own(self) -> bool:
        """Whether this rank's own rows are copied to the buffer too.

        They need not be if they are one block, a single matmul reads them, and copy engines move the other rows: the
        matmul then reads them where they are. It must not read another gathered tensor, as it would wait for all of
        that before it starts.
        """
        users = self.host.users.get(self.gather.out.name, [])
        if self.mover.sms or self.axis is not None or self.whole is not None or len(users) != 1:
            return True
        operands = {v.name for v in users[0].values(Codec.READ)} - {self.gather.out.name}
        return any(isinstance(s, AllGather) and s.out.name in operands for s in self.host.program.body)

    def multiply(self, s: Contraction) -> None:
        """Add the matmul that waits for the blocks. After it all rows are there, and other statements may read them."""
        self.host.destination(s.out)
        on_buffers = s.rename(self.host.values)
        assert isinstance(on_buffers, Contraction)
        waiting = replace(
            on_buffers,
            a=self.transfers.buffer,
            ready=self.transfers.flags,
            epoch=ARRIVED,
            first=self.team.rank,
            own=None if self.copies_own else self.blocks.source,
            note="own rows first, each other block when it is there",
        )
        self.host.body.append(waiting)
        self.finish()

    def wait(self) -> None:
        """Make the caller's stream wait for all blocks: something other than a matmul needs them first."""
        index, count = self.host.index("i"), self.blocks.count * self.team.ranks
        self.host.body.append(For(index.value, count, (self.transfers.wait(index),)))
        self.finish()

    def finish(self) -> None:
        """Make the caller's stream wait for this rank's copies, and copy the rows out of the buffer if need be."""
        self.transfers.join()
        if self.whole:
            note = f"copy: {self.whole} is wanted whole"
            self.host.body.append(DenseCopy(out=self.whole, x=self.transfers.buffer, span=self.gather.span, note=note))
