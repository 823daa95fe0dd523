# error: --machine names another machine, and --device this one's
explain examples/patterns.py:mlp --machine h200x4 --device cpu
