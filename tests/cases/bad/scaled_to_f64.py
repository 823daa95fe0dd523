# error: a product of fp8 matrices is not 'f64'
# at: 11:13
# expected: one of: bf16, f16, f32
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a, b = hi.tensor("a", [64, 256], "f8e4m3"), hi.tensor("b", [256, 128], "f8e4m3")
        s, t = hi.tensor("s", [64, 1], "f32"), hi.tensor("t", [1, 128], "f32")
        c = hi.scaled_matmul(a, b, s, t, "f64")
        fusion.output(c)
    return fusion
