"""The subcommands, one file per question: each parses, calls one function and prints."""
