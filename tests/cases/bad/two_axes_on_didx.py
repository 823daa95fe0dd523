# error: two axes of %a on didx
# at: 14:5
# expected: at most one axis on didx
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    mesh = hi.DeviceMesh(range(4))
    a.shard(0, mesh).shard(1, mesh)
    return fusion
