# error: no mesh can be made of 8
# at: 13:16
# expected: range(8)
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    a.shard(0, hi.DeviceMesh(8))
    return fusion
