# error: --streams 2: 'auto' chooses it too
# hint: name a strategy
lower examples/patterns.py:mlp --strategy auto --streams 2
