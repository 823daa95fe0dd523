"""The state that a process shares with the other ranks: sessions, groups, agreements, symmetric memory, watchdog."""
