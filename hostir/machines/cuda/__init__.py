"""The machine on which each rank has one GPU: streams, flags in memory, CUDA graphs, NCCL."""
