# error: %a lies on tp, which the mesh does not have
# at: 13:5
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    a.shard(0, hi.DeviceMesh(range(2), names=["tp"]))
    a.set_device_mesh(hi.DeviceMesh(range(2)))
    return fusion
