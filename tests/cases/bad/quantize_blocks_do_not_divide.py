# error: blocks of 128 elements do not divide the rows of %x, of 200
# at: 10:16
# expected: a last axis that 128 divides
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [64, 200], "bf16")
        q, _ = hi.quantize(x, scales="blocks")
        fusion.output(q)
    return fusion
