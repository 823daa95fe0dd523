# error: @mlp is for 4 ranks, not 8
run tests/cases/patterns/mlp-pipeline.hir --ranks 8
