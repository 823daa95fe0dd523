# error: unrecognized arguments: --strem 4
lower examples/patterns.py:mlp --strem 4
