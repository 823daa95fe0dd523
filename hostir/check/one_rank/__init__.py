"""Check only rank 0 of a program, if all ranks do the same so that rank 0 represents them."""
