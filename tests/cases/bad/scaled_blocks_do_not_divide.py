# error: %s: f32[64, 3] is not a scale of %a: f8e4m3[64, 200]
# at: 12:13
# expected: f32[1, 1]
# hint: block-wise scales need a multiple of 128 elements along K, and K is 200
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a, b = hi.tensor("a", [64, 200], "f8e4m3"), hi.tensor("b", [200, 128], "f8e4m3")
        s, t = hi.tensor("s", [64, 3], "f32"), hi.tensor("t", [3, 1], "f32")
        c = hi.scaled_matmul(a, b, s, t, "bf16")
        fusion.output(c)
    return fusion
