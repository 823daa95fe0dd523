# error: unknown size name 'Q'
# at: 10:23
# expected: one of: M
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        x = hi.tensor("x", ["M", 8], "f32")
        fusion.output(hi.reshape(x, ["Q", "M/Q", 8]))
    return fusion
