# error: has several fusions
# expected: NAME with one of: one, two
import hostir as hi


def one() -> hi.Fusion:
    return hi.Fusion("one")


def two() -> hi.Fusion:
    return hi.Fusion("two")
