# error: shapes do not align: %a is f32[16, 8], %b is f32[8, 4]
# at: 11:13
# expected: equal sizes from the last axis on
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a + b
    return fusion
