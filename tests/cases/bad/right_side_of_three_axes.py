# error: batches of matrices do not match: %a is bf16[16, 8], %b is bf16[2, 8, 4]
# at: 11:13
# expected: [..., M, K] and [..., K, N] with equal leading axes
import hostir as hi


def bad(ranks: int = 4) -> hi.Fusion:
    with hi.Fusion("bad") as fusion:
        a = hi.tensor("a", [16, 8])
        b = hi.tensor("b", [2, 8, 4])
        c = a @ b
    return fusion
