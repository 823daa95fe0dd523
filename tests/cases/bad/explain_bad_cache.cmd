# error: HOSTIR_CACHE='README.md'
# expected: a directory
# env: HOSTIR_CACHE=README.md
explain examples/patterns.py:mlp --device cpu
