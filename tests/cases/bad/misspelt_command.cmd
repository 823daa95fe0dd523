# error: invalid choice: 'lowr'
# hint: did you mean 'lower'?
lowr examples/patterns.py:mlp
