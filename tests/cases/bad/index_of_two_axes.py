# error: %index is i32[16, 2], and %x is f32[16, 8]
# at: 11:13
# expected: an index [S]
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [16, 8], "f32")
        index = hi.tensor("index", [16, 2], "i32")
        y = hi.permute_rows(x, index)
    return fusion
