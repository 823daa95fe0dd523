# error: %a has 128 elements, which 3 does not divide
# at: 9:23
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        fusion.output(hi.reshape(a, [-1, 3]))
    return fusion
