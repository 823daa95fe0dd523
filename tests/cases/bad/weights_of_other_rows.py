# error: the weights %weights are bf16[8, 2]
# at: 12:13
# expected: f16[16, 2] or f32[16, 2]
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        y = hi.tensor("y", [32, 8], "f16")
        index = hi.tensor("index", [16, 2], "i32")
        weights = hi.tensor("weights", [8, 2], "bf16")
        x = hi.combine_rows(y, index, weights)
    return fusion
