"""Order the events of all ranks. Find races, cyclic waits, and kernels that hold SMs and so block each other."""
