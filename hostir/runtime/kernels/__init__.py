"""What computes: Triton kernels, each with a torch reference beside it. They write into tensors that the caller owns.

Importing this package loads neither torch nor triton; its modules load what they need.
"""
