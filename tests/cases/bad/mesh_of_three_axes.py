# error: a mesh has one or two axes, not more
# at: 11:12
# expected: range(8), or [[0, 1], [2, 3]]
import hostir as hi


def bad(ranks: int = 8) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        fusion.output(hi.relu(a))
    mesh = hi.DeviceMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    a.shard(0, mesh)
    return fusion
