# error: %quantized is f8e4m3[64, 200]
# at: 10:16
# expected: rows in f64, f32, f16 or bf16
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [64, 200], "bf16")
        q, _ = hi.quantize(hi.quantize(x)[0])
        fusion.output(q)
    return fusion
