# error: @mlp is for 4 ranks, and there are 2
# hint: take a machine with as many
explain examples/patterns.py:mlp --machine h200x2
