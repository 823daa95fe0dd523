# error: --set S=four: not an integer
lower examples/patterns.py:mlp --set S=four
