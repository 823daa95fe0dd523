"""The command line: one file per subcommand, and the loading of programs from files."""
