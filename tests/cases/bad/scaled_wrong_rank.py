# error: %s: f32[64] is not a scale of %a: f8e4m3[64, 256]
# at: 11:13
# expected: f32[1, 1] (tensor-wise) or f32[64, 1] (row-wise) or f32[64, 2] (block-wise)
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a, b = hi.tensor("a", [64, 256], "f8e4m3"), hi.tensor("b", [256, 128], "f8e4m3")
        s, t = hi.tensor("s", [64], "f32"), hi.tensor("t", [1, 128], "f32")
        c = hi.scaled_matmul(a, b, s, t, "bf16")
        fusion.output(c)
    return fusion
