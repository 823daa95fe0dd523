# error: %s is a row-wise scale of %a, and %t is f32[1, 1]
# at: 12:13
# expected: f32[1, 128]
# hint: both scales are tensor-wise, both row-wise, or both block-wise
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a, b = hi.tensor("a", [64, 256], "f8e4m3"), hi.tensor("b", [256, 128], "f8e4m3")
        s, t = hi.tensor("s", [64, 1], "f32"), hi.tensor("t", [1, 1], "f32")
        c = hi.scaled_matmul(a, b, s, t, "bf16")
        fusion.output(c)
    return fusion
