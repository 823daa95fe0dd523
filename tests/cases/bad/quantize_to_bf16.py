# error: 'bf16' is not an fp8 dtype
# at: 10:16
# expected: one of: f8e4m3, f8e5m2
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [64, 200], "bf16")
        q, _ = hi.quantize(x, "bf16")
        fusion.output(q)
    return fusion
