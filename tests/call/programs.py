"""Host programs written by hand, for the tests of machines."""

from __future__ import annotations


def ag_matmul(
    mesh: str = "0 1 2 3",
    dtype: str = "f32",
    slices: int = 4,
    m: int | str = "M",
    k: int | str = "K",
    n: int | str = "N",
) -> str:
    """Slices alternate between two streams; each is gathered, then multiplied."""
    ranks = len(mesh.split())
    return f"""hostir 1
mesh @mesh [didx] = {mesh}
program @ag_matmul(%a: {dtype}[{slices}, {ranks}@didx, {m}, {k}], %b: {dtype}[{k}, {n}]) -> (%c) streams 2 {{
  %user = current_stream
  %a_full: {dtype}[{slices}, {ranks}, {m}, {k}] = allocate
  %c: {dtype}[{slices}, {ranks}, {m}, {n}] = allocate
  for %s in 0..2 {{ set_stream %s   synchronize %user }}
  for %i in 0..{slices} {{
    set_stream %i % 2
    %a_i = select %a[%i]
    %g_i = select %a_full[%i]
    %h = allgather %a_i -> %g_i over didx
    wait %h
    %c_i = select %c[%i]
    matmul %g_i, %b -> %c_i
  }}
  set_stream %user
  for %s in 0..2 {{ synchronize %s }}
  free %a_full
}}
"""


AG_MATMUL = ag_matmul()

# A row-parallel linear twice: with an all-reduce of each slice while the next is computed, and with a reduce-scatter.
ROW_PARALLEL = """hostir 1
mesh @mesh [didx] = 0 1 2 3
program @row_parallel(%a: f16[8, K@didx], %w: f16[6, K@didx], %bias: f16[6]) -> (%c, %d) streams 3 {
  %user = current_stream
  %c: f16[8, 6] = allocate
  %part: f16[8, 6] partial(didx) = allocate
  %d: f16[8@didx, 6] = allocate
  for %s in 0..3 { set_stream %s   synchronize %user }
  for %i in 0..2 {
    set_stream %i % 3
    %a_i = chunk %a[%i of 2]
    %c_i = chunk %c[%i of 2]
    %p_i = as_partial %c_i over didx
    linear %a_i, %w -> %p_i
    %h = allreduce %p_i -> %c_i over didx
    wait %h
    add %c_i, %bias -> %c_i
  }
  set_stream 2
  linear %a, %w -> %part
  %g = reduce_scatter %part -> %d over didx
  wait %g
  set_stream %user
  for %s in 0..3 { synchronize %s }
}
"""

# Every communication between two meshes, and an alltoall.
TRANSFERS = """hostir 1
mesh @left [x] = 0 1
mesh @right [x] = 2 1
program @transfers(%a: f32[4@x, K], %b: f32[4, K], %t: f32[2, 6@x]) -> (%all, %one, %same, %parts, %turned) {
  %all: f32[4, K] on @right = allocate
  %one: f32[4, K] on @right = allocate
  %same: f32[4@x, K] on @right = allocate
  %parts: f32[4@x, K] on @right = allocate
  %turned: f32[2@x, 6] = allocate
  %h1 = gather %a -> %all
  %h2 = broadcast %b -> %one
  %h3 = sendrecv %a -> %same
  %h4 = scatter %b -> %parts
  %h5 = alltoall %t -> %turned over x
  wait %h5
  wait %h4
  wait %h3
  wait %h2
  wait %h1
}
"""

# A column-parallel layer over tp, on a batch spread over dp.
GRID = """hostir 1
mesh @grid [dp, tp] = (0 1 2) (5 4 3)
program @grid(%x: bf16[6@tp, 4@dp, K], %w: bf16[K, 9@tp], %s: bf16[K]) -> (%y, %z) streams 1 {
  %user = current_stream
  %full: bf16[6, 4@dp, K] = allocate
  %y: bf16[6, 4@dp, 9@tp] = allocate
  %act: bf16[6, 4@dp, 9@tp] = allocate
  %z: bf16[4@dp, 9@tp] = allocate
  set_stream 0
  synchronize %user
  %h = allgather %x -> %full over tp
  wait %h
  mul %full, %s -> %full
  matmul %full, %w -> %y
  silu %y -> %act
  sum %act axis 0 -> %z
  set_stream %user
  synchronize 0
}
"""


