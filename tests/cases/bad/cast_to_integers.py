# error: cast cannot round to 'i32'
# at: 10:13
# expected: one of: f64, f32, f16, bf16
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.cast(a, "i32")
    return fusion
