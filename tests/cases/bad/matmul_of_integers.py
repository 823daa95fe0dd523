# error: matmul cannot compute with %a, which is i64
# at: 11:13
# expected: operands in f64, f32, f16 or bf16
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "i64")
        b = hi.tensor("b", [8, 4], "i64")
        c = a @ b
    return fusion
