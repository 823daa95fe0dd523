"""Kernels in Triton, each with a reference in torch. They write into tensors that the caller owns.

Importing this package loads neither torch nor triton; its modules load what they need.
"""
