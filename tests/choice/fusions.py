"""Fusions for the tests of choices, which the command line can be given as well."""

from __future__ import annotations

import hostir as hi


def weight_gathered_whole() -> hi.Fusion:
    """What is gathered is a right side, of which no part gives a part of the result: only one way is left."""
    with hi.Fusion("weight_gathered_whole") as fusion:
        a, b = hi.tensor("a", [64, 32], "bf16"), hi.tensor("b", [32, 16], "bf16")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(4))
    a.set_device_mesh(mesh)
    b.shard(1, mesh)
    c.set_device_mesh(mesh)
    return fusion
