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
    """A is sharded on M, and gathered slice by slice before the matmul: nvFuser's pull request 3606."""
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
    """`allgather_matmul` on plain [M, K]. Each rank has contiguous rows, so a slice of C is copied to its place."""
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
    """The gathered A is an output too, as a backward pass needs it."""
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
    """One gathered A for two weights that are sharded on N: the first half of a gated MLP."""
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
    """A is sharded on M. The result is gathered slice by slice after the matmul."""
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
    """The input is sharded on the sequence, weight and result on N. Each slice has the bias and the activation."""
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
    """A and B are sharded on K. The partial sums are reduced over all ranks slice by slice."""
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
    """`row_parallel` with a result that is sharded on M: each slice is reduce-scattered."""
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
    """`row_parallel` with an activation, and with a bias that is added once, after the reduction."""
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
    """A and C are sharded on M. Every rank computes its own rows, and there is no communication to hide."""
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
    """A fully sharded weight (on N) is gathered. A and C stay sharded on M. The slices run over N."""
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
    """A fully sharded weight (on K) is gathered. A and C are replicated."""
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
    """Column parallel, gelu, row parallel, in one loop. Input and output are sharded on the sequence."""
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
    """`mlp` with replicated ends, as in inference: all ranks have all of x and of the residual."""
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


def attention_output(
    ranks: int = 4, S: int = 4, M: int = 256, K: int = 64, N: int = 48, dtype: str = "f32"
) -> hi.Fusion:
    """The output projection of attention in inference: the sum over heads is added to the residual and normed.

    Heads are sharded. All ranks have the whole residual stream, before and after, and its norm.
    """
    with hi.Fusion("attention_output") as fusion:
        heads, w = hi.tensor("heads", [M, K], dtype), hi.tensor("w", [K, N], dtype)
        x, scale = hi.tensor("x", [M, N], dtype), hi.tensor("scale", [N], dtype)
        y = heads @ w + x
        z = hi.rms_norm(y, scale, 1e-5)
        fusion.output(y)
        fusion.output(z)
    mesh = hi.DeviceMesh(range(ranks))
    heads.shard(1, mesh)
    w.shard(0, mesh)
    for t in (x, y, z):
        t.set_device_mesh(mesh)
    z.split(0, S)
    z.axis(0).parallelize(Stream)
    return fusion


def mlp_2d(
    ranks: int = 4, S: int = 2, M: int = 256, K: int = 64, H: int = 128, dtype: str = "f32", dp: int = 2
) -> hi.Fusion:
    """`mlp` on a mesh of data x tensor parallel: the batch is sharded over `dp`, the weights over `tp`."""
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


def mlp_3d(ranks: int = 8, S: int = 2, M: int = 256, K: int = 64, H: int = 128, dtype: str = "f32") -> hi.Fusion:
    """`mlp` on a mesh of data x context x tensor parallel: batch and sequence are sharded over `dp` and `cp`."""
    dp = 2 if ranks % 2 == 0 else 1
    cp = 2 if ranks % 4 == 0 else 1
    tp = ranks // (dp * cp)
    with hi.Fusion("mlp_3d") as fusion:
        x = hi.tensor("x", [dp, S, cp, tp, f"{M}/{S * ranks}", K], dtype)
        w1, w2 = hi.tensor("w1", [K, H], dtype), hi.tensor("w2", [H, K], dtype)
        y = hi.gelu(x @ w1) @ w2
        fusion.output(y)
    lines = [range(i * tp, (i + 1) * tp) for i in range(dp * cp)]
    mesh = hi.DeviceMesh([lines[i * cp : (i + 1) * cp] for i in range(dp)], names=("dp", "cp", "tp"))
    for t in (x, y):
        t.shard(0, mesh, "dp").shard(2, mesh, "cp").shard(3, mesh, "tp")
    w1.shard(1, mesh, "tp")
    w2.shard(0, mesh, "tp")
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
    """Reshard a tensor from one mesh of devices to another. `on` has the sharded axes before and after."""
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
    """Gather all parts on the first device."""
    return _reshard("gather", ranks, M, N, dtype, tuple(range(ranks)), (0,), (0, None))


