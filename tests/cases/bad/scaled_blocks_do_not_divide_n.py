# error: %b has 112 columns, and a block-wise scale covers 128 columns
# at: 11:13
# expected: a multiple of 128 columns
import hostir as hi


def bad() -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a, b = hi.tensor("a", [64, 256], "f8e4m3"), hi.tensor("b", [256, 112], "f8e4m3")
        s, t = hi.tensor("s", [64, 2], "f32"), hi.tensor("t", [2, 1], "f32")
        c = hi.scaled_matmul(a, b, s, t, "bf16")
        fusion.output(c)
    return fusion
