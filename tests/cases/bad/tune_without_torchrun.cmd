# error: 'hostir tune' measures real ranks, and this process is the only one
# hint: torchrun --nproc-per-node 8 -m hostir tune examples/patterns.py:mlp
tune examples/patterns.py:mlp
