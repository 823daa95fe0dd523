# error: the mesh has no axis 'date'
# at: 14:5
# hint: did you mean 'data'?
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh([[0, 1], [2, 3]], names=("data", "model"))
    a.shard(0, mesh, "date")
    return fusion
