"""Pictures of a program and of its findings."""
