# error: unknown dtype 'float32'
# at: 9:13
# expected: one of: f64, f32, f16, bf16
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "float32")
    return fusion
