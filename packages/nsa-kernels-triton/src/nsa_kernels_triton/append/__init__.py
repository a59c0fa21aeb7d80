"""Write a step into a cache: the new rows of every store, and the compressed blocks that they complete."""
