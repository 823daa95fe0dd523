"""Order the events of all ranks, and find what the order leaves open: races, cyclic waits, held SMs."""
