# error: %a is bf16
# at: 12:13
# expected: operands in f8e4m3 or f8e5m2
# hint: hi.quantize makes fp8 tensors
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a, b = hi.tensor("a", [64, 256], "bf16"), hi.tensor("b", [256, 128], "f8e4m3")
        s, t = hi.tensor("s", [64, 1], "f32"), hi.tensor("t", [1, 128], "f32")
        c = hi.scaled_matmul(a, b, s, t, "bf16")
        fusion.output(c)
    return fusion
