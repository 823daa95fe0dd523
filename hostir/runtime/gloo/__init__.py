"""Ranks as CPU processes, connected by gloo."""
