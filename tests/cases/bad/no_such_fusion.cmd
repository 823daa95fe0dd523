# error: examples/patterns.py has no fusion 'mpl'
# hint: did you mean 'mlp'?
lower examples/patterns.py:mpl
