# error: (0, 0) is not an order of the 2 axes of %a
# at: 11:13
# expected: each of (0, 1) once
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = hi.permute(a, (0, 0))
    return fusion
