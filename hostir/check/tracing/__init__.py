"""Trace the events of each rank: accesses to memory, work on streams, communications, and flags."""
