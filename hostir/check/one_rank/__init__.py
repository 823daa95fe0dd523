"""Check rank 0 in place of all ranks, where all ranks do the same."""