def scatter(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Scatter parts from the first device."""
    return _reshard("scatter", ranks, M, N, dtype, (0,), tuple(range(ranks)), (None, 0))


def broadcast(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Broadcast the whole tensor from the first device."""
    return _reshard("broadcast", ranks, M, N, dtype, (0,), tuple(range(ranks)), (None, None))


def alltoall(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Reshard from rows to columns."""
    return _reshard("alltoall", ranks, M, N, dtype, tuple(range(ranks)), tuple(range(ranks)), (0, 1))


def sendrecv(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Send each part from one half of the devices to the other."""
    half = max(ranks // 2, 1)
    return _reshard("sendrecv", ranks, M, N, dtype, tuple(range(half)), tuple(range(ranks - half, ranks)), (0, 0))


def reduce_scatter(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Sum up a term of each rank, sharded on the rows: the collective alone."""
    with hi.Fusion("reduce_scatter") as fusion:
        x = hi.tensor("x", [M, N], dtype)
        y = hi.reshard(x)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.partial(mesh)
    y.shard(0, mesh)
    return fusion


def all_reduce(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Sum up a term of each rank, on all ranks: the collective alone."""
    with hi.Fusion("all_reduce") as fusion:
        x = hi.tensor("x", [M, N], dtype)
        y = hi.reshard(x)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.partial(mesh)
    y.set_device_mesh(mesh)
    return fusion


def all_gather(ranks: int = 4, M: int = 64, N: int = 48, dtype: str = "f32") -> hi.Fusion:
    """Gather the rows of all ranks on each rank: the collective alone."""
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
    mlp_3d,
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


NORMED = (attention_output,)  # nvFuser's form has no statement for it


def batched_mlp(ranks: int = 4, S: int = 4, M: int = 64, K: int = 64, H: int = 128, dtype: str = "f32") -> hi.Fusion:
    """`mlp` of S experts with M rows each, and weights for each expert: one expert is one slice of the pipeline."""
    with hi.Fusion("batched_mlp") as fusion:
        x = hi.tensor("x", [S, M, K], dtype)
        w1 = hi.tensor("w1", [S, K, H], dtype)
        w2 = hi.tensor("w2", [S, H, K], dtype)
        y = hi.silu(x @ w1) @ w2
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    w1.shard(2, mesh)
    w2.shard(1, mesh)
    y.shard(1, mesh)
    y.axis(0).parallelize(Stream)
    return fusion


def expert_mlp(
    ranks: int = 4, S: int = 4, M: int = 64, K: int = 64, H: int = 128, dtype: str = "f32", experts: int = 8
) -> hi.Fusion:
    """Tensor-parallel experts: each rank has a slice of every expert, and rows that are sorted by expert.

    Each rank has S parts of M rows, sorted by expert, and the offsets of their groups. All ranks gather the rows and
    the offsets, part by part. Partial sums of rows are scattered back to the ranks that the rows came from.
    """
    with hi.Fusion("expert_mlp") as fusion:
        x = hi.tensor("x", [S, ranks, M, K], dtype)
        offsets = hi.tensor("offsets", [S, ranks, experts + 1], "i32")
        gate, up = hi.tensor("gate", [experts, K, H], dtype), hi.tensor("up", [experts, K, H], dtype)
        down = hi.tensor("down", [experts, H, K], dtype)
        h = hi.silu(hi.grouped_matmul(x, gate, offsets)) * hi.grouped_matmul(x, up, offsets)
        y = hi.grouped_matmul(h, down, offsets)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(1, mesh)
    offsets.shard(1, mesh)
    gate.shard(2, mesh)
    up.shard(2, mesh)
    down.shard(1, mesh)
    y.shard(1, mesh)
    y.axis(0).parallelize(Stream)
    return fusion


def moe_layer(
    ranks: int = 4, S: int = 2, M: int = 32, K: int = 64, H: int = 128, dtype: str = "f32", experts: int = 8, k: int = 2
) -> hi.Fusion:
    """A layer of tensor-parallel experts after the router, in which k experts compute each token.

    Each rank has S parts of M tokens. All ranks gather the tokens and what the router says about them: `order` has the
    token of each row, sorted by expert; `offsets` has the groups of rows; `back` has the rows of each token. The ranks
    combine their partial sums before they scatter them, so that they send one row for each token.
    """
    with hi.Fusion("moe_layer") as fusion:
        x = hi.tensor("x", [S, ranks, M, K], dtype)
        order = hi.tensor("order", [S, ranks, f"{k}*{M}"], "i32")
        offsets = hi.tensor("offsets", [S, ranks, experts + 1], "i32")
        back, weights = hi.tensor("back", [S, ranks, M, k], "i32"), hi.tensor("weights", [S, ranks, M, k], dtype)
        gate, up = hi.tensor("gate", [experts, K, H], dtype), hi.tensor("up", [experts, K, H], dtype)
        down = hi.tensor("down", [experts, H, K], dtype)
        rows = hi.permute_rows(x, order)
        h = hi.silu(hi.grouped_matmul(rows, gate, offsets)) * hi.grouped_matmul(rows, up, offsets)
        y = hi.combine_rows(hi.grouped_matmul(h, down, offsets), back, weights)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    for t in (x, order, offsets, back, weights, y):
        t.shard(1, mesh)
    gate.shard(2, mesh)
    up.shard(2, mesh)
    down.shard(1, mesh)
    rows.set_device_mesh(mesh)  # so that tokens are gathered: they are fewer than rows
    y.axis(0).parallelize(Stream)
    return fusion


def moe_layer_fp8(
    ranks: int = 4, S: int = 2, M: int = 32, K: int = 64, H: int = 128, dtype: str = "f32", experts: int = 8, k: int = 2
) -> hi.Fusion:
    """`moe_layer` with tokens in fp8, which are gathered with their scales. `gate` and `up` are fp8, too."""
    with hi.Fusion("moe_layer_fp8") as fusion:
        x, scale_x = hi.tensor("x", [S, ranks, M, K], "f8e4m3"), hi.tensor("scale_x", [S, ranks, M, 1], "f32")
        order = hi.tensor("order", [S, ranks, f"{k}*{M}"], "i32")
        offsets = hi.tensor("offsets", [S, ranks, experts + 1], "i32")
        back, weights = hi.tensor("back", [S, ranks, M, k], "i32"), hi.tensor("weights", [S, ranks, M, k], dtype)
        gate, up = hi.tensor("gate", [experts, K, H], "f8e4m3"), hi.tensor("up", [experts, K, H], "f8e4m3")
        scale_gate, scale_up = (hi.tensor(f"scale_{name}", [experts, 1, H], "f32") for name in ("gate", "up"))
        down = hi.tensor("down", [experts, H, K], dtype)
        rows, scales = hi.permute_rows(x, order), hi.permute_rows(scale_x, order)
        g = hi.grouped_matmul(rows, gate, offsets, scales, scale_gate, dtype)
        u = hi.grouped_matmul(rows, up, offsets, scales, scale_up, dtype)
        y = hi.combine_rows(hi.grouped_matmul(hi.silu(g) * u, down, offsets), back, weights)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    for t in (x, scale_x, order, offsets, back, weights, y):
        t.shard(1, mesh)
    for t in (gate, up, scale_gate, scale_up):
        t.shard(2, mesh)
    down.shard(1, mesh)
    for t in (rows, scales):
        t.set_device_mesh(mesh)
    y.axis(0).parallelize(Stream)
    return fusion


EXPERTS = (batched_mlp, expert_mlp, moe_layer, moe_layer_fp8)  # mixture of experts


def _scale_shapes(scales: str, rows: list[int], K: int, N: int) -> tuple[list[int], list[int]]:
    """Return the shapes of both sides' scales: one for the `tensor`, for `rows` and columns, or for `blocks`."""
    return {
        "tensor": ([1] * (len(rows) + 1), [1, 1]),
        "rows": ([*rows, 1], [1, N]),
        "blocks": ([*rows, K // 128], [K // 128, N // 128]),
    }[scales]


def scaled_allgather_matmul(
    ranks: int = 4,
    M: int = 48,
    K: int = 256,
    N: int = 128,
    dtype: str = "bf16",
    scales: str = "rows",
    fast: bool = False,
) -> hi.Fusion:
    """Rows of fp8 are gathered with their scales, and multiplied."""
    of_a, of_b = _scale_shapes(scales, [M], K, N)
    with hi.Fusion("scaled_allgather_matmul") as fusion:
        a, b = hi.tensor("a", [M, K], "f8e4m3"), hi.tensor("b", [K, N], "f8e4m3")
        scale_a, scale_b = hi.tensor("scale_a", of_a, "f32"), hi.tensor("scale_b", of_b, "f32")
        c = hi.scaled_matmul(a, b, scale_a, scale_b, dtype, fast=fast)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(0, mesh)
    if scales != "tensor":
        scale_a.shard(0, mesh)
    c.set_device_mesh(mesh)
    return fusion


def quantized_rows(
    ranks: int = 4, M: int = 48, K: int = 256, N: int = 128, dtype: str = "bf16", scales: str = "rows"
) -> hi.Fusion:
    """Each rank quantizes its rows. fp8 and scales are gathered instead of bf16. The weight is sharded on N."""
    with hi.Fusion("quantized_rows") as fusion:
        x, b = hi.tensor("x", [M, K], "bf16"), hi.tensor("b", [K, N * ranks], "f8e4m3")
        scale_b = hi.tensor("scale_b", _scale_shapes(scales, [M], K, N * ranks)[1], "f32")
        bias = hi.tensor("bias", [N * ranks], dtype)
        a, scale_a = hi.quantize(x, "f8e4m3", scales)
        y = hi.gelu(hi.scaled_matmul(a, b, scale_a, scale_b, dtype, bias, fast=True))
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    x.shard(0, mesh)
    b.shard(1, mesh)
    y.shard(1, mesh)
    return fusion


def scaled_row_parallel(
    ranks: int = 4,
    M: int = 48,
    K: int = 128,
    N: int = 128,
    dtype: str = "bf16",
    scales: str = "rows",
    fast: bool = False,
    bias: bool = True,
) -> hi.Fusion:
    """K is sharded. Each rank has quantized its part of K, with its own scales. Partial sums are scattered."""
    of_a, of_b = _scale_shapes(scales, [M], K * ranks, N)
    if scales != "blocks":  # a scale for each rank's part of K
        of_a, of_b = [*of_a[:-1], ranks], [ranks, *of_b[1:]]
    with hi.Fusion("scaled_row_parallel") as fusion:
        a, b = hi.tensor("a", [M, K * ranks], "f8e4m3"), hi.tensor("b", [K * ranks, N], "f8e4m3")
        scale_a, scale_b = hi.tensor("scale_a", of_a, "f32"), hi.tensor("scale_b", of_b, "f32")
        added = hi.tensor("bias", [N], dtype) if bias else None
        y = hi.scaled_matmul(a, b, scale_a, scale_b, dtype, added, fast)
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    for t, axis in ((a, 1), (scale_a, 1), (b, 0), (scale_b, 0), (y, 0)):
        t.shard(axis, mesh)
    return fusion


def scaled_batch_gathered(
    ranks: int = 4,
    M: int = 24,
    K: int = 256,
    N: int = 128,
    dtype: str = "bf16",
    scales: str = "rows",
    axis: int = 1,
    batch: int = 2,
    fast: bool = False,
) -> hi.Fusion:
    """`[batch, M, K]` or `[M, batch, K]`. M is gathered, and flattened in the matmul. The weight is sharded on N."""
    sizes = [batch, M] if axis else [M, batch]
    of_a, of_b = _scale_shapes(scales, sizes, K, N * ranks)
    with hi.Fusion("scaled_batch_gathered") as fusion:
        a, b = hi.tensor("a", [*sizes, K], "f8e4m3"), hi.tensor("b", [K, N * ranks], "f8e4m3")
        scale_a, scale_b = hi.tensor("scale_a", of_a, "f32"), hi.tensor("scale_b", of_b, "f32")
        rows, rows_scale = hi.reshape(a, [-1, K]), hi.reshape(scale_a, [-1, of_a[-1]])
        y = hi.reshape(hi.scaled_matmul(rows, b, rows_scale, scale_b, dtype, fast=fast), [*sizes, N * ranks])
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(axis, mesh)
    if scales != "tensor":
        scale_a.shard(axis, mesh)
    b.shard(1, mesh)
    y.shard(2, mesh)
    return fusion


def scaled_batch_scattered(
    ranks: int = 4,
    M: int = 24,
    K: int = 128,
    N: int = 128,
    dtype: str = "bf16",
    scales: str = "rows",
    axis: int = 1,
    batch: int = 2,
    fast: bool = False,
) -> hi.Fusion:
    """`[batch, M, K]` or `[M, batch, K]`, flattened in the matmul. K is sharded. The sum is scattered on M."""
    sizes = [batch, M] if axis else [M, batch]
    of_a, of_b = _scale_shapes(scales, sizes, K * ranks, N)
    with hi.Fusion("scaled_batch_scattered") as fusion:
        a, b = hi.tensor("a", [*sizes, K * ranks], "f8e4m3"), hi.tensor("b", [K * ranks, N], "f8e4m3")
        scale_a, scale_b = hi.tensor("scale_a", of_a, "f32"), hi.tensor("scale_b", of_b, "f32")
        rows, rows_scale = hi.reshape(a, [-1, K * ranks]), hi.reshape(scale_a, [-1, of_a[-1]])
        y = hi.reshape(hi.scaled_matmul(rows, b, rows_scale, scale_b, dtype, fast=fast), [*sizes, N])
        fusion.output(y)
    mesh = hi.DeviceMesh(range(ranks))
    a.shard(2, mesh)
    b.shard(0, mesh)
    y.shard(axis, mesh)
    return fusion


SCALED = (  # fp8: other dtypes and sizes than the patterns above
    scaled_allgather_matmul,
    quantized_rows,
    scaled_row_parallel,
    scaled_batch_gathered,
    scaled_batch_scattered,
)


def main() -> None:
    """Print a line for each pattern: its streams and communications."""
    for pattern in (*PATTERNS, *NORMED, *EXPERTS, *SCALED):
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
