"""Ranks as CPU processes, which gloo connects."""
