# error: the name of the output is empty
lower examples/patterns.py:mlp -o ''
