# error: %a has no mesh yet
# at: 13:5
# hint: a.set_device_mesh(mesh) first
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    a.axis(0).parallelize(hi.ParallelType.DIDx)
    return fusion
