# error: two axes of %c on stream
# at: 15:5
# expected: at most one axis on stream
# hint: a loop slices one axis
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    c.axis(0).parallelize(hi.ParallelType.Stream)
    c.axis(1).parallelize(hi.ParallelType.Stream)
    return fusion
