# error: @mlp is for 4 ranks, and there are 2
# hint: a parameter named 'ranks'
explain examples/patterns.py:mlp --machine h200x2
