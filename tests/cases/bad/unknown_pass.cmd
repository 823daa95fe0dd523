# error: unknown pass 'reshards'
# expected: one of: propagate, reshard
# hint: did you mean 'reshard'?
lower examples/patterns.py:mlp --after reshards
