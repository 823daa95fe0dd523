# error: @mlp has no size 'M'
# expected: one of: none
run tests/cases/patterns/mlp-pipeline.hir --set M=4
