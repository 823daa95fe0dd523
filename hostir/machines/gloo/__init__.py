"""The machine of CPU processes. It uses gloo, shared files, and threads in the place of streams."""
