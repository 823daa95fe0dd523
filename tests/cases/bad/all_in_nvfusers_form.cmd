# error: --all begins with the fusion
# hint: leave one of them out
lower examples/patterns.py:mlp --all --format nvfuser
