"""The machine on which each rank has one GPU. It uses streams, flags in memory, CUDA graphs, and NCCL."""
