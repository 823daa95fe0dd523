"""Executors and their calls: checks of the caller's tensors, parts of sharded tensors, bound and started calls."""
