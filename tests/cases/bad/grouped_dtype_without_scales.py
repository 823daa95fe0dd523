# error: a product without scales has the dtype of its operands
# at: 12:13
# hint: hi.cast converts the result
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [16, 8], "f16")
        w = hi.tensor("w", [4, 8, 16], "f16")
        offsets = hi.tensor("offsets", [5], "i32")
        y = hi.grouped_matmul(x, w, offsets, dtype="f32")
    return fusion
