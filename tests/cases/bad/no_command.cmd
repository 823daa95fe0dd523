# error: the following arguments are required: command
# hint: hostir --help

