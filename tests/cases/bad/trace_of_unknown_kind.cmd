# error: --trace out.txt
# expected: .json
run examples/patterns.py:mlp --trace out.txt
