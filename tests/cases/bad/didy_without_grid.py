# error: DIDy needs a mesh of two or more axes
# at: 12:5
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    a.shard(0, hi.DeviceMesh(range(4)), hi.ParallelType.DIDy)
    return fusion
