# error: simulated ranks run on the CPU
# hint: torchrun
run examples/patterns.py:mlp --device cuda
