"""Executes programs with one process and one CUDA device per rank."""
