# error: the mesh has 1 axes, not 2
# at: 12:12
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(4), names=("dp", "tp"))
    return fusion
