# error: no mesh can be made of [[[0, 1]], [2]]
# at: 10:16
# expected: devices in a line or in rows of equal length
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        fusion.output(hi.relu(a := hi.tensor("a", [16, 8], "f32")))
    a.shard(0, hi.DeviceMesh([[[0, 1]], [2]], names=("z", "y", "x")))
    return fusion
