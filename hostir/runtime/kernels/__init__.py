"""Triton kernels, each with a torch reference. They write into tensors that the caller owns.

Importing this package loads neither torch nor triton; its modules load what they need.
"""
