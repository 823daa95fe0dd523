# error: unknown strategy 'pipelined'
# hint: did you mean 'pipeline'?
lower examples/patterns.py:mlp --strategy pipelined
