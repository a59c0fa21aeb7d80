"""Attention of a step over a cache, in one launch: one row of each sequence attends to the whole cache of its sequence."""
