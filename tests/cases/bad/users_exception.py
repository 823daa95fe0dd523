# error: calling bad: ZeroDivisionError: integer division or modulo by zero
# at: 7
import hostir as hi


def bad(ranks: int = 0) -> hi.Fusion:
    size = 16 // ranks
    return hi.Fusion(f"f{size}")
