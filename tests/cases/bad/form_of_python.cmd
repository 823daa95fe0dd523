# error: --from nvfuser says how to read a text, and patterns.py is Python
# hint: leave it out
lower examples/patterns.py:mlp --from nvfuser
