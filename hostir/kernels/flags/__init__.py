"""Kernels and parts of kernels that wait for flags of blocks, raise such flags, or copy rows to peers."""
