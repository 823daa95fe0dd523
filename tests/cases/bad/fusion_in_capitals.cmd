# error: examples/patterns.py has no fusion 'MLP'
# hint: did you mean 'mlp'?
lower examples/patterns.py:MLP
