"""Ranks as processes with a CUDA device each."""
