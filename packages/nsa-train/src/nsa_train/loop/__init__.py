"""The training loop, and the code between the command line and the loop."""
