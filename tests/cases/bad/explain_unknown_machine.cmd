# error: unknown machine 'h201x8'
# hint: did you mean 'h200'?
explain examples/patterns.py:mlp --machine h201x8
