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
    """Every slice is gathered and multiplied on its own stream."""
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

# Both layers of a row-parallel linear, the sum of each slice reduced while the next is computed.
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
