# error: it sums over the Stream axis of %a
# at: 11:13
# hint: put Stream on an axis that the result keeps
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    b.shard(0, hi.DeviceMesh(range(4)))
    a.axis(1).parallelize(hi.ParallelType.Stream)
    return fusion
