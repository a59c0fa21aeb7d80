"""Attention of a step over a cache: a few rows of each sequence over all that it holds, in three launches."""
