# error: --set N=1000000000000000000000: not a size
# expected: an integer from 0, of at most 18 digits
run tests/cases/bad/run_size_not_bound.hir --set N=1000000000000000000000
