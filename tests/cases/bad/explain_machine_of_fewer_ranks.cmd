# error: @ag_matmul is for 8 ranks, and there are 4
# hint: build it for 4 (--ranks 4, if its function has a parameter 'ranks'), or take a machine with 8
explain examples/ag_matmul.py --machine h200x4
