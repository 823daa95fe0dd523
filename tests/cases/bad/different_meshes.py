# error: operands of matmul lie on different meshes: %a on @mesh [didx] = 0 1, %b on @mesh_1 [didx] = 2 3
# at: 11:13
# hint: hi.reshard
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4], "f32")
        c = a @ b
        fusion.output(c)
    a.set_device_mesh(hi.DeviceMesh([0, 1]))
    b.set_device_mesh(hi.DeviceMesh([2, 3]))
    return fusion
