"""Kernels in Triton, each with a reference in torch. They write into tensors that the caller owns.

Importing this package loads neither torch nor Triton; each module loads what it needs.
"""
