# error: the name of the file is empty
# expected: a file
lower :mlp
