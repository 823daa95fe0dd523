# error: kernels='cutlass'
# expected: auto, triton, cublas or aten
run examples/patterns.py:mlp --kernels cutlass
