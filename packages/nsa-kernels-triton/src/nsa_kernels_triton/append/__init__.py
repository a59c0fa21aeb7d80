"""Writing of a step into a cache: its rows of every store, and the compressed blocks that they complete."""
