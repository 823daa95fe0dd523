# error: unknown strategy 'PIPELINE'
# hint: did you mean 'pipeline'?
lower examples/patterns.py:mlp --strategy PIPELINE
