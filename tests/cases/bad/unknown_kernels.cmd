# error: kernels='cutlass'
# expected: auto, triton or aten
run examples/patterns.py:mlp --kernels cutlass
