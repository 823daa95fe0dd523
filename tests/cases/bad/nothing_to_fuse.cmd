# error: 'fused' cannot overlap the allreduce: fused handles only allgathers and reduce_scatters of rows
# expected: an allgather of the rows of a matmul's left side, or a reduce_scatter of rows
# hint: use 'pipeline', which slices any communication along a Stream axis, or 'sequential'
lower examples/patterns.py:row_parallel --strategy fused
