# error: the mesh's 3 ranks do not divide an axis of 16 in %a
# at: 15:5
# expected: a multiple of 3
# hint: change the mesh
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(3))
    a.shard(0, mesh)
    return fusion
