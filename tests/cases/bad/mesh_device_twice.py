# error: the mesh names a device twice
# at: 12:12
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh([0, 1, 0])
    return fusion
