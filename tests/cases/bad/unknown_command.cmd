# error: invalid choice: 'compile'
compile examples/patterns.py:mlp
