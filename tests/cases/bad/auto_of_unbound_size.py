# run: lower --strategy auto --set M=64
# error: the fastest strategy depends on the size 'K' of @symbolic, which is not bound
# expected: K, M
# hint: --set K=...
import hostir as hi

with hi.Fusion("symbolic") as fusion:
    a, b = hi.tensor("a", ["M", "K"], "f32"), hi.tensor("b", ["K", 8], "f32")
    c = a @ b
    fusion.output(c)
mesh = hi.DeviceMesh(range(2))
a.shard(0, mesh)
c.set_device_mesh(mesh)
