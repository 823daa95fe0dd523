# error: streams must be at least 1, not 0
lower examples/patterns.py:mlp --streams 0
