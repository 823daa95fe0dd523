# error: not a tensor of fusion @bad
# at: 10:9
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        with hi.Fusion("other"):
            x = hi.relu(hi.tensor("x", [4]))
        fusion.output(x)
    return fusion
