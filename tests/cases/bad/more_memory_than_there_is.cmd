# error: @ag_matmul takes 704.3 TiB on 8 simulated ranks: 80.0 TiB a rank, and 64.0 TiB for whole inputs
# expected: what is free here
# hint: choose smaller sizes
run examples/ag_matmul.py --set M=33554432 --set K=1048576
