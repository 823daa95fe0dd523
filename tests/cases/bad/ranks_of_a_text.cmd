# error: @mlp is for 4 ranks, not 8
# hint: leave --ranks out: a text has its meshes
run tests/cases/patterns/mlp-pipeline.hir --ranks 8
