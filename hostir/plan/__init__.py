"""One rank's flat program: unrolling, order on streams, and lifetimes of memory; without torch."""
