"""Flags within kernels: waiting for blocks of rows, raising them, and storing to peers."""
