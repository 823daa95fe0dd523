# error: has no fusion
# expected: a function annotated '-> hi.Fusion'
import hostir as hi


def helper(ranks: int) -> int:
    return ranks
