"""Fusions for the tests of choices and of the command line."""

from __future__ import annotations

import hostir as hi


def gathered_weight() -> hi.Fusion:
    """Gather a weight that is sharded by columns: no strategy overlaps it, so only `sequential` is possible."""
    with hi.Fusion("gathered_weight") as fusion:
        a, b = hi.tensor("a", [64, 32], "bf16"), hi.tensor("b", [32, 16], "bf16")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(4))
    a.set_device_mesh(mesh)
    b.shard(1, mesh)
    c.set_device_mesh(mesh)
    return fusion


def turned() -> hi.Fusion:
    """Column-parallel matmul, resharded back to rows: an allgather of rows, then an alltoall."""
    with hi.Fusion("turned") as fusion:
        x, w = hi.tensor("x", [2, 4, 8, 32], "f32"), hi.tensor("w", [32, 64], "f32")
        y = x @ w
        z = hi.reshard(y)
        fusion.output(z)
    mesh = hi.DeviceMesh(range(4))
    x.shard(1, mesh)
    w.shard(1, mesh)
    z.shard(1, mesh)
    z.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion


def scattered_rows(ranks: int, m: int, n: int, k: int, pieces: int = 1) -> hi.Program:
    """Row-parallel matmul (`k` columns on each rank): send each block of rows in pieces, and sum at the receiver."""
    flags, team, to = ranks * pieces, " ".join(map(str, range(ranks))), f"(%r + (%i + 1)) % {ranks}"
    text = f"""hostir 1
mesh @mesh [didx] = {team}
program @rs(%a: bf16[{m}, {k * ranks}@didx], %b: bf16[{k * ranks}@didx, {n}]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %c_part: bf16[{m}, {n}] partial(didx) = allocate
  %c_part_done: flag[{flags}] = allocate_symmetric
  %c_sent: bf16[{ranks}, {m}@didx, {n}] = allocate_symmetric
  %c_sent_there: flag[{flags}] = allocate_symmetric
  set_stream 0
  synchronize %user
  barrier of %c_sent over didx
  set_stream %user
  matmul %a, %b -> %c_part done %c_part_done = 1 from ((%r + 1) % {ranks}) * {pieces}
  set_stream 0
  %slot = select %c_sent[%r]
  for %i in 0..{ranks - 1} {{
    %to = chunk %c_part[{to} of {ranks}]
    for %p in 0..{pieces} {{
      %piece = chunk %to[%p of {pieces}]
      %place = chunk %slot[%p of {pieces}] axis 0
      wait_signal %c_part_done[({to}) * {pieces} + %p] >= 1
      put %piece -> %place at {to} over didx
      signal %c_sent_there[%r * {pieces} + %p] = 1 at {to} over didx
    }}
  }}
  set_stream %user
  %mine = chunk %c_part[%r of {ranks}]
  %c: bf16[{m}@didx, {n}] = allocate
  sum %c_sent axis 0 -> %c ready %c_sent_there >= 1 from %r own %mine
  synchronize 0
  free %c_part
}}
"""
    return hi.parse(text)
