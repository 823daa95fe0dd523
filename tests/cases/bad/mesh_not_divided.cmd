# error: the mesh's 7 ranks do not divide
run examples/patterns.py:row_parallel --ranks 7
