# error: argument --all: not allowed with argument --after
# hint: --help
lower examples/patterns.py:mlp --after communicate --all
