"""Unroll a program to the flat program of one rank. Find the order of its operations and the lifetimes of its buffers.

No module of this package needs torch.
"""
