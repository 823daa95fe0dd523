# error: %s: f32[64, 3] is not a scale of %x: bf16[64, 200]
# at: 10:16
# expected: f32[1, 1], f32[64, 1]
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [64, 200], "bf16")
        q, _ = hi.quantize(x, scale=hi.tensor("s", [64, 3], "f32"))
        fusion.output(q)
    return fusion
