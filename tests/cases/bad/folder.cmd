# error: examples is a folder
# expected: a file
# hint: patterns.py
check examples
