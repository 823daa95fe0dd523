# error: bad returned NoneType
# expected: a hostir.Fusion
import hostir as hi


def bad() -> hi.Fusion:
    hi.Fusion("bad")
