# error: invalid choice: 'CUDA'
# hint: did you mean 'cuda'?
run examples/patterns.py:mlp --device CUDA
