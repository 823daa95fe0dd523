# error: --set N=-1: not a size
# expected: an integer from 0
run tests/cases/bad/run_size_not_bound.hir --set N=-1
