# error: unrecognized arguments: --redundent
# hint: hostir lower --help
lower examples/ag_matmul.py --redundent
