"""Flags in kernels: wait for flags of blocks, raise them, and copy rows to peers."""
