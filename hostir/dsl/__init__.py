"""The language in which users write fusions: sharded tensors on a device mesh, and computations on them.

    with hi.Fusion("ag_matmul") as fusion:
        a = hi.tensor("a", [4, 8, 128, 1024], "bf16")
        b = hi.tensor("b", [1024, 512], "bf16")
        c = hi.matmul(a, b)
        fusion.output(c)
    mesh = hi.DeviceMesh(range(8))
    for t in (a, b, c):
        t.set_device_mesh(mesh)
    a.axis(1).parallelize(hi.ParallelType.DIDx)
    c.axis(0).parallelize(hi.ParallelType.Stream)

If a tensor has a mesh, its axes declare its sharding. The sharding of all other tensors is inferred from the inputs.
A result has the name of the variable that it is assigned to. Errors point at the user's line.
"""

from hostir.dsl.functions import (
    add,
    cast,
    combine_rows,
    gelu,
    grouped_matmul,
    grouped_outer,
    linear,
    matmul,
    mul,
    permute,
    permute_rows,
    quantize,
    relu,
    reshape,
    reshard,
    rms_norm,
    scaled_matmul,
    silu,
    sum,
    tensor,
)
from hostir.dsl.fusion import Fusion
from hostir.dsl.mesh import DeviceMesh, ParallelType
from hostir.dsl.tensors import Tensor

__all__ = [
    "DeviceMesh",
    "Fusion",
    "ParallelType",
    "Tensor",
    "add",
    "cast",
    "combine_rows",
    "gelu",
    "grouped_matmul",
    "grouped_outer",
    "linear",
    "matmul",
    "mul",
    "permute",
    "permute_rows",
    "quantize",
    "relu",
    "reshape",
    "reshard",
    "rms_norm",
    "scaled_matmul",
    "silu",
    "sum",
    "tensor",
]
