# error: 'fused' cannot overlap the alltoall: fused handles only allgathers and reduce_scatters of rows, and allreduces
# expected: an allgather of the rows of a matmul's left side, a reduce_scatter of rows, or an allreduce
# hint: use 'pipeline', which slices any communication along a Stream axis, or 'sequential'
lower examples/patterns.py:alltoall --strategy fused
