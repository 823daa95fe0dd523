# error: --machine names another machine, and --device a device of this machine
explain examples/patterns.py:mlp --machine h200x4 --device cpu
