"""Unroll a program to the flat program of one rank; find the order of its operations and the lifetimes of its buffers.

Nothing here needs torch.
"""
