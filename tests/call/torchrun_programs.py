"""Programs for tests/call/torchrun_cases.py. By default their mesh has all ranks of the job."""

from __future__ import annotations

import os
from dataclasses import replace

from hostir.ir import parse
from hostir.ir.comm_ops import Implemented
from hostir.ir.op import Statement
from hostir.ir.program import Program, rewrite
from hostir.lower.strategies import lower
from tests.call import programs

SIZE = int(os.environ["WORLD_SIZE"])
RANKS = " ".join(map(str, range(SIZE)))
FORK = "for %s in 0..2 { set_stream %s   synchronize %user }"
JOIN = "set_stream %user\n  for %s in 0..2 { synchronize %s }"


def ag_matmul(mesh: str = RANKS, dtype: str = "bf16") -> Program:
    """Slices alternate between two streams; each is gathered, then multiplied."""
    return parse(programs.ag_matmul(mesh, dtype, k=32, n=24))


def row_parallel(dtype: str) -> Program:
    """Partial products, all-reduced in place."""
    k = 16 * SIZE
    return parse(f"""hostir 1
mesh @mesh [didx] = {RANKS}
program @row_parallel(%a: {dtype}[4, 16, {k}@didx], %b: {dtype}[{k}@didx, 24]) -> (%c) streams 2 {{
  %user = current_stream
  %c: {dtype}[4, 16, 24] = allocate
  {FORK}
  for %i in 0..4 {{
    set_stream %i % 2
    %a_i = select %a[%i]
    %c_i = select %c[%i]
    %p_i = as_partial %c_i over didx
    matmul %a_i, %b -> %p_i
    %h = allreduce %p_i -> %c_i over didx
    wait %h
  }}
  {JOIN}
}}
""")


def row_scattered(dtype: str, mesh: str = RANKS) -> Program:
    """Partial products, reduce-scattered to one buffer, and all-reduced to another buffer."""
    n, k = len(mesh.split()), 16 * len(mesh.split())
    return parse(f"""hostir 1
mesh @mesh [didx] = {mesh}
program @row_scattered(%a: {dtype}[4, {n}, 16, {k}@didx], %b: {dtype}[{k}@didx, 24]) -> (%c, %d) streams 2 {{
  %user = current_stream
  %c: {dtype}[4, {n}@didx, 16, 24] = allocate
  %d: {dtype}[4, {n}, 16, 24] = allocate
  %p: {dtype}[4, {n}, 16, 24] partial(didx) = allocate
  {FORK}
  for %i in 0..4 {{
    set_stream %i % 2
    %a_i = select %a[%i]
    %c_i = select %c[%i]
    %d_i = select %d[%i]
    %p_i = select %p[%i]
    matmul %a_i, %b -> %p_i
    %h = reduce_scatter %p_i -> %c_i over didx
    %g = allreduce %p_i -> %d_i over didx
    wait %g
    wait %h
  }}
  {JOIN}
  free %p
}}
""")


def residual_norm(dtype: str, columns: int, *, scattered: bool, fp8: bool) -> Program:
    """A sum by `low_latency`, a residual, an RMS norm and perhaps a quantization, which one kernel may carry out."""
    k, M = 16 * SIZE, "M@didx" if scattered else "M"
    rows = f"{dtype}[{M}, {columns}]"
    quantized = f"""  %s: f32[{M}, 1] = row_scales %n to f8e4m3
  %q: f8e4m3[{M}, {columns}] = quantize %n by %s to f8e4m3
"""
    fusion = parse(f"""hostir 1
mesh @mesh [didx] = {RANKS}
fusion @residual_norm(
  %a: {dtype}[M, {k}@didx], %b: {dtype}[{k}@didx, {columns}], %r: {rows}, %w: {dtype}[{columns}]
) -> ({"%q, %s, %t" if fp8 else "%n, %t"}) {{
  %y: {rows} = matmul %a, %b
  %t: {rows} = add %y, %r
  %n: {rows} = rms_norm %t eps 1e-06 times %w
{quantized if fp8 else ""}}}
""")
    return lower(fusion, "sequential by low_latency")


def implemented(program: Program, by: str) -> Program:
    """Return the program with the implementation `by` of every collective that has it."""

    def change(s: Statement) -> tuple[Statement, ...]:
        return (replace(s, by=by),) if isinstance(s, Implemented) and by in s.implementations else (s,)

    changed = program.with_body(rewrite(program.body, change))
    assert changed != program
    return changed


def swap(mesh: str = RANKS) -> Program:
    n = len(mesh.split())
    return parse(f"""hostir 1
mesh @mesh [didx] = {mesh}
program @swap(%x: f16[{n}, {2 * n}@didx, 4]) -> (%y) {{
  %y: f16[{n}@didx, {2 * n}, 4] = allocate
  %h = alltoall %x -> %y over didx
  wait %h
}}
""")


GRID = """hostir 1
mesh @grid [dp, tp] = (0 1) (2 3)
program @grid(%a: f32[16@dp, 32@tp], %b: f32[32@tp, 24]) -> (%c, %d) streams 1 {
  %user = current_stream
  %d: f32[16@dp, 24] = allocate
  %c: f32[16, 24] = allocate
  %p = as_partial %d over tp
  matmul %a, %b -> %p
  %h = allreduce %p -> %d over tp
  set_stream 0
  wait %h
  %g = allgather %d -> %c over dp
  set_stream %user
  wait %g
  synchronize 0
}
"""

