# error: %b has 3 axes
# at: 11:13
# expected: a right side with 2 axes
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8])
        b = hi.tensor("b", [2, 8, 4])
        c = a @ b
    return fusion
