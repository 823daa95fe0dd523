# error: argument --calls: invalid choice
explain examples/patterns.py:mlp --calls often
