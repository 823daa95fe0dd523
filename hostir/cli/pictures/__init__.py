"""Draw pictures that show the order of a program's events and the findings about it."""
