"""Simulated ranks in one process, which run in any order that the memory model allows."""
