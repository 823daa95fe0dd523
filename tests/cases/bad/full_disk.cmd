# error: cannot write /dev/full: No space left on device
lower examples/patterns.py:mlp -o /dev/full