TRANSFERS = """hostir 1
mesh @left [x] = 0 1
mesh @right [y] = 2 3
mesh @all [z] = 3 0 2 1
program @transfers(%whole: bf16[8, 4], %parts: bf16[8@x, 4]) -> (%b, %g, %s, %r, %t, %u) {
  %b: bf16[8, 4] on @right = allocate
  %g: bf16[8, 4] on @all = allocate
  %s: bf16[8@z, 4] on @all = allocate
  %r: bf16[8@y, 4] on @right = allocate
  %t: bf16[8, 4] on @all = allocate
  %u: bf16[8@x, 4] = allocate
  %h0 = broadcast %whole -> %b
  %h1 = gather %parts -> %g
  %h2 = scatter %whole -> %s
  %h3 = sendrecv %parts -> %r
  wait %h0
  %h4 = broadcast %b -> %t
  %h5 = sendrecv %parts -> %u
  wait %h5
  wait %h3
  wait %h4
  wait %h2
  wait %h1
}
"""

GATHERED = f"""hostir 1
mesh @mesh [didx] = {RANKS}
program @gathered(%x: f32[{2 * SIZE}@didx, 2]) -> (%all) {{
  %r = rank of %x over didx
  %all: f32[{2 * SIZE}, 2] = allocate_symmetric
  %mine = chunk %all[%r of {SIZE}]
  barrier of %x over didx
  for %i in 0..{SIZE} {{ put %x -> %mine at %i over didx }}
  barrier of %x over didx
}}
"""


def ring(mesh: str = RANKS) -> Program:
    """Each part goes round the ring. A step sends what the step before received; the messages order the steps."""
    n = len(mesh.split())
    steps = [f"%p{s} = select %parts[{s}]" for s in range(n)]
    steps += [
        f"%h{s} = exchange %p{s} to (%r + 1) % {n}, %p{s + 1} from (%r + {n - 1}) % {n} over didx" for s in range(n - 1)
    ]
    steps += [f"wait %h{s}" for s in range(n - 1)]
    body = "\n  ".join(["%r = rank of %x over didx", *steps[:1], "copy %x -> %p0", *steps[1:]])
    return parse(f"""hostir 1
mesh @mesh [didx] = {mesh}
program @ring(%x: bf16[{n}@didx, M]) -> (%parts) {{
  %parts: bf16[{n}, {n}@didx, M] = allocate
  {body}
}}
""")


def late_message(mesh: str = RANKS) -> Program:
    """Rank 0 posts a receive, then all ranks gather, then rank 1 sends. The last rank exchanges with itself."""
    n = len(mesh.split())
    return parse(f"""hostir 1
mesh @mesh [didx] = {mesh}
program @late_message(%x: f32[{n}@didx, 8]) -> (%t, %g) streams 1 {{
  %user = current_stream
  %r = rank of %x over didx
  %g: f32[{n}, 8] = allocate
  %t: f32[{n}@didx, 8] = allocate
  if %r == {n - 1} {{
    %h = exchange %x to %r, %t from %r over didx
    wait %h
  }}
  if %r / {n - 1} == 0 {{ copy %x -> %t }}
  if %r == 0 {{
    set_stream 0
    synchronize %user
    %h = recv %t from 1 over didx
    wait %h
    set_stream %user
  }}
  %all = allgather %x -> %g over didx
  wait %all
  if %r == 1 {{
    %h = send %x to 0 over didx
    wait %h
  }}
  synchronize 0
}}
""")


def pulled(mesh: str = RANKS, dtype: str = "bf16") -> Program:
    """Each slice's rows are copied to every rank, and one matmul takes the blocks as they arrive.

    Each slice has its own part of the buffer. A barrier keeps calls apart, and the flags' epochs keep slices apart.
    """
    n = len(mesh.split())
    return parse(f"""hostir 1
mesh @mesh [didx] = {mesh}
program @pulled(%a: {dtype}[3, {n}@didx, M, 32], %b: {dtype}[32, 24]) -> (%c) streams 1 {{
  %user = current_stream
  %r = rank of %a over didx
  %c: {dtype}[3, {n}, M, 24] = allocate
  %full: {dtype}[3, {n}, M, 32] = allocate_symmetric
  %ready: flag[{n}] = allocate_symmetric
  barrier of %a over didx
  set_stream 0
  synchronize %user
  for %i in 0..3 {{
    %a_i = select %a[%i]
    %full_i = select %full[%i]
    %mine = chunk %full_i[%r of {n}]
    for %p in 0..{n - 1} {{
      put %a_i -> %mine at (%r + %p + 1) % {n} over didx
      signal %ready[%r] = %i + 1 at (%r + %p + 1) % {n} over didx
    }}
  }}
  set_stream %user
  for %i in 0..3 {{
    %a_i = select %a[%i]
    %full_i = select %full[%i]
    %mine = chunk %full_i[%r of {n}]
    put %a_i -> %mine at %r over didx
    signal %ready[%r] = %i + 1 at %r over didx
    %c_i = select %c[%i]
    matmul %full_i, %b -> %c_i ready %ready >= %i + 1 from %r
  }}
  synchronize 0
}}
""")


def met(before: str, shape: str = "[2]") -> Program:
    """The last rank copies to rank 0 and signals it, after the statements `before`."""
    return parse(f"""hostir 1
mesh @mesh [didx] = {RANKS}
program @met(%x: f32[{2 * SIZE}@didx]) -> (%y) {{
  %r = rank of %x over didx
  %box: f32{shape} = allocate_symmetric
  %there: flag[1] = allocate_symmetric
  %y: f32[{2 * SIZE}@didx] = allocate
  {before}
  if %r == {SIZE - 1} {{
    put %x -> %box at 0 over didx
    signal %there[0] = 1 at 0 over didx
  }}
  relu %x -> %y
  if %r == 0 {{
    wait_signal %there[0] >= 1
    copy %box -> %y
  }}
}}
""")
