# error: mixed dtypes: %a is f32, %b is bf16
# at: 11:13
# hint: hi.cast(b, 'f32')
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8], "f32")
        b = hi.tensor("b", [8, 4])
        c = a @ b
    return fusion
