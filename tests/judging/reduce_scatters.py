"""One-sided host programs of a matmul and a reduce-scatter, for any number of ranks."""

from __future__ import annotations

HEAD = """hostir 1
mesh @mesh [didx] = {mesh}
"""

IN_PIECES = """program @in_pieces(%a: f32[{rows}, {k}@didx], %b: f32[{k}@didx, 3]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %part: f32[{rows}, 3] partial(didx) = allocate
  %part_done: flag[{flags}] = allocate_symmetric
  %sent: f32[{ranks}, {rows}@didx, 3] = allocate_symmetric
  %sent_there: flag[{flags}] = allocate_symmetric
  set_stream 0
  synchronize %user
  barrier of %sent over didx
  set_stream %user
  matmul %a, %b -> %part done %part_done = 1 from ((%r + 1) % {ranks}) * {pieces}
  set_stream 0
  %slot = select %sent[%r]
  for %i in 0..{others} {{
    %to = chunk %part[(%r + %i + 1) % {ranks} of {ranks}]
    for %p in 0..{pieces} {{
      %piece = chunk %to[%p of {pieces}]
      %place = chunk %slot[%p of {pieces}] axis 0
      wait_signal %part_done[(((%r + %i + 1) % {ranks}) * {pieces}) + %p] >= 1
      put %piece -> %place at (%r + %i + 1) % {ranks} over didx
      signal %sent_there[(%r * {pieces}) + %p] = 1 at (%r + %i + 1) % {ranks} over didx
    }}
  }}
  set_stream %user
  %mine = chunk %part[%r of {ranks}]
  %c: f32[{rows}@didx, 3] = allocate
  sum %sent axis 0 -> %c ready %sent_there >= 1 from %r own %mine
  synchronize 0
  free %part
}}
"""

IN_SLICES = """program @in_slices(%a: f32[{pieces}, {ranks}, 2, {k}@didx], %b: f32[{k}@didx, 3]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %part: f32[{pieces}, {ranks}, 2, 3] partial(didx) = allocate
  %part_done: flag[{flags}] = allocate_symmetric
  %sent: f32[{ranks}, {pieces}, {ranks}@didx, 2, 3] = allocate_symmetric
  %sent_there: flag[{flags}] = allocate_symmetric
  set_stream 0
  synchronize %user
  barrier of %sent over didx
  set_stream %user
  matmul %a, %b -> %part done %part_done = 1 from (%r + 1) % {ranks}
  set_stream 0
  for %s in 0..{pieces} {{
    %slice = select %part[%s]
    %slot = select %sent[%r]
    %place = select %slot[%s]
    for %i in 0..{others} {{
      %piece = chunk %slice[(%r + %i + 1) % {ranks} of {ranks}]
      wait_signal %part_done[(%s * {ranks}) + ((%r + %i + 1) % {ranks})] >= 1
      put %piece -> %place at (%r + %i + 1) % {ranks} over didx
      signal %sent_there[(%r * {pieces}) + %s] = 1 at (%r + %i + 1) % {ranks} over didx
    }}
  }}
  set_stream %user
  %mine = chunk %part[%r of {ranks}] axis 1
  %c: f32[{pieces}, {ranks}@didx, 2, 3] = allocate
  sum %sent axis 0 -> %c ready %sent_there >= 1 from %r own %mine
  synchronize 0
  free %part
}}
"""

FORMS = (IN_PIECES, IN_SLICES)


def reduce_scatter(form: str, ranks: int, pieces: int = 2) -> str:
    """Return the text of a matmul with a reduce-scatter by copies; each rank's block of rows is sent in pieces."""
    sizes = {"ranks": ranks, "others": ranks - 1, "pieces": pieces, "flags": ranks * pieces, "k": 2 * ranks}
    mesh = " ".join(map(str, range(ranks)))
    return (HEAD + form).format(mesh=mesh, rows=ranks * pieces, **sizes)
