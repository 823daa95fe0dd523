# error: @mlp is a host program already
lower tests/cases/patterns/mlp-pipeline.hir --all
