# error: %a has no axis 2
# at: 11:13
# expected: an axis below 2
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = hi.sum(a, 2)
    return fusion
