# error: %index holds indices, and is f32
# at: 11:13
# expected: indices in i32 or i64
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [16, 8], "f32")
        index = hi.tensor("index", [32], "f32")
        y = hi.permute_rows(x, index)
    return fusion
