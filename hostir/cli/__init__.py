"""The command line: one file for each subcommand, and the files that subcommands share."""
