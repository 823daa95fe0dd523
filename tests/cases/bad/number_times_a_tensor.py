# error: a tensor meets the number inf
# at: 10:23
# expected: a finite number
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        fusion.output(float("inf") * a)
    return fusion
