"""The machine on which each rank has one GPU. It uses streams, flags in memory, CUDA graphs, and NCCL."""

FEW = 4  # driver calls that are not worth a graph: on an H100, a replay begins about 3 us later
