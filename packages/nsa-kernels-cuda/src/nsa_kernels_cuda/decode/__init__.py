"""Attention of a step over a cache: one row of each sequence over all that it holds, in one launch."""
