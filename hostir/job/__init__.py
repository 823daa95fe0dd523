"""State of a process in a job: sessions, groups, agreement of ranks, symmetric memory, watchdog."""
