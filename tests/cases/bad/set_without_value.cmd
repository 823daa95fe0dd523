# error: --set S
# expected: NAME=VALUE
lower examples/patterns.py:mlp --set S
