# error: examples/patterns.py: names no fusion behind the colon
# expected: FILE or FILE:NAME
lower examples/patterns.py:
