# error: matmul cannot compute with %a, which is f8e4m3
# at: 11:23
# expected: operands in f64, f32, f16 or bf16
# hint: scaled_matmul multiplies fp8 with its scales
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a, b = hi.tensor("a", [64, 256], "f8e4m3"), hi.tensor("b", [256, 128], "f8e4m3")
        fusion.output(a @ b)
    return fusion
