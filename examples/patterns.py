"""Every pattern that the compiler knows, one small fusion each.

    hostir lower examples/patterns.py:row_parallel            print one
    hostir run examples/patterns.py:row_parallel --compare    run it on simulated ranks
    torchrun --nproc-per-node 4 -m hostir run examples/patterns.py:row_parallel --compare

`S` is the number of slices of the pipeline. Shapes follow real layouts: activations `[M, K]`, weights `[K, N]`.
"""

from __future__ import annotations

import hostir as hi

DIDx, DIDy, Stream = hi.ParallelType.DIDx, hi.ParallelType.DIDy, hi.ParallelType.Stream


def allgather_matmul(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """A sharded on M, gathered slice by slice before the matmul: nvFuser's pull request 3606."""
    with hi.Fusion("allgather_matmul") as fusion:
        a = hi.tensor("a", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        c = hi.matmul(a, b)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    for t in (a, b, c):
        t.set_device_mesh(mesh)
    a.axis(1).parallelize(DIDx)
    c.axis(0).parallelize(Stream)
    return fusion


def allgather_matmul_rows(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """The same on plain [M, K], contiguous rows a rank: a slice of C is not contiguous, and is copied to its place."""
    with hi.Fusion("allgather_matmul_rows") as fusion:
        a = hi.tensor("a", [M, K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    c.split(0, ranks)
    c.split(1, S)
    c.axis(1).parallelize(Stream)
    return fusion


def allgather_matmul_kept(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """The same, and the gathered A is a result too, as a backward pass wants it."""
    with hi.Fusion("allgather_matmul_kept") as fusion:
        a = hi.tensor("a", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        a_full = hi.reshard(a)
        c = a_full @ b
        fusion.output(c)
        fusion.output(a_full)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(1, mesh)
    a_full.set_device_mesh(mesh)
    c.set_device_mesh(mesh)
    c.axis(0).parallelize(Stream)
    return fusion


def gate_up(ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 64, dtype: str = "f32") -> hi.Fusion:
    """One gathered A for two weights sharded on N: the first half of a gated MLP."""
    with hi.Fusion("gate_up") as fusion:
        x = hi.tensor("x", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        gate = hi.tensor("gate", [K, N], dtype)
        up = hi.tensor("up", [K, N], dtype)
        y = hi.silu(x @ gate) * (x @ up)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    gate.shard(1, mesh)
    up.shard(1, mesh)
    y.shard(3, mesh)
    y.axis(0).parallelize(Stream)
    return fusion


def matmul_allgather(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """A sharded on M, the result gathered slice by slice after the matmul."""
    with hi.Fusion("matmul_allgather") as fusion:
        a = hi.tensor("a", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        part = a @ b
        c = hi.reshard(part)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(1, mesh)
    c.set_device_mesh(mesh)
    c.axis(0).parallelize(Stream)
    return fusion


def column_parallel(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 64, dtype: str = "f32"
) -> hi.Fusion:
    """Sequence-sharded input, weight and result sharded on N, with bias and activation in the slice."""
    with hi.Fusion("column_parallel") as fusion:
        x = hi.tensor("x", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        w = hi.tensor("w", [N, K], dtype)
        bias = hi.tensor("bias", [N], dtype)
        y = hi.linear(x, w, bias)
        z = hi.gelu(y)
        fusion.output(z)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    w.shard(0, mesh)
    bias.shard(0, mesh)
    z.shard(3, mesh)
    z.axis(0).parallelize(Stream)
    return fusion


def row_parallel(ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """A and B sharded on K: partial sums, reduced over all ranks slice by slice."""
    with hi.Fusion("row_parallel") as fusion:
        a = hi.tensor("a", [M, K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(1, mesh)
    b.shard(0, mesh)
    c.set_device_mesh(mesh)
    c.split(0, S)
    c.axis(0).parallelize(Stream)
    return fusion


def row_parallel_scattered(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """The same to a result sharded on M: each slice is reduce-scattered."""
    with hi.Fusion("row_parallel_scattered") as fusion:
        a = hi.tensor("a", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(3, mesh)
    b.shard(0, mesh)
    c.shard(1, mesh)
    c.axis(0).parallelize(Stream)
    return fusion


def row_parallel_bias(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """Row parallel with a bias, which is added once, after the reduction, and an activation."""
    with hi.Fusion("row_parallel_bias") as fusion:
        x = hi.tensor("x", [M, K], dtype)
        w = hi.tensor("w", [N, K], dtype)
        bias = hi.tensor("bias", [N], dtype)
        y = hi.linear(x, w, bias)
        z = hi.silu(y)
        fusion.output(z)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    w.shard(1, mesh)
    z.set_device_mesh(mesh)
    z.split(0, S)
    z.axis(0).parallelize(Stream)
    return fusion


def no_communication(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """A and C sharded on M: every rank works on its own rows, and the pipeline has nothing to hide."""
    with hi.Fusion("no_communication") as fusion:
        a = hi.tensor("a", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(1, mesh)
    c.shard(1, mesh)
    c.axis(0).parallelize(Stream)
    return fusion


def weight_gathered(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 64, dtype: str = "f32"
) -> hi.Fusion:
    """A fully sharded weight (on N) is gathered; A and C stay sharded on M. The slices run over N."""
    with hi.Fusion("weight_gathered") as fusion:
        a = hi.tensor("a", [M, K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(0, mesh)
    b.shard(1, mesh)
    c.shard(0, mesh)
    c.split(1, ranks)
    c.split(2, S)
    c.axis(2).parallelize(Stream)
    return fusion


def weight_gathered_k(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """A fully sharded weight (on K) is gathered; A and C are replicated."""
    with hi.Fusion("weight_gathered_k") as fusion:
        a = hi.tensor("a", [M, K], dtype)
        b = hi.tensor("b", [K, N], dtype)
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.set_device_mesh(mesh)
    b.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


def mlp(ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, H: int = 128, dtype: str = "f32") -> hi.Fusion:
    """Two layers: column parallel, gelu, row parallel, with sequence-sharded ends; one loop runs all of it."""
    with hi.Fusion("mlp") as fusion:
        x = hi.tensor("x", [S, ranks, f"{M}/{S * ranks}", K], dtype)
        w1 = hi.tensor("w1", [K, H], dtype)
        w2 = hi.tensor("w2", [H, K], dtype)
        h = x @ w1
        g = hi.gelu(h)
        y = g @ w2
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    w1.shard(1, mesh)
    w2.shard(0, mesh)
    y.shard(1, mesh)
    y.axis(0).parallelize(Stream)
    return fusion


def mlp_replicated(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, H: int = 128, dtype: str = "f32"
) -> hi.Fusion:
    """The same with replicated ends, as inference runs it: all ranks have all of x, and of what is added to it."""
    with hi.Fusion("mlp_replicated") as fusion:
        x = hi.tensor("x", [M, K], dtype)
        w1 = hi.tensor("w1", [K, H], dtype)
        w2 = hi.tensor("w2", [H, K], dtype)
        y = hi.gelu(x @ w1) @ w2 + x
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.set_device_mesh(mesh)
    w1.shard(1, mesh)
    w2.shard(0, mesh)
    y.set_device_mesh(mesh)
    y.split(0, S)
    y.axis(0).parallelize(Stream)
    return fusion


def mlp_2d(
    ranks: int = 4, S: int = 2, M: int = 256, K: int = 64, H: int = 128, dtype: str = "f32", dp: int = 2
) -> hi.Fusion:
    """The same on a mesh of data x tensor parallel: the batch lies over `dp`, the weights over `tp`."""
    dp = dp if ranks % dp == 0 else 1
    tp = ranks // dp
    with hi.Fusion("mlp_2d") as fusion:
        x = hi.tensor("x", [dp, S, tp, f"{M}/{S * ranks}", K], dtype)
        w1 = hi.tensor("w1", [K, H], dtype)
        w2 = hi.tensor("w2", [H, K], dtype)
        h = x @ w1
        g = hi.gelu(h)
        y = g @ w2
        fusion.output(y)
    mesh = hi.DeviceMesh([range(i * tp, (i + 1) * tp) for i in range(dp)], names=("dp", "tp"))
    x.shard(0, mesh, "dp").shard(2, mesh, "tp")
    w1.shard(1, mesh, "tp")
    w2.shard(0, mesh, "tp")
    y.shard(0, mesh, "dp").shard(2, mesh, "tp")
    y.axis(1).parallelize(Stream)
    return fusion


def _reshard(
    name: str,
    ranks: int,
    M: int,
    N: int,
    dtype: str,
    source: tuple[int, ...],
    target: tuple[int, ...],
    on: tuple[int | None, int | None],
) -> hi.Fusion:
    """A tensor on one mesh of devices, resharded to another; `on` says which axis is sharded before and after."""
    with hi.Fusion(name) as fusion:
        x = hi.tensor("x", [M, N], dtype)
        y = hi.reshard(x)
        fusion.output(y)
    for t, devices, axis in ((x, source, on[0]), (y, target, on[1])):
        mesh = hi.DeviceMesh(devices)
        t.set_device_mesh(mesh)
        if axis is not None:
            t.shard(axis, mesh)
    return fusion


def gather(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """All parts to the first device."""
    return _reshard("gather", ranks, M, N, dtype, tuple(range(ranks)), (0,), (0, None))


def scatter(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """From the first device, a part to each."""
    return _reshard("scatter", ranks, M, N, dtype, (0,), tuple(range(ranks)), (None, 0))


def broadcast(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """From the first device, all of it to each."""
    return _reshard("broadcast", ranks, M, N, dtype, (0,), tuple(range(ranks)), (None, None))


def alltoall(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """From sharded on the rows to sharded on the columns."""
    return _reshard("alltoall", ranks, M, N, dtype, tuple(range(ranks)), tuple(range(ranks)), (0, 1))


def sendrecv(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """From one half of the devices to the other, part by part."""
    half = max(ranks // 2, 1)
    return _reshard("sendrecv", ranks, M, N, dtype, tuple(range(half)), tuple(range(ranks - half, ranks)), (0, 0))


def reduce_scatter(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Partial sums, one on each rank, to the sum sharded on the rows: the collective alone."""
    with hi.Fusion("reduce_scatter") as fusion:
        x = hi.tensor("x", [M, N], dtype)
        y = hi.reshard(x)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.partial(mesh)
    y.shard(0, mesh)
    return fusion


def all_reduce(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Partial sums, one on each rank, to the sum on all: the collective alone."""
    with hi.Fusion("all_reduce") as fusion:
        x = hi.tensor("x", [M, N], dtype)
        y = hi.reshard(x)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.partial(mesh)
    y.set_device_mesh(mesh)
    return fusion


def all_gather(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Rows sharded over the ranks, to all rows on each: the collective alone."""
    devices = tuple(range(ranks))
    return _reshard("all_gather", ranks, M, N, dtype, devices, devices, (0, None))


PATTERNS = (
    allgather_matmul,
    allgather_matmul_rows,
    allgather_matmul_kept,
    matmul_allgather,
    column_parallel,
    gate_up,
    row_parallel,
    row_parallel_scattered,
    row_parallel_bias,
    no_communication,
    weight_gathered,
    weight_gathered_k,
    mlp,
    mlp_2d,
    mlp_replicated,
    gather,
    scatter,
    broadcast,
    alltoall,
    sendrecv,
    reduce_scatter,
    all_reduce,
    all_gather,
)


def main() -> None:
    """Prints what each pattern lowers to, in one line."""
    for pattern in PATTERNS:
        program = hi.lower(pattern())
        words = [s.keyword() for s in program.walk()]
        moves = [
            w
            for w in words
            if w
            in ("allgather", "allreduce", "reduce_scatter", "alltoall", "gather", "scatter", "broadcast", "sendrecv")
        ]
        print(f"{pattern.__name__:24} streams {program.streams}   {', '.join(moves) or 'nothing moves'}")


if __name__ == "__main__":
    main()
