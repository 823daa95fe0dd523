# error: @mlp is a host program already
# expected: a fusion
explain tests/cases/patterns/mlp-pipeline.hir
