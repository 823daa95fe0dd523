# error: /dev/zero is a device
# expected: a file
lower /dev/zero
