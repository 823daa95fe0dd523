# error: cannot write /dev/full: No space left on device
check tests/cases/patterns/mlp-pipeline.hir --fix -o /dev/full
