# error: a size must be at least 1, not 0
# at: 8:13
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8 // 9], "f32")
    return fusion
