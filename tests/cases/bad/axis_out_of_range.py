# error: %a has no axis 2
# at: 13:5
# expected: an axis from 0 to 1
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    a.axis(2).parallelize(hi.ParallelType.Stream)
    return fusion
