# error: the Stream part of (2@stream 8) cuts across ranks
# at: 11:13
# hint: split the axis by the mesh first
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    a.shard(0, hi.DeviceMesh(range(4)))
    c.split(0, 2)
    c.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion
