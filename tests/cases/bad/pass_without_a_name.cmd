# error: unknown pass ''
lower examples/patterns.py:mlp --after ''
