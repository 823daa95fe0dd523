# error: --set N=-1: not a size
# expected: a positive integer
run tests/cases/bad/run_size_not_bound.hir --set N=-1
