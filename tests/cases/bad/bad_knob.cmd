# error: HOSTIR_SPEC='7'
# expected: 0, 1 or 2
# env: HOSTIR_SPEC=7
lower examples/patterns.py:mlp
