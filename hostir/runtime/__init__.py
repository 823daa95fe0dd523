"""What runs programs: the interpreter, the machines, the kernels, and what watches them. Loads torch."""
