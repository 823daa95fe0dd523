# error: no mesh can be made of [[0, 1], [2]]
# at: 12:16
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    a.shard(0, hi.DeviceMesh([[0, 1], [2]]))
    return fusion
