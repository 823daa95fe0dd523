"""Check only rank 0 of a program if all ranks do the same, so that the check represents all ranks."""
