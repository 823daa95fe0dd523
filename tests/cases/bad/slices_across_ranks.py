# error: the pipeline cannot slice allgather: a slice of %a cuts across ranks
# at: 11:13
# hint: t.split(0, ranks), t.split(1, S)
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(4))
    a.shard(0, mesh)
    c.set_device_mesh(mesh)
    c.split(0, 2)
    c.axis(0).parallelize(hi.ParallelType.Stream)
    return fusion
