# error: @mlp is a host program already
# hint: --strategy is for lowering a fusion
lower tests/cases/patterns/mlp-pipeline.hir --strategy nonsense
