"""The `apar` command, one module a subcommand."""
