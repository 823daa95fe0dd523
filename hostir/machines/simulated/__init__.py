"""Ranks simulated in one process, in any order that the program allows."""
