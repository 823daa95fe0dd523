"""Run programs: the interpreter's machines, kernels, sessions and the watchdog. Loads torch."""
