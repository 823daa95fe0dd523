# error: the parameter 'S' of bad has no default
# hint: --set S=
import hostir as hi


def bad(S: int) -> hi.Fusion:
    return hi.Fusion(f"f{S}")
