"""The command line: one file a subcommand, and the programs that it reads from files."""
