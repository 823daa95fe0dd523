# error: %w is f32[4, 8, 16], and %offsets has the offsets of 3 groups
# at: 12:13
# expected: a matrix for each group: [3, K, N]
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [16, 8], "f32")
        w = hi.tensor("w", [4, 8, 16], "f32")
        offsets = hi.tensor("offsets", [4], "i32")
        y = hi.grouped_matmul(x, w, offsets)
    return fusion
