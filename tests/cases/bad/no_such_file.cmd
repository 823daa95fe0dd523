# error: no such file: examples/pattern.py
# hint: did you mean 'patterns.py'?
lower examples/pattern.py
