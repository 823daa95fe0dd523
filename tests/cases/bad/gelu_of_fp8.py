# error: gelu cannot compute with %quantized, which is f8e4m3
# at: 11:16
# expected: operands in f64, f32, f16 or bf16
# hint: cast converts it to a wider dtype
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [64, 200], "bf16")
        q, _ = hi.gelu(hi.quantize(x)[0]), x
        fusion.output(q)
    return fusion
