# error: unknown scales 'columns'
# at: 10:16
# expected: one of: tensor, rows, blocks
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", [64, 200], "bf16")
        q, _ = hi.quantize(x, scales="columns")
        fusion.output(q)
    return fusion