def scattered(mesh: str = "0 1 2 3", dtype: str = "f32", pieces: int = 2, m: int | str = "M") -> str:
    """A matmul sends each block to its rank in pieces as they are completed; each rank sums the blocks it receives."""
    n = len(mesh.split())
    return f"""hostir 1
mesh @mesh [didx] = {mesh}
program @scattered(%a: {dtype}[{n}, {pieces}, {m}, {16 * n}@didx], %b: {dtype}[{16 * n}@didx, 24]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %part: {dtype}[{n}, {pieces}, {m}, 24] partial(didx) = allocate
  %done: flag[{n * pieces}] = allocate_symmetric
  %sent: {dtype}[{n}, {n}@didx, {pieces}, {m}, 24] = allocate_symmetric
  %there: flag[{n * pieces}] = allocate_symmetric
  set_stream 0
  synchronize %user
  barrier of %sent over didx
  set_stream %user
  matmul %a, %b -> %part done %done = 1 from ((%r + 1) % {n}) * {pieces}
  set_stream 0
  %slot = select %sent[%r]
  for %i in 0..{n - 1} {{
    %to = chunk %part[(%r + %i + 1) % {n} of {n}] axis 0
    for %p in 0..{pieces} {{
      %piece = chunk %to[%p of {pieces}] axis 1
      %place = chunk %slot[%p of {pieces}] axis 1
      wait_signal %done[((%r + %i + 1) % {n}) * {pieces} + %p] >= 1
      put %piece -> %place at (%r + %i + 1) % {n} over didx
      signal %there[%r * {pieces} + %p] = 1 at (%r + %i + 1) % {n} over didx
    }}
  }}
  set_stream %user
  %mine = chunk %part[%r of {n}] axis 0
  %c: {dtype}[{n}@didx, {pieces}, {m}, 24] = allocate
  sum %sent axis 0 -> %c ready %there >= 1 from %r own %mine
  synchronize 0
  free %part
}}
"""


def scattered_slices(mesh: str = "0 1 2 3", dtype: str = "f32", m: int | str = "M") -> str:
    """`scattered` with two slices. Each rank receives rows of both slices, so its rows have no single stride."""
    n = len(mesh.split())
    return f"""hostir 1
mesh @mesh [didx] = {mesh}
program @slices(%a: {dtype}[2, {n}, {m}, {16 * n}@didx], %b: {dtype}[{16 * n}@didx, 24]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %part: {dtype}[2, {n}, {m}, 24] partial(didx) = allocate
  %done: flag[{2 * n}] = allocate_symmetric
  %sent: {dtype}[{n}, 2, {n}@didx, {m}, 24] = allocate_symmetric
  %there: flag[{2 * n}] = allocate_symmetric
  set_stream 0
  synchronize %user
  barrier of %sent over didx
  set_stream %user
  matmul %a, %b -> %part done %done = 1 from (%r + 1) % {n}
  set_stream 0
  %slot = select %sent[%r]
  for %s in 0..2 {{
    %part_s = select %part[%s]
    %slot_s = select %slot[%s]
    for %i in 0..{n - 1} {{
      %piece = chunk %part_s[(%r + %i + 1) % {n} of {n}] axis 0
      wait_signal %done[%s * {n} + (%r + %i + 1) % {n}] >= 1
      put %piece -> %slot_s at (%r + %i + 1) % {n} over didx
      signal %there[%r * 2 + %s] = 1 at (%r + %i + 1) % {n} over didx
    }}
  }}
  set_stream %user
  %mine = chunk %part[%r of {n}] axis 1
  %c: {dtype}[2, {n}@didx, {m}, 24] = allocate
  sum %sent axis 0 -> %c ready %there >= 1 from %r own %mine
  synchronize 0
  free %part
}}
"""


