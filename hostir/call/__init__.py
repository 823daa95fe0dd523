"""Calls: executors, admission of a caller's tensors, parts of sharded tensors, bound and started calls."""
