# error: @mlp has no parameter or size 'MM'
# expected: one of: ranks, S, M, K, H, dtype
lower examples/patterns.py:mlp --set MM=4
