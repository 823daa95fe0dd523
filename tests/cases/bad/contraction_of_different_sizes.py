# error: contraction of different sizes: %a has 8 in its last axis, %b has 9 in axis 0
# at: 11:13
# expected: %b with 8 in axis 0
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8])
        b = hi.tensor("b", [9, 4])
        c = hi.matmul(a, b)
    return fusion
