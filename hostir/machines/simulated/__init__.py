"""Ranks that are simulated in one process. Their operations run in any order that the program allows."""
