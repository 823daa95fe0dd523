"""Machines that run a program: simulated ranks, CPU processes, GPUs."""
