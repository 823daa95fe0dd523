"""The machine of CPU processes: gloo, shared files, and threads in the place of streams."""