def summed_everywhere(mesh: str = "0 1 2 3", dtype: str = "f32", m: int | str = "M") -> str:
    """All-reduce: every rank sums its rows in two blocks, and sends each block to all ranks once it is complete."""
    n = len(mesh.split())
    return f"""hostir 1
mesh @mesh [didx] = {mesh}
program @everywhere(%a: {dtype}[{n}, 2, {m}, {16 * n}@didx], %b: {dtype}[{16 * n}@didx, 24]) -> (%all) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %part: {dtype}[{n}, 2, {m}, 24] partial(didx) = allocate
  %c: {dtype}[{n}@didx, 2, {m}, 24] = allocate
  %sent: {dtype}[{n}, {n}@didx, 2, {m}, 24] = allocate_symmetric
  %there: flag[{2 * n}] = allocate_symmetric
  %summed: flag[2] = allocate_symmetric
  %all: {dtype}[{n}, 2, {m}, 24] = allocate_symmetric
  %came: flag[{2 * n}] = allocate_symmetric
  matmul %a, %b -> %part
  barrier of %sent over didx
  set_stream 0
  synchronize %user
  %slot = select %sent[%r]
  for %i in 0..{n - 1} {{
    %to = chunk %part[(%r + %i + 1) % {n} of {n}] axis 0
    put %to -> %slot at (%r + %i + 1) % {n} over didx
    for %p in 0..2 {{ signal %there[%r * 2 + %p] = 1 at (%r + %i + 1) % {n} over didx }}
  }}
  set_stream %user
  %mine = chunk %part[%r of {n}] axis 0
  sum %sent axis 0 -> %c ready %there >= 1 done %summed = 1 from %r own %mine
  set_stream 0
  %place = chunk %all[%r of {n}] axis 0
  for %p in 0..2 {{
    %c_p = chunk %c[%p of 2] axis 1
    %place_p = chunk %place[%p of 2] axis 1
    wait_signal %summed[%p] >= 1
    for %i in 0..{n} {{
      put %c_p -> %place_p at (%r + %i) % {n} over didx
      signal %came[%r * 2 + %p] = 1 at (%r + %i) % {n} over didx
    }}
  }}
  set_stream %user
  for %i in 0..{2 * n} {{ wait_signal %came[%i] >= 1 }}
  synchronize 0
  free %part
  free %c
}}
"""


def passed_on(mesh: str = "0 1 2 3", dtype: str = "f32", flags: int = 6, m: int = 12) -> str:
    """A matmul that starts with the local rows. Its result goes to the next rank in `flags` blocks."""
    n = len(mesh.split())
    return f"""hostir 1
mesh @mesh [didx] = {mesh}
program @passed_on(%a: {dtype}[{m * n}@didx, 32], %b: {dtype}[32, 24]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %full: {dtype}[{m * n}, 32] = allocate_symmetric
  %there: flag[{n}] = allocate_symmetric
  %h: {dtype}[{m * n}, 24] = allocate
  %done: flag[{flags}] = allocate_symmetric
  %box: {dtype}[{m * n}, 24] = allocate_symmetric
  %came: flag[{flags}] = allocate_symmetric
  %c: {dtype}[{m * n}, 24] = allocate
  set_stream 0
  synchronize %user
  barrier of %a over didx
  %slot = chunk %full[%r of {n}] axis 0
  for %i in 0..{n - 1} {{
    put %a -> %slot at (%r + %i + 1) % {n} over didx
    signal %there[%r] = 1 at (%r + %i + 1) % {n} over didx
  }}
  set_stream %user
  matmul %full, %b -> %h ready %there >= 1 done %done = 1 from %r own %a
  set_stream 0
  for %i in 0..{flags} {{
    %h_i = chunk %h[%i of {flags}] axis 0
    %box_i = chunk %box[%i of {flags}] axis 0
    wait_signal %done[%i] >= 1
    put %h_i -> %box_i at (%r + 1) % {n} over didx
    signal %came[%i] = 1 at (%r + 1) % {n} over didx
  }}
  set_stream %user
  for %i in 0..{flags} {{ wait_signal %came[%i] >= 1 }}
  relu %box -> %c
  synchronize 0
  free %h
}}
"""
