"""The machine of one GPU a rank: streams, flags in memory, CUDA graphs, NCCL."""
