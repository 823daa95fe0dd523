"""Send the scales of gathered rows in one-sided form, before the rows; for `ring`, `fused` and `push`.

Scales are few bytes. One kernel on the caller's stream sends this rank's scales to all peers before any row is sent.
So the flag or barrier that announces a row also guarantees that the scales of this row have arrived.
"""

from __future__ import annotations

from dataclasses import replace

from hostir.ir.comm_ops import AllGather
from hostir.ir.host_ops import For
from hostir.ir.op import Bin, Expr, Lit, Statement, Value
from hostir.ir.sizes import Size
from hostir.ir.view_ops import Shard, ViewStatement
from hostir.lower.host import Host
from hostir.lower.rows import long_axes
from hostir.lower.scatters import one_of
from hostir.lower.transfers import Transfers

SMS = 16  # SMs for copies in `push`, and for scales. Fewer do not fill the links; more leave too few for the matmul.


def send_scales(host: Host, gather: AllGather) -> None:
    """Append the copies of an allgather of scales. The result of the allgather is the symmetric buffer.

    No statement waits for these copies (see the module's docstring). The local scales are copied last, by a separate
    kernel. If SMs make the copies directly before a matmul, the matmul may start while these copies still run. It must
    not start while the local scales are still copied.
    """
    team, x = host.team(gather), host.packed(host.values[gather.x.name], gather)
    buffer = replace(gather.out, type=gather.out.tensor.host())
    host.values[gather.out.name] = buffer
    host.dense.add(buffer.name)
    transfers = Transfers(host, gather, buffer)
    host.body += transfers.reuse_barrier()
    axis = next(iter(long_axes(gather)), None)  # the axis of blocks, if a rank's scales are several blocks

    def each(to: Expr, sms: int, note: str) -> list[Statement]:
        """Return the statements that copy this rank's scales to the rank at position `to`.

        `sms` is the number of SMs that copy. 0 leaves the choice to the machine.
        """
        views: list[ViewStatement] = []
        source, target = x, buffer
        if axis is not None:
            index, count = host.index("s"), x.tensor.local_shape[axis]
            source, target = (one_of(host, value, axis, index, count, views) for value in (x, buffer))
        mine = Value(host.names.fresh("mine"), source.tensor, gather.span)
        copy = transfers.put(source, mine, to, note=note, sms=sms)
        statements = *views, Shard(target, mine, span=gather.span), copy
        return [*statements] if axis is None else [For(index.value, count, statements, span=gather.span)]

    turn = host.index("i")
    copies = each(team.peer(Bin("+", turn, Lit(1))), SMS, "the scales of the rows that follow")
    host.body.append(For(turn.value, Size(team.ranks - 1), tuple(copies), span=gather.span))
    host.body += each(team.rank, 0, "")
