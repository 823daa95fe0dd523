# error: calling bad: ModuleNotFoundError: No module named 'no_such_module_of_mine'
# at: 7
import hostir as hi


def bad() -> hi.Fusion:
    import no_such_module_of_mine

    return no_such_module_of_mine.fusion()
