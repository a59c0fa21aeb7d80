"""The choice of blocks: importance of every candidate, then a radix search for the n-th highest (Eq. 9-11)."""
