"""Machines that run programs: simulated ranks in one process, CPU processes, and GPUs."""
