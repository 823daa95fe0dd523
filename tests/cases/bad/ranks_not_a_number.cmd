# error: argument --ranks: invalid int value: 'all'
run examples/patterns.py:mlp --ranks all
