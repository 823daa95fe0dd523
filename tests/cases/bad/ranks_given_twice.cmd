# error: @mlp is for 2 ranks, not 4
# hint: make the mesh from a parameter 'ranks' of its function, or leave --ranks out
check examples/patterns.py:mlp --set ranks=2 --ranks 4
