"""The training loop, and the way from a command line to it."""
