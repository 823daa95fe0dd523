# error: not a tensor: 2
# at: 10:23
# hint: a number enters as an input
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        fusion.output(2 * a)
    return fusion
