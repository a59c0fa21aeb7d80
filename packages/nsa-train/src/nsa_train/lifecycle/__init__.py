"""The processes of a run: start, console, requests to stop, and exit codes."""
