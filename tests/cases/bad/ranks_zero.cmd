# error: --ranks 0
# expected: at least 1
run examples/patterns.py:mlp --ranks 0
