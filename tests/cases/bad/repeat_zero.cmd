# error: --repeat 0
# expected: at least 1
run examples/patterns.py:mlp --repeat 0
