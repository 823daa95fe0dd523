"""Simulated ranks: all of them in one process, in any order that the memory model allows."""
