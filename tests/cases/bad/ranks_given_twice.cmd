# error: @mlp is for 2 ranks, not 4
# hint: have a parameter 'ranks' of its function make the mesh, or leave --ranks out
check examples/patterns.py:mlp --set ranks=2 --ranks 4
