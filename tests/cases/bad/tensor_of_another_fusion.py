# error: %x belongs to fusion @other, not to @bad
# at: 11:13
# hint: declare it as an input here
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        with hi.Fusion("other"):
            x = hi.tensor("x", [4])
        y = hi.relu(x)
    return fusion
