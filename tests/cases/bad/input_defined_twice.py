# error: %a is defined twice
# at: 10:13
# hint: give it another name
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16])
        b = hi.tensor("a", [16])
    return fusion
