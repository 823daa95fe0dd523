# error: a fusion divides by numbers only
# at: 10:23
# hint: multiply with an input that holds the inverse
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        fusion.output(2 / a)
    return fusion
