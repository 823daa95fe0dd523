"""Check only rank 0 of a program. This is enough if all ranks do the same."""
