# error: scale_w is missing
# at: 12:13
# expected: both scales, or none
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x, scale_x = hi.tensor("x", [16, 8], "f8e4m3"), hi.tensor("scale_x", [16, 1], "f32")
        w = hi.tensor("w", [4, 8, 16], "f8e4m3")
        offsets = hi.tensor("offsets", [5], "i32")
        y = hi.grouped_matmul(x, w, offsets, scale_x)
    return fusion
