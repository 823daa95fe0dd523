"""Order the events of all ranks; find races, cyclic waits, and kernels that block each other by holding SMs."""
