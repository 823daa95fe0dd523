# error: cannot write examples: Is a directory
lower examples/patterns.py:mlp -o examples
