# error: @mlp is a host program already
# hint: --streams is for lowering a fusion
run tests/cases/patterns/mlp-pipeline.hir --streams 2
