"""Attention of a step over a cache, in one launch: each row attends to the whole cache of its sequence."""
