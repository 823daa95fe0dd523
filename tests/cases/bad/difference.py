# error: not a tensor: None
# at: 10:23
# expected: a tensor of this fusion
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        fusion.output(a - None)
    return fusion
