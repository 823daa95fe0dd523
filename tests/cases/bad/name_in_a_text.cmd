# error: ':mlp' picks a fusion of a .py file
lower tests/cases/patterns/mlp-pipeline.hir:mlp
