"""The `trainer-kit` command, one file per verb."""
