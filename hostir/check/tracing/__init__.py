"""Trace what each rank does as events: memory, streams, communications, flags."""
